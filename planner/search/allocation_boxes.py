"""Boxes of allocations: a range of positions for every group in every pool's sizes.

A box can be tightened, because the groups use every device, and split in the middle of its widest
range, until it holds one allocation only. What an allocation is worth is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .allocation import Index, Space

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

# the first and the last position of boxes: boxes x groups x pools
Corners: TypeAlias = tuple[Ints, Ints]


@dataclass(frozen=True)
class Boxes:
    """Some boxes with what is known of them."""

    low: Ints  # boxes x groups x pools, the first position
    high: Ints  # the last
    bound: Floats  # boxes; nothing inside has a lower value

    def __len__(self) -> int:
        return len(self.bound)

    def where(self, rows: NDArray[np.bool_] | Ints) -> Boxes:
        return Boxes(self.low[rows], self.high[rows], self.bound[rows])

    def plus(self, other: Boxes) -> Boxes:
        return Boxes(
            np.concatenate((self.low, other.low)),
            np.concatenate((self.high, other.high)),
            np.concatenate((self.bound, other.bound)),
        )

    def best_first(self) -> Boxes:
        return self.where(np.argsort(self.bound, kind="stable"))

    @property
    def is_point(self) -> NDArray[np.bool_]:
        return (self.low == self.high).all((1, 2))

    def point(self, row: int) -> tuple[Index, ...]:
        return tuple(tuple(int(k) for k in index) for index in self.low[row])


class AllocationGrid:
    """The boxes of a number of groups in a space."""

    def __init__(self, space: Space, fixed: Sequence[Sequence[int]]) -> None:
        self._space, self._fixed = space, fixed
        self._sizes = [np.array(pool.sizes) for pool in space.pools]

    def nothing(self) -> Boxes:
        empty = np.zeros((0, len(self._fixed), len(self._sizes)), np.int64)
        return Boxes(empty, empty, np.zeros(0))

    def root(self) -> Corners:
        low = np.zeros((1, len(self._fixed), len(self._sizes)), np.int64)
        high = low + np.array(self._space.shape) - 1
        for k, devices in enumerate(self._fixed):
            if devices:
                low[0, k] = high[0, k] = self._space.index_of(devices, "pin devices")
        return self._tightened(low, high)

    def split(self, boxes: Boxes) -> Corners:
        rows = np.arange(len(boxes))
        ends = [
            [np.maximum(sizes[at[:, :, k]], 0.5) for k, sizes in enumerate(self._sizes)]
            for at in (boxes.low, boxes.high)
        ]
        num_ranges = len(self._fixed) * len(self._sizes)
        low, high = (np.stack(end, 2).reshape(-1, num_ranges) for end in ends)
        widest = (high / low).argmax(1)
        group, pool = np.divmod(widest, len(self._sizes))
        middle = np.sqrt(low[rows, widest] * high[rows, widest])
        cut = np.zeros(len(boxes), np.int64)
        for k, sizes in enumerate(self._sizes):
            cut = np.where(pool == k, np.searchsorted(sizes, middle, "right") - 1, cut)
        cut = np.clip(cut, boxes.low[rows, group, pool], boxes.high[rows, group, pool] - 1)
        below, above = boxes.high.copy(), boxes.low.copy()
        below[rows, group, pool], above[rows, group, pool] = cut, cut + 1
        return self._tightened(
            np.concatenate((boxes.low, above)), np.concatenate((below, boxes.high))
        )

    def _tightened(self, low: Ints, high: Ints) -> Corners:
        low, high = low.copy(), high.copy()
        while True:
            before = low.copy(), high.copy()
            for k, (pool, sizes) in enumerate(zip(self._space.pools, self._sizes, strict=True)):
                least, most = sizes[low[:, :, k]], sizes[high[:, :, k]]
                can = pool.num_devices - (least.sum(1, keepdims=True) - least)
                must = pool.num_devices - (most.sum(1, keepdims=True) - most)
                low[:, :, k] = np.maximum(low[:, :, k], np.searchsorted(sizes, must, "left"))
                high[:, :, k] = np.minimum(high[:, :, k], np.searchsorted(sizes, can, "right") - 1)
            good = (low <= high).all((1, 2))
            if good.all() and (low == before[0]).all() and (high == before[1]).all():
                return low, high
            low, high = low[good], high[good]
