"""Where a Ray of ours keeps its sessions, and clearing away what killed processes left there.

Each process that starts Ray has a folder of its own below one of this user's, and holds its lock
for as long as it lives. A process that is killed leaves Ray's processes running for up to a minute
and its folder for ever; the next start finds the lock free, and ends and removes both.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from ....dataflow.errors import ConfigError

_LOCK = ".lock"
_STOP_S = 5.0
_OLD_S = 60.0
"""A folder without a lock that is older belongs to nobody."""
_SOCKET = "/abcdefgh/session_2026-11-22_12-00-00_000000_4194304/sockets/plasma_store"
"""What Ray adds, at its longest, to the folder of a user."""
_LONGEST_SOCKET = 104
"""Characters that a socket's path may have."""


class SessionFolder:
    """This process's folder, made now; those of processes that are no more are removed.

    Raises:
        ConfigError: If somebody else owns the folder in which all of this user's lie.
    """

    def __init__(self) -> None:
        top = _users_folder()
        top.mkdir(mode=0o700, exist_ok=True)
        if top.is_symlink() or top.stat().st_uid != os.getuid():
            raise ConfigError(
                f"'{top}' belongs to somebody else, and Ray's files are to lie there\n"
                "    remove it, or set TMPDIR to a folder of your own"
            )
        for folder in top.iterdir():
            _clear_if_left(folder)
        made = Path(tempfile.mkdtemp(prefix=_NEW, dir=top))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(top / made.name.removeprefix(_NEW))  # locked before it counts

    def remove(self) -> None:
        """Remove it, once Ray has ended."""
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


_NEW = "new."


def _users_folder() -> Path:
    """Where this user's folders lie: in the temporary folder, if Ray's sockets fit in there."""
    name = f"penstock-ray-{os.getuid()}"
    for temporary in (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "/tmp"):
        if len(f"{temporary}/{name}{_SOCKET}") <= _LONGEST_SOCKET:
            return Path(temporary) / name
    return Path("/tmp") / name


def _clear_if_left(folder: Path) -> None:
    """End what still runs out of a folder and remove it, unless its process lives."""
    if folder.name.startswith(_NEW):
        with contextlib.suppress(OSError):  # it has got its name
            if time.time() - folder.stat().st_mtime > _OLD_S:
                shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # being made or removed by its process at this moment
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        ours = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
        left = [
            process
            for process in psutil.process_iter()
            if process.pid not in ours and _runs_in(process, folder)
        ]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=_STOP_S)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    """Whether it is a process of Ray's that was started with that folder, or has files open there.

    Ray's processes write other words over those that they were started with, but keep their logs.
    """
    inside = f"{folder}/"
    try:
        words = process.cmdline()
        program = " ".join(words[:3])
        if not (program.startswith("ray::") or "/ray/" in program):
            return False
        return any(inside in word for word in words) or any(
            file.path.startswith(inside) for file in process.open_files()
        )
    except (psutil.Error, OSError):  # it has ended
        return False
