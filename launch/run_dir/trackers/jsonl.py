"""The run's own record of its steps: `metrics.jsonl` in the folder of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..metrics import MetricsLog
from ..run_folder import RunFolder
from .tracker import RunInfo

__all__ = ["JsonlTracker"]


class JsonlTracker:
    """Writes a line per step; see `Tracker`.

    What evaluations find is not for it: they stand between steps, and in summary.json.
    """

    def __init__(self) -> None:
        self._folders: Mapping[str, Path] = {}
        self._log: MetricsLog | None = None

    def start(self, run: RunInfo) -> None:
        """Remember where the stages' files are."""
        self._folders = run.folders

    def rewind(self, step: int, stage: str) -> None:
        """Open the stage's file without its lines from the step on; see `MetricsLog`."""
        self.finish(None)
        self._log = MetricsLog(RunFolder(self._folders[stage]).metrics, first_step=step)

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        assert self._log is not None, f"stage '{stage}' has not begun"
        self._log.write(step, metrics)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file."""
        del summary
        if self._log is not None:
            self._log.close()
            self._log = None
