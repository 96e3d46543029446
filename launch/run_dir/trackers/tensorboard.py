"""Metrics as TensorBoard event files, readable while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from os import getpid
from pathlib import Path
from socket import gethostname
from typing import Any

from ....dataflow.files import writing
from .tracker import RunInfo

_FOLDER = "tensorboard"  # below a stage's folder; every start adds a file to it


_STRING = 7  # `DT_STRING` of TensorBoard's `DataType`


class TensorBoardTracker:
    """Writes `tensorboard/` into the folder of each stage; see `Tracker`."""

    def __init__(self) -> None:
        self._folders: Mapping[str, Path] = {}
        self._not_reproducible = ""
        self._writer: Any = None

    def start(self, run: RunInfo) -> str:
        self._folders = run.folders
        self._not_reproducible = run.not_reproducible
        return f"tensorboard --logdir {[*run.folders.values()][-1]}"

    def rewind(self, step: int, stage: str) -> None:
        # Imported here: it costs most of a second, and a run may do without.
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._messages: Any = event_pb2
        self.finish(None)
        folder = self._folders[stage] / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_a_later_name(folder)
        self._path = folder / f"events.out.tfevents.{int(time.time())}.{gethostname()}.{getpid()}"
        # TensorBoard's own writer has a thread, which prints a traceback when the disk is full.
        self._writer = RecordWriter(self._path.open("xb"))
        self._write(0, file_version="brain.Event:2")
        if self._not_reproducible:
            self._write(
                step, summary={"value": [_text("not reproducible", self._not_reproducible)]}
            )
        if step:
            begin = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._write(step, session_log=begin)

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": float(x)} for name, x in metrics.items()]
        self._write(step, summary={"value": values})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self._path):
                writer.close()

    def _write(self, step: int, **content: Any) -> None:
        event = self._messages.Event(step=step, wall_time=time.time(), **content)
        with writing(self._path):
            self._writer.write(event.SerializeToString())
            self._writer.flush()


def _text(tag: str, text: str) -> dict[str, Any]:
    plugin = {"plugin_data": {"plugin_name": "text"}}
    tensor = {"dtype": _STRING, "string_val": [text.encode()]}
    return {"tag": tag, "metadata": plugin, "tensor": tensor}


def _wait_for_a_later_name(folder: Path) -> None:
    # Wait, for a second at most, until a new file's name sorts behind those in the folder.
    # TensorBoard reads files in the order of their names, which hold the second of their start.
    seconds = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")]
    if max(seconds, default=0) >= int(time.time()):
        time.sleep(1.0)
