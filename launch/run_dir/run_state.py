"""Whether a run goes on, and if not, how it ended, as far as its files and its lock tell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from ...dataflow.regular_files import open_regular
from .run_folder import RunRecord, lock_holder

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
    if _is_held(record.folder.lock):
        return "running"
    if record.fault:
        return "damaged"
    if record.summary is None:
        return "not running"
    summary = cast(Any, record.summary)
    stopped = isinstance(summary, Mapping) and cast(Mapping[str, Any], summary).get("stopped")
    return "stopped" if stopped else "finished"


def _is_held(lock: Path) -> bool:
    """Whether another process holds a run's lock."""
    try:
        descriptor = open_regular(lock, links=False)
    except OSError:
        return False
    try:
        return lock_holder(descriptor) is not None
    finally:
        os.close(descriptor)
