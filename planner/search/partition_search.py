"""One partition of the call groups, and the boxes of allocations that are still to be looked at.

The bound of a box is that of `bounds.py` with every call at its least duration within the box. A
box that holds one allocation only is evaluated: the options of its groups are played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from math import inf, prod

import numpy as np

from .allocation import AllocationGrid, Boxes, Corners, Index, Pool, Space
from .bounds import StepBound
from .choices import MOST_COMBINED, Choice, Choices, Front
from .options import Option, Partition
from .step_time import StepTimer

_AT_ONCE = 1024  # choices of options whose bounds are computed at once


@dataclass(frozen=True)
class Found:
    step_time_s: float  # seconds per step
    partition: Partition  # call groups of every group
    allocation: tuple[Index, ...]  # index of every group
    options: dict[str, Option]  # call group -> how it runs


class Branch:
    def __init__(self, choices: Choices, partition: Partition, max_lag: int) -> None:
        self.partition, self.space = partition, choices.space
        self.fixed = choices.pins.fixed(partition)
        self._fixed_index = [
            choices.space.index_of(devices, "pin devices") if devices else None
            for devices in self.fixed
        ]
        self._grid = AllocationGrid(choices.space, self.fixed)
        self._groups = [choices.group(call_groups) for call_groups in partition]
        number = {name: k for k, group in enumerate(partition) for name in group}
        placed = [number[call.call_group] for call in choices.calls]
        self._bound = StepBound(choices.calls, placed, max_lag)
        self._timer = StepTimer(choices.calls, placed, max_lag)
        self._num_calls = len(choices.calls)
        self.open = self._grid.nothing()
        self.least_s = self.dropped_s = inf
        self.num_cut_short = 0

    def root(self) -> Boxes:
        return self.bounded(self._grid.root())

    def split(self, boxes: Boxes) -> Boxes:
        return self.bounded(self._grid.split(boxes))

    def add(self, boxes: Boxes) -> None:
        self.open = self.open.plus(boxes)
        self.least_s = float(self.open.bound.min(initial=inf))

    def take(self, limit: int, below_s: float) -> Boxes:
        keep = self.open.bound < below_s
        # What is dropped bounds what may have been missed.
        self.dropped_s = min(self.dropped_s, float(self.open.bound[~keep].min(initial=inf)))
        boxes = self.open.where(keep).best_first()
        taken = np.arange(len(boxes)) < limit
        self.open = boxes.where(~taken)
        return boxes.where(taken)

    def bounded(self, corners: Corners) -> Boxes:
        low, high = corners
        durations_s = np.empty((self._num_calls, len(low)))
        for k, group in enumerate(self._groups):
            durations_s[list(group.calls)] = group.range_min(low[:, k], high[:, k]).T
        can = np.isfinite(durations_s).all(0)
        return Boxes(low[can], high[can], self._bound(durations_s[:, can]))

    def evaluate(
        self, allocation: tuple[Index, ...], below_s: float, *, last: bool = False
    ) -> Found | None:
        given = zip(allocation, self._fixed_index, strict=True)
        if any(fixed is not None and index != fixed for index, fixed in given):
            return None
        if not self.space.fits(allocation, self.fixed):
            return None
        fronts = self._fronts(allocation, below_s)
        # What was not tried may be better: it stays in the gap that is reported.
        count = prod(len(front.choices) for front in fronts)
        if last and not (count <= MOST_COMBINED and all(front.complete for front in fronts)):
            self.num_cut_short += 1
            at = np.array([allocation], np.int64)
            self.dropped_s = min(self.dropped_s, float(self.bounded((at, at)).bound[0]))
        best: tuple[Choice, ...] | None = None
        for choice, bound_s in self._combinations(fronts):
            if bound_s >= below_s:
                continue
            step_time_s = self._timer.seconds(self._durations_s(choice))
            if step_time_s < below_s:
                best, below_s = choice, step_time_s
        if best is None:
            return None
        options = {
            call_group: option
            for group, choice in zip(self._groups, best, strict=True)
            for (call_group, _), option in zip(group.heads, choice.options, strict=True)
        }
        return Found(below_s, self.partition, allocation, options)

    def _fronts(self, allocation: tuple[Index, ...], below_s: float) -> list[Front]:
        if len(self._groups) == 1:
            # Alone, a group works off its calls one after another: the least sum is the best.
            return [self._groups[0].least_work(allocation[0], below_s)]
        return [
            group.front(index, below_s)
            for group, index in zip(self._groups, allocation, strict=True)
        ]

    def _combinations(self, fronts: Sequence[Front]) -> Iterator[tuple[tuple[Choice, ...], float]]:
        combinations = islice(product(*(front.choices for front in fronts)), MOST_COMBINED)
        while some := list(islice(combinations, _AT_ONCE)):
            bounds_s = self._bound(np.array([self._durations_s(choice) for choice in some]).T)
            for k in np.argsort(bounds_s, kind="stable"):
                yield some[k], float(bounds_s[k])

    def _durations_s(self, choice: Sequence[Choice]) -> list[float]:
        durations_s = [0.0] * self._num_calls
        for group, chosen in zip(self._groups, choice, strict=True):
            for call, seconds in zip(group.calls, chosen.durations_s, strict=True):
                durations_s[call] = seconds
        return durations_s


def fair_shares(space: Space, work: Sequence[float]) -> tuple[Index, ...] | None:
    """Whole nodes for every group, one at least, as near as can be to its share of the work."""
    num_nodes = sum(len(pool.nodes) for pool in space.pools)
    if num_nodes < len(work):
        return None
    nodes = [1] * len(work)
    for _ in range(num_nodes - len(work)):
        nodes[max(range(len(work)), key=lambda k: work[k] / nodes[k])] += 1
    left = [len(pool.nodes) for pool in space.pools]
    allocation: list[Index] = []
    for count in nodes:
        index: list[int] = []
        for k, pool in enumerate(space.pools):
            taken = min(count, left[k])
            left[k] -= taken
            count -= taken
            index.append(pool.node_size - 1 + taken if taken else 0)
        allocation.append(tuple(index))
    return tuple(allocation)


def plunge(branch: Branch) -> tuple[Index, ...] | None:
    """An allocation, by keeping the better half of the box until nothing is left to split."""
    boxes = branch.root()
    while len(boxes) and not boxes.is_point[0]:
        boxes = branch.split(boxes)
        boxes = boxes.best_first().where(np.array([0])) if len(boxes) else boxes
    return boxes.point(0) if len(boxes) else None


def improved(branch: Branch, found: Found, check: Callable[[], None]) -> Iterator[Found]:
    """Move devices from one group to another for as long as that helps; yields every step."""
    while True:
        check()
        moves = _moves(branch.space.pools, found.allocation)
        if not moves:
            return
        at = np.array(moves, np.int64)
        boxes = branch.bounded((at, at)).best_first()
        better: Found | None = None
        for row in range(int((boxes.bound < found.step_time_s).sum())):
            better = branch.evaluate(boxes.point(row), found.step_time_s)
            if better is not None:
                break
        if better is None:
            return
        yield better
        found = better


def _moves(pools: Sequence[Pool], allocation: tuple[Index, ...]) -> list[tuple[Index, ...]]:
    moves: list[tuple[Index, ...]] = []
    for sender, receiver in permutations(range(len(allocation)), 2):
        for k, pool in enumerate(pools):
            # Powers of two reach any number of nodes in few moves, and are few to try.
            nodes = [1 << n for n in range(len(pool.nodes).bit_length())]
            for amount in [*range(1, pool.node_size), *(pool.node_size * n for n in nodes)]:
                given = _position(pool, pool.sizes[allocation[sender][k]] - amount)
                taken = _position(pool, pool.sizes[allocation[receiver][k]] + amount)
                if given is None or taken is None:
                    continue
                moved = list(allocation)
                for group, position in ((sender, given), (receiver, taken)):
                    index = list(moved[group])
                    index[k] = position
                    moved[group] = tuple(index)
                moves.append(tuple(moved))
    return moves


def _position(pool: Pool, num_devices: int) -> int | None:
    if 0 <= num_devices < pool.node_size:
        return num_devices
    nodes, rest = divmod(num_devices, pool.node_size)
    if rest or not 0 < nodes <= len(pool.nodes):
        return None
    return pool.node_size - 1 + nodes
