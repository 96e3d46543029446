"""The search against brute force, and what it promises besides."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.cluster import ClusterSpec
from penstock.planner.options import CallNode
from penstock.planner.search import search
from penstock.planner.search_result import Assignment, SearchResult

from .brute_force import Best, Key, all_plans
from .graphs import steps
from .tables import RandomTable, clusters, kinds_of

EXACT = 1e-12


def key_of(assignment: Assignment) -> Key:
    return frozenset((frozenset(group.units), kinds_of(group.mesh)) for group in assignment.groups)


def assert_agrees(result: SearchResult, plans: list[Best]) -> None:
    """The best and the runner-up are those of brute force, up to ties."""
    times = {plan.key: plan.step_time_s for plan in plans}
    assert result.step_time_s == pytest.approx(plans[0].step_time_s, rel=EXACT)
    assert times[key_of(result.best)] == pytest.approx(result.step_time_s, rel=EXACT)
    assert result.lower_bound_s == result.step_time_s
    assert result.gap == 0.0
    if len(plans) == 1:
        assert result.runner_up is None
        return
    assert result.runner_up is not None
    assert key_of(result.runner_up) != key_of(result.best)
    assert result.runner_up.step_time_s == pytest.approx(plans[1].step_time_s, rel=EXACT)
    assert times[key_of(result.runner_up)] == pytest.approx(plans[1].step_time_s, rel=EXACT)


@settings(max_examples=150)
@given(
    steps(max_calls=5, max_roles=4, min_calls=3),
    clusters(),
    st.integers(0, 1),
    st.integers(0, 10_000),
)
def test_equals_brute_force(
    calls: tuple[CallNode, ...], cluster: ClusterSpec, max_lag: int, seed: int
) -> None:
    table = RandomTable(calls, seed)
    plans = all_plans(calls, table, cluster, max_lag)
    if not plans:
        event("infeasible")
        with pytest.raises(PlanError, match=r"lacking|no legal layout|no way to divide"):
            search(calls, table, cluster, max_lag=max_lag)
        return
    event(f"{len(dict(next(iter(plans)).key))} group(s) win")
    assert_agrees(search(calls, table, cluster, max_lag=max_lag), plans)
