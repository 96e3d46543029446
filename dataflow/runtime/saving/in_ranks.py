"""States of workers that a process writes while calls go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ...errors import StateError
from ...file_errors import disk_refusal, writing
from ...graph.role import Worker
from ...written_files import Background, WrittenFile
from ..call_stream import overrides
from ..messages import SaveReport
from ..worker_protocol import CLOSE_S

_Written = Mapping[str, WrittenFile]


def refusal_of(write: Callable[[], object], path: Path) -> str:
    """Write something at `path`, and say what kept the disk from taking it; "" if nothing did."""
    try:
        with writing(path):
            write()
    except OSError as error:
        said = disk_refusal(error)
        if said is None:
            raise
        return said
    return ""


class Saves:
    """States that are being written to one checkpoint, each by a thread of its own."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._unwanted = threading.Event()
        self._begun: dict[str, Background[_Written]] = {}

    def begin(self, worker: Worker, folder: Path) -> str:
        """Write a worker's state into a folder of the checkpoint, later if the worker can."""
        # One that was given up may be tried again in a folder of the same name.
        if folder.parent != self._folder or self._unwanted.is_set():
            self.close()
            self._folder, self._unwanted = folder.parent, threading.Event()
        if overrides(worker, "save_state", "take_state"):
            return refusal_of(lambda: worker.save_state(folder), folder)
        write = partial(worker.take_state(), folder, self._unwanted.is_set)
        self._begun[folder.name] = Background(write, f"save {folder.name}")
        return ""

    def report(self, wait_s: float, *, unwanted: bool) -> SaveReport:
        """Say how far it has come, see `Host.save_report`. Asked again, it says the same."""
        if unwanted:
            self._unwanted.set()
        until_s = time.monotonic() + wait_s
        begun = self._begun.items()
        if not all([one.wait(max(until_s - time.monotonic(), 0.0)) for _, one in begun]):
            return SaveReport(writing=True)
        files: dict[str, WrittenFile] = {}
        failed = "it was given up while it was written" if self._unwanted.is_set() else ""
        for name, one in begun:
            failed = failed or refusal_of(one.result, (self._folder or Path()) / name)
            if not failed:
                files |= {f"{name}/{file}": entry for file, entry in one.result().items()}
        return SaveReport(writing=False, files={} if failed else files, failed=failed)

    def close(self) -> None:
        """Have what is being written end; it will not be asked for."""
        self._unwanted.set()
        until_s = time.monotonic() + CLOSE_S
        for name, one in self._begun.items():
            if not one.wait(max(until_s - time.monotonic(), 0.0)):
                raise StateError(
                    f"'{self._folder}/{name}' is still being written and does not end; its disk "
                    "hangs\n    see to the disk, or choose another folder"
                )
        self._begun = {}
