"""The kinds of sandbox, strongest first, and how a process of each is started.

All but the last give up capabilities, leave only the system calls of
`syscalls.py`, and open only the files that Landlock lets them, where the kernel has it. What they
add to that:

| kind | in it |
|---|---|
| `bubblewrap` | namespaces of its own, made by the maintained tool `bwrap` |
| `namespaces` | the same ones, made by the process itself |
| `landlock` | nothing: it writes no file at all, and `stat` tells it what lies outside |
| `limits` | no confinement: your rights, bounded in time and memory |

Not covered: a bug of the kernel itself, and what heavy use of CPU and memory caches betrays.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from . import syscalls
from .confine import DEVICES, FOLDER

_CODE = Path(__file__).parent


@dataclass(frozen=True)
class SandboxKind:
    """One way to keep a program in."""

    name: str
    has_folder: bool
    """Whether it has a folder in memory to write to, and namespaces of its own."""

    @property
    def folder(self) -> str:
        """Where a program starts, which is its home."""
        if self.has_folder:
            return FOLDER
        return tempfile.gettempdir() if self is LIMITS else "/"

    @property
    def environment(self) -> dict[str, str]:
        """All that a program sees of an environment."""
        return {"LANG": "C.UTF-8", "HOME": self.folder, "TMPDIR": self.folder}

    def missing(self) -> str | None:
        """Why there is no use in trying it here, if something that it needs is not there."""
        machine = os.uname().machine
        if self is LIMITS:
            return None
        if sys.platform != "linux" or machine not in syscalls.ARCHITECTURES:
            return f"it works on Linux on x86-64 and 64-bit ARM, not on {sys.platform} on {machine}"
        if self is BUBBLEWRAP and shutil.which("bwrap") is None:
            return "there is no program bwrap on the PATH"
        return None

    def command(
        self, code: Path | None, descriptor: int, *, python_environment: bool = False
    ) -> list[str]:
        """What to start, for a process (`confine.py` in `code`) told on `descriptor` the rest.

        -I -S: neither the environment nor installed packages have a say. With `python_environment`
        variables such as `PYTHONHASHSEED` count.
        """
        folder = str(code or _CODE)
        script = f"import sys; sys.path.insert(0, {folder!r}); import confine; "
        script += f"confine.main({descriptor})"
        isolated = ["-s", "-P"] if python_environment else ["-I"]
        python = [os.path.realpath(sys.executable), *isolated, "-S", "-B", "-c", script]
        return [*_bubblewrap(folder, python[0]), *python] if self is BUBBLEWRAP else python

    def setup(self) -> dict[str, Any]:
        """What the process is told of its confinement."""
        made: dict[str, Any] = {"kind": self.name, "folder": self.folder}
        if self is not LIMITS:
            made["readable"] = [path for _, path in _readable()]
            made["places"] = [*_readable(), *((path, path) for path in DEVICES)]
            made["filter"] = _filter()
            made["own_pid"] = syscalls.OWN_PID
        return made


BUBBLEWRAP = SandboxKind("bubblewrap", has_folder=True)
NAMESPACES = SandboxKind("namespaces", has_folder=True)
LANDLOCK = SandboxKind("landlock", has_folder=False)
LIMITS = SandboxKind("limits", has_folder=False)
KINDS = (BUBBLEWRAP, NAMESPACES, LANDLOCK, LIMITS)
"""Strongest first."""


@lru_cache(maxsize=1)
def _filter() -> str:
    return syscalls.program_for(os.uname().machine).hex()


@lru_cache(maxsize=1)
def _readable() -> Sequence[tuple[str, str]]:
    """Where Python's library and the system's libraries are, and what they look up.

    Pairs of the real path and the one it is known by; both may be asked for.
    """
    library = os.path.dirname(os.__file__)
    extensions = os.path.join(sys.base_exec_prefix, "lib")
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    known = (extensions, library, *system, "/etc/ld.so.cache", "/etc/localtime")
    pairs: dict[str, str] = {}
    for path in known:
        real = os.path.realpath(path)
        if not os.path.exists(real):
            continue
        for one in (path, real):
            # Places within one that is seen already are seen with it.
            if not any(_within(one, seen) and _within(real, pairs[seen]) for seen in pairs):
                pairs[one] = real
    return [(real, path) for path, real in pairs.items()]


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _bubblewrap(code: str, python: str) -> list[str]:
    """`bwrap` with all its namespaces; the child adds the folder, with which it ends as well."""
    found = shutil.which("bwrap")
    assert found is not None, "missing() tells"
    shown = [*_readable(), (python, python), (code, code)]
    return [
        found,
        *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"),
        *("--unshare-cgroup-try", "--die-with-parent", "--as-pid-1"),
        *("--cap-add", "CAP_SYS_ADMIN"),  # to mount the folder; given up right after
        *(word for real, path in shown for word in ("--ro-bind", real, path)),
        *(word for path in DEVICES for word in ("--dev-bind", path, path)),
        *("--dir", FOLDER, "--remount-ro", "/", "--chdir", "/", "--"),
    ]
