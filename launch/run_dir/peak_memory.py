"""How much memory a run's processes hold at most: sampled, because processes come and go."""

from __future__ import annotations

import logging
import threading

import psutil

from ...dataflow.runtime.worker_protocol import CLOSE_S

__all__ = ["PeakMemory"]

_LOG = logging.getLogger("penstock.launch")


class PeakMemory:
    """Watches this process and all below it, while entered.

    The sum of resident memory counts pages that processes share once for each of them.

    Args:
        every_s: Seconds between samples; a shorter peak may be missed.

    Attributes:
        peak_bytes: The largest sum seen.
    """

    def __init__(self, every_s: float = 0.5) -> None:
        self.peak_bytes = 0
        self._every_s = every_s
        self._root = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def sample(self) -> int:
        """Resident bytes of the process tree now."""
        total = 0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:  # it ended between being listed and being asked
                continue
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()

    def __enter__(self) -> PeakMemory:
        self.sample()
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
