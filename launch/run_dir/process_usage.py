"""The memory and processor time of a run's processes: sampled, because processes come and go."""

from __future__ import annotations

import logging
import threading

import psutil

from ...dataflow.runtime.worker_protocol import CLOSE_S

_LOG = logging.getLogger("penstock.launch")


class ProcessUsage:
    """Watches this process and all below it, while entered.

    The sum of resident memory counts pages that processes share once for each of them.
    """

    def __init__(self, every_s: float = 0.5) -> None:
        self.peak_bytes = 0
        self._every_s = every_s
        self._root = psutil.Process()
        self._cpu_s: dict[psutil.Process, float] = {}
        self._cpu_s_before = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process-usage", daemon=True)

    def sample(self) -> int:
        total = 0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                total += process.memory_info().rss
                self._cpu_s[process] = _cpu_s(process)
            except psutil.NoSuchProcess:  # it ended between being listed and being asked
                continue
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values()) - self._cpu_s_before

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()

    def __enter__(self) -> ProcessUsage:
        self.sample()
        self._cpu_s_before = sum(self._cpu_s.values())  # also of children that were there before
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning(
                "taking a sample of memory has not ended in %g s; its peak is left out", CLOSE_S
            )
            return
        self.sample()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
