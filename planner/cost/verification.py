"""Seconds of a call that scores responses on processor cores: a verifier, a sandbox, a judge.

One of R ranks has its share of a step's responses, and n processes of its own take one after
another. Responses differ, so the last process is late; and where all processes together would
compute more than the cores there are, each takes longer:

    verifying = slower(R * n) * max(1, R * n * share that computes / cores) * makespan(rows / R, n)

`slower` is how much longer a response takes while others are verified beside it, as measured.
`Mesh.cores` says which cores are free meanwhile.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..inputs.cluster import Mesh
from ..inputs.task_profile import VerifierProfile

_PLAYED = 32  # responses of each process that are played through; of more the rest take the mean
_ORDERS = 4  # orders of responses whose makespans are averaged
_ENOUGH = 0.01  # share of the seconds for which no more processes are started


@lru_cache(maxsize=1 << 14)
def makespan_s(item_s: tuple[float, ...], num_items: int, num_processes: int) -> float:
    """Seconds until so many responses are verified, of which each process takes the next."""
    played = min(num_items, _PLAYED * num_processes)
    known = (np.arange(len(item_s)) + 0.5) / len(item_s)
    taken: list[float] = np.interp((np.arange(played) + 0.5) / played, known, item_s).tolist()
    ends: list[float] = []
    for order in range(_ORDERS if num_processes > 1 else 1):
        random.Random(order).shuffle(taken)
        free_s = [0.0] * num_processes
        for seconds in taken:
            heapq.heapreplace(free_s, free_s[0] + seconds)
        ends.append(max(free_s))
    rest_s = (num_items - played) * sum(taken) / played / num_processes
    return sum(ends) / len(ends) + rest_s


@dataclass(frozen=True)
class Verifier:
    """A call of a step that has no model and was measured."""

    name: str  # the node's name: "reward.score"
    role: str
    profile: VerifierProfile
    num_rows: int  # responses of a step
    num_processes: int | None = None  # of each rank, if that is fixed

    def seconds(self, num_ranks: int, num_processes: int, cores: float) -> float:
        found, rows = self.profile, -(-self.num_rows // num_ranks)
        at_once = num_ranks * min(num_processes, rows)
        share = min(1.0, (at_once - 1) / max(found.at_once - 1, 1))
        slower = 1.0 + (found.crowded - 1.0) * share
        slower *= max(1.0, at_once * self._computes / cores)
        return slower * makespan_s(found.item_s, rows, num_processes)

    @property
    def _computes(self) -> float:
        """The share of a response's seconds in which a core works."""
        items = self.profile.item_s
        return min(1.0, self.profile.item_cpu_s * len(items) / max(sum(items), 1e-9))

    def numbers(self, num_ranks: int, mesh: Mesh, cores: float) -> list[int]:
        """Numbers of processes of a rank that are worth a look, the fewest first."""
        if self.profile.most is None or self.num_processes is not None:
            return [self.num_processes or self.profile.at_once]
        rows = -(-self.num_rows // num_ranks)
        each = max(1, int(cores / num_ranks / max(self._computes, 1e-3)))
        most = min(rows, self.profile.most)
        if self.profile.process_bytes and mesh.host_bytes is not None:
            room = mesh.host_bytes // (num_ranks * self.profile.process_bytes)
            most = max(1, min(most, room))
        tried = {1 << power for power in range(most.bit_length())} | {1, 3, each, most}
        # Several numbers may give each process equally many responses: keep the least of them.
        fewest = {-(-rows // -(-rows // number)) for number in tried if number <= most}
        return sorted(fewest)

    def on(self, mesh: Mesh, *, lagged: bool) -> tuple[float, int]:
        """Seconds on a mesh, each device of which is a rank, and the fewest processes that do."""
        num_ranks, cores = min(mesh.num_devices, self.num_rows), mesh.cores(lagged=lagged)
        numbers = self.numbers(num_ranks, mesh, cores)
        found = [(self.seconds(num_ranks, number, cores), number) for number in numbers]
        return next(one for one in found if one[0] <= min(found)[0] * (1 + _ENOUGH))
