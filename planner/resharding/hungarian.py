"""The cheapest one-to-one assignment: the Hungarian method."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["assign"]


def assign(cost: NDArray[np.int64]) -> tuple[tuple[int, ...], int]:
    """Give each row a column of its own so that the sum of costs is least.

    Shortest augmenting paths with potentials, in integers and therefore exact; n^2 steps of
    vectors of length n. Ties go to the lower column, so the result is deterministic.

    Args:
        cost: i64[n, n].

    Returns:
        The column of each row, and the sum.
    """
    n = len(cost)
    row_price, column_price = np.zeros(n, np.int64), np.zeros(n, np.int64)
    row_of = np.full(n, -1)
    for start in range(n):
        best = np.full(n, np.iinfo(np.int64).max)
        before, done = np.full(n, -1), np.zeros(n, bool)
        reached: list[int] = []
        row, column = start, -1
        # Grow a tree of tight edges from `start` until it reaches a free column.
        while row >= 0:
            slack: NDArray[Any] = cost[row] - row_price[row] - column_price
            nearer = ~done & (slack < best)
            best[nearer], before[nearer] = slack[nearer], column
            open_columns = np.flatnonzero(~done)
            column = int(open_columns[np.argmin(best[open_columns])])
            step = best[column]
            row_price[[start, *(row_of[c] for c in reached)]] += step
            column_price[reached] -= step
            best[open_columns] -= step
            done[column] = True
            reached.append(column)
            row = int(row_of[column])
        # Shift every match along the path by one.
        while column >= 0:
            previous = int(before[column])
            row_of[column] = start if previous < 0 else row_of[previous]
            column = previous
    columns = np.argsort(row_of)
    return tuple(columns.tolist()), int(cost[np.arange(n), columns].sum())
