"""Whether a run goes on, and if not, how it ended, as far as its files and its lock tell."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from .run_folder import RunRecord

State = Literal["running", "finished", "stopped", "not running", "damaged", "gone"]

WHY: Mapping[State, str] = {
    "running": "a process holds the run's lock",
    "finished": "it has a summary.json",
    "stopped": "its summary.json says that it ended before its last step",
    "not running": (
        "no process holds the run's lock, and there is no summary.json: it was interrupted or "
        "killed; penstock run resume=FOLDER goes on with it"
    ),
    "damaged": "its run.json or summary.json cannot be read",
    "gone": "its folder is no longer there",
}
"""What each of them is known by."""


def state_of(record: RunRecord) -> State:
    """Whether a run goes on, and if not, how it ended, as far as its files tell."""
    if not record.folder.about.is_file():
        return "gone"
    if _is_held(record.folder.path / ".lock"):
        return "running"
    if record.fault:
        return "damaged"
    if record.summary is None:
        return "not running"
    summary = cast(Any, record.summary)
    stopped = isinstance(summary, Mapping) and cast(Mapping[str, Any], summary).get("stopped")
    return "stopped" if stopped else "finished"


# struct flock: Linux has type, whence, start, length, process; macOS begins with start.
_FLOCK = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi4x", 0)


def _is_held(lock: Path) -> bool:
    """Whether another process holds a run's lock.

    It asks and takes nothing: a lock held for a moment could refuse a run that just starts.
    """
    layout, place = _FLOCK
    fields = [0, 0, 0, 0, 0]
    fields[place] = fcntl.F_WRLCK
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, *fields))
    finally:
        os.close(descriptor)
    return struct.unpack(layout, answer)[place] != fcntl.F_UNLCK
