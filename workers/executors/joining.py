"""Ranks that are started for a group of replicas while the others work."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...dataflow.errors import WorkerError
from .process_backend import Ref
from .rank_group import RankGroup, all_results

__all__ = ["Joining"]


class Joining:
    """Ranks on their way: their processes start, and build what the others of the group have built.

    Args:
        group: The group.
        num_ranks: How many it is to have.
        held: What was reserved for all groups.
        hosted: Programs, workers and the weight channel's name, stored.
        seed: The run's.
        start_s: How long starting may take.

    Raises:
        PlanError: If there are no devices for them.

    Attributes:
        num_ranks: See above.
        ranks: Those that join.
    """

    def __init__(
        self,
        group: RankGroup,
        num_ranks: int,
        held: Sequence[object],
        hosted: Ref,
        seed: int,
        start_s: float,
    ) -> None:
        self.num_ranks = num_ranks
        self.ranks = range(group.num_ranks, num_ranks)
        self._group, self._start_s = group, start_s
        self._end_s = time.monotonic() + start_s
        group.reserve(self.ranks, held)
        self._calls = group.join(group.spawn(start_s, self.ranks))
        self._calls += [
            group.call(process, "build", hosted, seed)
            for rank in self.ranks
            for process in group.group.processes(rank)
        ]

    def is_ready(self) -> bool:
        """Whether all have built their roles; comes back at once.

        Raises:
            PenstockError: If one fails, or the time is up.
        """
        backend = self._group.backend
        ready = backend.watch(self._calls, 0.0) if self._calls else []
        all_results(backend, ready, "starting to join its group", self._start_s)
        self._calls = [call for call in self._calls if call not in ready]
        if self._calls and time.monotonic() > self._end_s:
            raise WorkerError(f"a rank was still starting after {self._start_s:g} s")
        return not self._calls

    def give_up(self) -> None:
        """End those that have started."""
        self._group.end(self.ranks, closing=False)
