from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.resharding.hungarian import assign


@given(st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([1, 10, 10**15]))
def test_equals_the_best_of_all_permutations(n: int, seed: int, largest: int) -> None:
    cost = np.random.default_rng(seed).integers(-largest, largest + 1, (n, n))
    columns, total = assign(cost)
    assert sorted(columns) == list(range(n))
    assert total == sum(cost[i, c] for i, c in enumerate(columns))
    assert total == min(sum(cost[i, c] for i, c in enumerate(p)) for p in permutations(range(n)))


def test_nothing_to_assign() -> None:
    assert assign(np.zeros((0, 0), np.int64)) == ((), 0)
