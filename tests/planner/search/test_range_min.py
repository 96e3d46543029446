"""Minima of boxes against looking at every element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.search.range_min import RangeMin


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_equals_the_minimum_of_the_box(sides: list[int], rows: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    values = rng.random((rows, *sides))
    values[rng.random(values.shape) < 0.2] = np.inf
    ends = np.sort(np.stack([rng.integers(0, side, (20, 2)) for side in sides], 2), 1)
    low, high = ends[:, 0], ends[:, 1]
    found = RangeMin(values)(low, high)
    for k in range(20):
        box = (slice(None), *(slice(a, b + 1) for a, b in zip(low[k], high[k], strict=True)))
        assert found[k].tolist() == values[box].reshape(rows, -1).min(1).tolist()
