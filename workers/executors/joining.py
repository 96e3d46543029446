"""Ranks of a group of replicas that are started while the others work: new ones, or dead ones."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...dataflow.errors import WorkerError
from ...dataflow.runtime.executor import Restart
from .jobs import RankJob, Started
from .process_backend import Ref
from .rank_group import GroupProcesses, all_results

_SIGN_S = 1.0  # How often is said that a rank is still on its way


class _Starting:
    """Processes that start, and build what the others of their group have built."""

    def __init__(self, group: GroupProcesses, ranks: Sequence[int], here: Started, start_s: float):
        self._backend, self._start_s = group.backend, start_s
        self._end_s = time.monotonic() + start_s
        self.calls: list[Ref] = group.join(group.spawn(start_s, ranks))
        self.calls += [
            group.call(process, "build", here.hosted, here.seed)
            for rank in ranks
            for process in group.group.processes(rank)
        ]

    def is_ready(self) -> bool:
        ready = self._backend.watch(self.calls, 0.0) if self.calls else []
        all_results(self._backend, ready, "starting beside the others", self._start_s)
        self.calls = [call for call in self.calls if call not in ready]
        if self.calls and time.monotonic() > self._end_s:
            raise WorkerError(f"a rank was still starting after {self._start_s:g} s")
        return not self.calls


class Joining:
    """Ranks that a group did not have."""

    def __init__(
        self,
        group: GroupProcesses,
        num_ranks: int,
        held: Sequence[object],
        here: Started,
        start_s: float,
    ) -> None:
        self.num_ranks = num_ranks
        self.ranks = range(group.num_ranks, num_ranks)  # Those that join
        self._group = group
        group.reserve(self.ranks, held)
        self._starting = _Starting(group, self.ranks, here, start_s)

    def is_ready(self) -> bool:
        return self._starting.is_ready()

    def give_up(self) -> None:
        """End those that have started."""
        self._group.end(self.ranks, closing=False)


class Returning:
    """A rank that has died."""

    def __init__(
        self,
        group: GroupProcesses,
        job: RankJob,
        said: str,
        owed: list[RankJob],
        pause_s: float,
        here: Started,
        start_s: float,
    ) -> None:
        self.place = job.group, job.rank  # Group and rank
        self.job, self.said, self.owed = job, said, owed
        self._group, self._here, self._start_s = group, here, start_s
        self._since_s = time.monotonic()
        self._begin_s, self._next_sign_s = self._since_s + pause_s, 0.0
        self._starting: _Starting | None = None
        self.give_up()  # of several processes the others may live

    @property
    def calls(self) -> list[Ref]:
        return self._starting.calls if self._starting is not None else []

    def is_ready(self) -> bool:
        if self._starting is None:
            if time.monotonic() < self._begin_s:
                return False
            if not self._group.is_there():
                raise WorkerError("a machine that it was on is gone")
            ranks = [self.job.rank]
            self._starting = _Starting(self._group, ranks, self._here, self._start_s)
        return self._starting.is_ready()

    def sign(self) -> Restart | None:
        now_s = time.monotonic()
        if now_s < self._next_sign_s:
            return None
        self._next_sign_s = now_s + _SIGN_S
        return self._restart(is_over=False)

    def is_back(self, since_s: float) -> Restart:
        # That it is there again; the executor was busy with it since then (monotonic clock).
        return self._restart(is_over=True, held_up_s=time.monotonic() - since_s)

    def _restart(self, *, is_over: bool, held_up_s: float = 0.0) -> Restart:
        group, rank = self.place
        took_s = time.monotonic() - self._since_s
        return Restart(group, took_s, (rank,), held_up_s=held_up_s, is_over=is_over)

    def give_up(self) -> None:
        """End what has started of it."""
        self._group.kill(self.job.rank)
