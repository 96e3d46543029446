"""Which runs the page shows, under which names, and whether they are still going on.

A request names a run by a key of `KnownRuns.found`, and a stage by its place in `stages_of`, never
by a path: what is in neither is not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ...dataflow.errors import ConfigError
from ..run_dir.run_folder import RunFolder, RunRecord, record_of

__all__ = ["Gone", "KnownRuns", "State", "home_of", "load_object", "stages_of", "state_of"]

State = Literal["running", "finished", "stopped", "not running", "damaged", "gone"]

_WHY: Mapping[State, str] = {
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


class Gone(ConfigError):
    """What was asked for is not there, or no longer; the page says so and goes on."""


@dataclass(frozen=True)
class _Stamp:
    """By which a file is known to be the one that was read before."""

    inode: int
    size_bytes: int
    modified_ns: int


class KnownRuns:
    """The runs that a page shows.

    Args:
        folders: Of these runs; none stands for all runs in `runs`, also those that come later.
        runs: The folder of all runs.
    """

    def __init__(self, folders: Sequence[Path], runs: Path) -> None:
        self._folders, self._runs = tuple(folders), runs
        self._records: dict[Path, tuple[tuple[_Stamp | None, ...], RunRecord]] = {}

    def found(self) -> dict[str, RunFolder]:
        """Key -> folder: those that were given, or all that are there now.

        A key is the folder's name, with a number behind it if two have the same.
        """
        paths = self._folders or tuple(sorted(_runs_in(self._runs)))
        keys: dict[str, RunFolder] = {}
        for path in paths:
            key, number = path.name, 2
            while key in keys:
                key, number = f"{path.name} ({number})", number + 1
            keys[key] = RunFolder(path)
        return keys

    def folder(self, key: str) -> RunFolder:
        """The folder of a run that is there.

        Raises:
            Gone: If no run has that key, or its folder is no longer there.
        """
        folder = self.found().get(key)
        if folder is None or not folder.about.is_file():
            raise Gone("this run is no longer there: its folder was removed or renamed")
        return folder

    def listed(self) -> list[dict[str, Any]]:
        """What the page's list says of each run, in the order of `found`."""
        return [self._line(key, folder) for key, folder in self.found().items()]

    def _line(self, key: str, folder: RunFolder) -> dict[str, Any]:
        if not folder.about.is_file():
            return {"key": key, "state": "gone", "why": _WHY["gone"], "stages": []}
        record = self.record(folder)
        state = state_of(record)
        return {
            "key": key,
            "name": record.name,
            "seed": record.seed,
            "created": record.created.isoformat(),
            "state": state,
            "why": record.fault or _WHY[state],
            "stages": stages_of(folder),
        }

    def record(self, folder: RunFolder) -> RunRecord:
        """What the run's files say; they are read again only when they have changed."""
        stamps = (_stamp(folder.about), _stamp(folder.summary))
        known = self._records.get(folder.path)
        if known is None or known[0] != stamps:
            known = self._records[folder.path] = (stamps, record_of(folder))
        return known[1]


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


def stages_of(folder: RunFolder) -> list[str]:
    """The names of a run's stages before the main one, in the order of their folders' names."""
    stages = folder.path / "stages"
    return sorted(path.name for path in stages.iterdir()) if stages.is_dir() else []


def home_of(folder: RunFolder, stage: str) -> Path:
    """The folder of a stage, or of the main one for "".

    Raises:
        Gone: If there is no such stage.
    """
    if not stage:
        return folder.path
    if stage not in stages_of(folder):
        raise Gone("this run has no such stage")
    return folder.stage(stage).path


def _runs_in(runs: Path) -> list[Path]:
    if not runs.is_dir():
        return []
    return [path for path in runs.iterdir() if (path / "run.json").is_file()]


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


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


def load_object(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None if there is no such file.

    Raises:
        ConfigError: If it is there and is none.
    """
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} cannot be read ({type(error).__name__})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} cannot be read (it holds no object)")
    return cast(dict[str, Any], content)
