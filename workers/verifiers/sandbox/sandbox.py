"""Running Python that a model wrote: in a process of its own, without network and within limits.

Each run has a new process, session and empty folder, an empty environment, and limits on time,
memory, files and output; see `kernel.py` for what the kernel forbids it. Where the kernel does
not offer that, nothing runs unless `allow_unconfined` accepts limits alone. A process that is out
of time is killed, and it cannot have started others.

Not covered: a bug of the kernel itself, and what heavy use of CPU and memory caches betrays.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ....dataflow.errors import ConfigError, WorkerError
from ....dataflow.option_checks import check_range
from .child import UNCONFINED

__all__ = ["Limits", "Ran", "check_sandbox", "run_python"]

_CHILD = Path(__file__).with_name("child.py")
_POLL_S = 0.02
_STOP_S = 5.0
"""Seconds a killed process may take to vanish."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use."""

    time_s: float = 4.0
    """Seconds by the clock, and of CPU time, rounded up."""
    memory_mb: int = 512
    """Address space, Python itself included."""
    folder_mb: int = 16
    """All files it writes, and each one; more ends the run."""
    open_files: int = 64
    """Files open at once."""
    output_bytes: int = 65_536
    """What is kept of each of its output streams."""

    def __post_init__(self) -> None:
        check_range(self, "time_s", above=0)
        check_range(self, "memory_mb", at_least=64)
        check_range(self, "folder_mb", "output_bytes", at_least=1)
        check_range(self, "open_files", at_least=16)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of a run."""

    exit_code: int
    """0 if the program ended by itself; minus the signal that ended it."""
    stdout: str
    stderr: str
    results: Sequence[Mapping[str, Any]] = ()
    """Of each call, then of each assertion, as far as it got: `{"value"}` or `{"error"}`."""
    timed_out: bool = False


def run_python(
    program: str,
    *,
    stdin: str = "",
    calls: Sequence[Mapping[str, Any]] = (),
    asserts: Sequence[str] = (),
    limits: Limits | None = None,
    allow_unconfined: bool = False,
) -> Ran:
    """Run a program, and after it calls of its functions and assertions.

    Args:
        program: Python source; it runs as `__main__` with the standard library.
        stdin: What it reads.
        calls: `{"function", "args", "kwargs"}` each; a function is looked for at the top of the
            program, then in a class `Solution`. What it returns must not be trusted to be true, but
            the program never sees what is expected. With `"typed": True` arguments and the value
            are as `child.typed` makes them.
        asserts: Statements, run one by one among the program's names. A program can make them hold
            that do not: it shares a process with them. Calls and output leave it no such way.
        limits: The default ones if not given.
        allow_unconfined: Run with limits alone where the kernel offers nothing else.

    Raises:
        ConfigError: If the program cannot be confined here and that is not allowed.
        WorkerError: If the process cannot be killed.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    work = {"program": program, "calls": list(calls), "asserts": list(asserts), "token": token}
    with tempfile.TemporaryDirectory(prefix="penstock_sandbox_", ignore_cleanup_errors=True) as top:
        streams = _Streams(Path(top), stdin, json.dumps(work))
        try:
            code, timed_out = _finish(
                _start(streams, limits, not allow_unconfined), streams, limits
            )
            results = streams.results(limits)
            if code == UNCONFINED and results and "unconfined" in results[0]:
                raise ConfigError(_refusal(str(results[0]["unconfined"])))
            checked = [
                r for i, r in enumerate(results) if i < len(calls) or r.get("token") == token
            ]
            return Ran(
                exit_code=code,
                stdout=streams.text("stdout", limits.output_bytes),
                stderr=streams.text("stderr", limits.output_bytes),
                results=[{k: r[k] for k in ("value", "error") if k in r} for r in checked],
                timed_out=timed_out,
            )
        finally:
            streams.close()


def _refusal(reason: str) -> str:
    return (
        f"programs that a model wrote cannot be confined on this machine: {reason}\n    run on a "
        "Linux with seccomp and Landlock (5.13 or newer), or accept that they run with your "
        "rights, bounded in time and memory only: allow_unconfined=true"
    )


@lru_cache(maxsize=1)
def check_sandbox() -> None:
    """Try out that this machine confines programs, once.

    Raises:
        ConfigError: If it does not, with the reason.
    """
    probe = (
        "import os, socket, pathlib\n"
        "def blocked(attempt):\n"
        "    try:\n"
        "        attempt()\n"
        "    except OSError:\n"
        "        return True\n"
        "    return False\n"
        "def network(): return blocked(socket.socket)\n"
        "def files(): return blocked(lambda: os.listdir('/'))\n"
        "def processes(): return blocked(lambda: os.fork() or os._exit(0))\n"
    )
    names = ("network", "files", "processes")
    ran = run_python(probe, calls=[{"function": name} for name in names], limits=Limits(time_s=30))
    held = [name for name, r in zip(names, ran.results, strict=False) if r.get("value") is True]
    if len(held) < len(names):
        missing = ", ".join(name for name in names if name not in held)
        raise ConfigError(_refusal(f"a trial did not keep it from {missing} {ran.stderr[-200:]}"))


class _Streams:
    """Files that a run reads and writes; they lie outside the folder that it sees."""

    def __init__(self, top: Path, stdin: str, work: str) -> None:
        self.folder = top / "folder"
        self.folder.mkdir()
        self.files: dict[str, IO[bytes]] = {}
        for name, text in {"stdin": stdin, "work": work}.items():
            (top / name).write_text(text, encoding="utf-8", errors="replace")
            self.files[name] = (top / name).open("rb")
        for name in ("stdout", "stderr", "results"):
            self.files[name] = (top / name).open("w+b")

    def text(self, name: str, num_bytes: int) -> str:
        """The beginning of what was written."""
        file = self.files[name]
        file.seek(0)
        return file.read(num_bytes).decode("utf-8", errors="replace")

    def results(self, limits: Limits) -> list[Mapping[str, Any]]:
        """The results that can be read; a program may have written there too."""
        found: list[Mapping[str, Any]] = []
        for line in self.text("results", limits.folder_mb << 20).splitlines():
            try:
                read = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(read, dict):
                found.append(read)
        return found

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _start(streams: _Streams, limits: Limits, confined: bool) -> subprocess.Popen[bytes]:
    files = {name: file.fileno() for name, file in streams.files.items()}
    setup = {
        "parent": os.getpid(),
        "work": files["work"],
        "results": files["results"],
        "folder": str(streams.folder),
        "confined": confined,
        "limits": {
            "cpu_s": math.ceil(limits.time_s),
            "memory_bytes": limits.memory_mb << 20,
            "file_bytes": limits.folder_mb << 20,
            "open_files": limits.open_files,
        },
    }
    # -I -S: neither the environment nor installed packages have a say. Nothing is inherited but the
    # streams.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_CHILD), json.dumps(setup)],
        stdin=files["stdin"],
        stdout=files["stdout"],
        stderr=files["stderr"],
        pass_fds=[files["work"], files["results"]],
        env={"LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8", "HOME": str(streams.folder)},
        start_new_session=True,
    )


def _finish(
    process: subprocess.Popen[bytes], streams: _Streams, limits: Limits
) -> tuple[int, bool]:
    """Exit code, and whether the run was ended for what it used of time or disk."""
    deadline = time.monotonic() + limits.time_s
    timed_out = False
    try:
        while process.poll() is None:
            if time.monotonic() >= deadline:
                timed_out = True
                break
            if _bytes_in(streams.folder) > limits.folder_mb << 20:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
    finally:
        _kill(process)
    return process.returncode, timed_out or process.returncode == -signal.SIGXCPU


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below; a file counts at least 4096, so that many empty ones count too."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it may be gone
                total += max(os.lstat(os.path.join(place, name)).st_size, 4096)
    return total


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process's whole session; nothing is left of a process that has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(
            f"process {process.pid}, which ran a model's program, is still there {_STOP_S:g} s "
            "after it was killed"
        ) from error
