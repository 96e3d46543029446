"""Device time-sharing: groups on the same devices work one after another, the others sleep.

Which group works when is the scheduler's to decide (`Flow.sharing`). An executor hands the devices
off: before it gives work to a group that sleeps, it puts the groups with its devices to sleep,
which offload, and wakes it. Inside a group a worker may sleep as well, whenever none of its calls
runs: `Worker.offload`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..graph.role import Worker
from .placement import DeviceGroup, sharing


@dataclass(frozen=True)
class HandOff:
    """The groups that give up devices, and the one that takes them."""

    sleep: tuple[str, ...] = ()  # Groups to put to sleep, first
    wake: str | None = None  # The group to wake then; None if it is awake


class DeviceSharing:
    """The groups that share devices, asleep at first, and those of them that are awake."""

    def __init__(self, groups: Sequence[DeviceGroup]) -> None:
        self._sharing = sharing(groups)
        self._awake: set[str] = set()

    def shares(self, group: str) -> bool:
        return group in self._sharing

    def others(self, group: str) -> frozenset[str]:
        """The groups that have some of its devices."""
        return self._sharing.get(group, frozenset())

    def hand_off(self, group: str) -> HandOff:
        """Give a group its devices; says what is to be done for it."""
        if not self.shares(group) or group in self._awake:
            return HandOff()
        giving = tuple(sorted(self._sharing[group] & self._awake))
        self._awake -= self._sharing[group]
        self._awake.add(group)
        return HandOff(giving, group)


def sleep_workers(workers: Iterable[Worker]) -> None:
    """Put workers to sleep."""
    for worker in workers:
        worker.sleep()


def wake_workers(workers: Iterable[Worker]) -> None:
    """Wake workers, but for those that wait in host memory for their next call."""
    for worker in workers:
        if not worker.offload:
            worker.wake()


def sleep_offloaded(workers: Iterable[Worker]) -> None:
    """Put those to sleep that wait in host memory for their next call."""
    sleep_workers(worker for worker in workers if worker.offload)


@contextmanager
def on_device(workers: Iterable[Worker]) -> Generator[None]:
    waiting = [worker for worker in workers if worker.offload]
    try:
        for worker in waiting:
            worker.wake()
        yield
    finally:
        sleep_workers(waiting)
