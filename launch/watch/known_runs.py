"""Which runs the page shows, under which names, and whether they are still going on.

A request names a run by a key of `KnownRuns.found`, and a stage by its place in `stages_of`, never
by a path: what is in neither is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from ..run_dir.run_folder import RunFolder, RunRecord, record_of
from ..run_dir.run_state import WHY, state_of


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
            return {"key": key, "state": "gone", "why": WHY["gone"], "stages": []}
        record = self.record(folder)
        state = state_of(record)
        return {
            "key": key,
            "name": record.name,
            "seed": record.seed,
            "created": record.created.isoformat(),
            "state": state,
            "why": record.fault or WHY[state],
            "stages": stages_of(folder),
        }

    def record(self, folder: RunFolder) -> RunRecord:
        """What the run's files say; they are read again only when they have changed."""
        stamps = (_stamp(folder.about), _stamp(folder.summary))
        known = self._records.get(folder.path)
        if known is None or known[0] != stamps:
            known = self._records[folder.path] = (stamps, record_of(folder))
        return known[1]


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
