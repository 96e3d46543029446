"""Where a Ray of ours keeps its sessions, and clearing away what killed processes left there.

Each process that starts Ray has a folder of its own below one of this user's, and holds its lock
for as long as it lives. A process that is killed leaves Ray's processes running for up to a minute
and its folder for ever; the next start finds the lock free, and ends and removes both.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import psutil

from ....dataflow.errors import ConfigError

__all__ = ["SessionFolder"]

_LOCK = ".lock"
_STOP_S = 5.0
_LONGEST = 45
"""Characters of a temporary folder in which Ray's sockets can lie, whose names must be short."""


class SessionFolder:
    """This process's folder, made now; those of processes that are no more are removed.

    Raises:
        ConfigError: If somebody else owns the folder in which all of this user's lie.
    """

    def __init__(self) -> None:
        temporary = tempfile.gettempdir()
        temporary = temporary if len(temporary) <= _LONGEST else "/tmp"
        top = Path(temporary) / f"penstock-ray-{os.getuid()}"
        top.mkdir(mode=0o700, exist_ok=True)
        if top.is_symlink() or top.stat().st_uid != os.getuid():
            raise ConfigError(
                f"'{top}' belongs to somebody else, and Ray's files are to lie there\n"
                "    remove it, or set TMPDIR to a folder of your own"
            )
        for folder in top.iterdir():
            _clear_if_left(folder)
        self.path = top / str(os.getpid())
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it, once Ray has ended."""
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


def _clear_if_left(folder: Path) -> None:
    """End what still runs out of a folder and remove it, unless its process lives."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # being made or removed by its process at this moment
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        left = [process for process in psutil.process_iter() if _runs_in(process, folder)]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=_STOP_S)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    """Whether a process of this user was started with that folder, or has files open there.

    Ray's processes write other words over those that they were started with, but keep their logs.
    """
    inside = f"{folder}/"
    try:
        if process.pid == os.getpid() or process.uids().real != os.getuid():
            return False
        return any(inside in word for word in process.cmdline()) or any(
            file.path.startswith(inside) for file in process.open_files()
        )
    except (psutil.Error, OSError):  # it has ended
        return False
