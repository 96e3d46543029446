"""Metrics as TensorBoard event files, readable while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .tracker import RunInfo

__all__ = ["TensorBoardTracker"]

_FOLDER = "tensorboard"
"""Below a stage's folder; every start adds a file to it."""


class TensorBoardTracker:
    """Writes `tensorboard/` into the folder of each stage; see `Tracker`."""

    def __init__(self) -> None:
        self._folders: Mapping[str, Path] = {}
        self._writer: Any = None

    def start(self, run: RunInfo) -> str:
        """Remember the stages' folders.

        Returns:
            The command that shows all of them.
        """
        self._folders = run.folders
        return f"tensorboard --logdir {[*run.folders.values()][-1]}"

    def rewind(self, step: int, stage: str) -> None:
        """Begin a file; TensorBoard is told to forget what earlier ones hold from the step on."""
        # Imported here: it costs most of a second, and a run may do without.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._messages: Any = event_pb2
        self.finish(None)
        folder = self._folders[stage] / _FOLDER
        _wait_for_a_later_name(folder)
        self._writer = EventFileWriter(str(folder))
        if step:
            begin = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._writer.add_event(self._event(step, session_log=begin))
        self._writer.flush()

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Add scalars and flush them."""
        del stage
        event = self._event(step)
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._writer.add_event(event)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Write what is left and end the writer's thread."""
        del summary
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _event(self, step: int, **content: Any) -> Any:
        return self._messages.Event(step=step, wall_time=time.time(), **content)


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait, for a second at most, until a new file's name sorts behind those in the folder.

    TensorBoard reads files in the order of their names. A name holds the second of its start, then
    numbers without padding, so of two files of one second the later may come first.
    """
    seconds = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")]
    if max(seconds, default=0) >= int(time.time()):
        time.sleep(1.0)
