"""Arguments of the search that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from penstock.dataflow.errors import PlanError
from penstock.planner.search.options import CallNode
from penstock.planner.search.result import SearchResult
from penstock.planner.search.search import search

from .graphs import PPO
from .tables import RandomTable, cluster_of, device

CLUSTER = cluster_of((2, 4, device("a", 40)))
TABLE = RandomTable(PPO, 1)


def nothing_by_then() -> SearchResult:
    """No option anywhere, and a clock that goes on by a second whenever somebody looks."""
    ticks = count()
    none = RandomTable(PPO, 1, missing=1.0)
    return search(PPO, none, CLUSTER, max_lag=0, deadline_s=5, now_s=lambda: float(next(ticks)))


NO_CALLS: tuple[CallNode, ...] = ()


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda: search(NO_CALLS, TABLE, CLUSTER, max_lag=0),
         "there is nothing to place: the step has no call of a model"),
        (lambda: search(PPO, TABLE, CLUSTER, max_lag=-1),
         "max_lag is -1; expected a number of steps, 0 or more, or several of them"),
        (lambda: search(PPO, TABLE, CLUSTER, max_lag=()),
         "max_lag is (); expected a number of steps, 0 or more, or several of them"),
        (lambda: search(PPO, TABLE, CLUSTER, max_lag=0, deadline_s=0.0),
         "deadline_s is 0.0; expected a positive number of seconds"),
        (lambda: search(PPO, TABLE, CLUSTER, max_lag=0, max_gap=1.0),
         "max_gap is 1.0; expected a share from 0 to below 1"),
        (nothing_by_then, "no plan was found in 6 s; give deadline_s more time"),
    ],
)  # fmt: skip
def test_refused(ask: Callable[[], SearchResult], expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        ask()
    assert str(caught.value) == expected
