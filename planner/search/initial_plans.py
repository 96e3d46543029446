"""Good plans to begin a search with: fair shares, a descent along the bounds, moved devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import numpy as np

from .allocation import Index, Pool, Space
from .partition_search import Branch, Found


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
            for amount in _amounts(pool):
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


def _amounts(pool: Pool) -> list[int]:
    nodes = [1 << k for k in range(len(pool.nodes).bit_length())]
    return [*range(1, pool.node_size), *(pool.node_size * n for n in nodes)]


def _position(pool: Pool, num_devices: int) -> int | None:
    if 0 <= num_devices < pool.node_size:
        return num_devices
    nodes, rest = divmod(num_devices, pool.node_size)
    if rest or not 0 < nodes <= len(pool.nodes):
        return None
    return pool.node_size - 1 + nodes
