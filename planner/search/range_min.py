"""The smallest value in a box of an array, for many boxes at once and without looking at each."""

from __future__ import annotations

from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


class RangeMin:
    """A sparse table: minima of all boxes whose sides are powers of two."""

    def __init__(self, values: Floats) -> None:
        sides = values.shape[1:]
        self._levels = tuple(int(side).bit_length() for side in sides)
        self._table = np.full((*self._levels, *values.shape), np.inf)
        for level in product(*(range(count) for count in self._levels)):
            axis = next((a for a, exponent in enumerate(level) if exponent), None)
            if axis is None:
                self._table[level] = values
                continue
            half = self._table[(*level[:axis], level[axis] - 1, *level[axis + 1 :])]
            step = 1 << (level[axis] - 1)
            left: list[Any] = [slice(None)] * values.ndim
            right = list(left)
            left[axis + 1], right[axis + 1] = slice(None, -step), slice(step, None)
            self._table[level] = half
            np.minimum(half[tuple(left)], half[tuple(right)], out=self._table[level][tuple(left)])

    def __call__(self, low: Ints, high: Ints) -> Floats:
        # frexp gives the bit length, hence the largest power of two that fits.
        exponent = np.frexp((high - low + 1).astype(np.float64))[1] - 1
        last = high - (1 << exponent) + 1
        least: Floats | None = None
        for corner in product((0, 1), repeat=low.shape[1]):
            at = [(last if end else low)[:, axis] for axis, end in enumerate(corner)]
            found = self._table[(*exponent.T, slice(None), *at)]
            least = found if least is None else np.minimum(least, found)
        assert least is not None
        return least
