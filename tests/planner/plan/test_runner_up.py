"""Why the second best plan lost, in step times that agree with those beside it."""

from __future__ import annotations

import pytest
from penstock.planner.inputs.cluster import Mesh
from penstock.planner.plan.planner import runner_up
from penstock.planner.search.options import Assignment, GroupAssignment, Option

from ..search.tables import cluster_of, device

CLUSTER = cluster_of((1, 4, device("cpu", 10**9)))


def assignment(step_time_s: float, **busy_s: float) -> Assignment:
    """Two devices for each call group, which is that busy."""
    groups = tuple(
        GroupAssignment(
            (call_group,),
            Mesh(CLUSTER, (2,)),
            (2 * i, 2 * i + 1),
            {call_group: Option({f"{call_group}.call": seconds}, 0, {f"{call_group}.call": 0}, {})},
        )
        for i, (call_group, seconds) in enumerate(busy_s.items())
    )
    return Assignment(groups, 0, step_time_s)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (
            assignment(12.0, actor=11.5, ref=3.0),
            "its group of actor on 2 devices is busy 11.5 s of each step, longer than the 10.0 s "
            "of a whole step of the best plan",
        ),
        (
            assignment(12.0, actor=9.5, ref=3.0),
            "its busiest group, actor on 2 devices, works 9.50 s of each step and waits the rest "
            "for other groups",
        ),
        (
            assignment(10.02, actor=10.02, ref=3.0),
            "only 20.0 ms slower: its group of actor on 2 devices is busy 10.0 s of each step, "
            "longer than a whole step of the best plan takes",
        ),
        (
            assignment(10.02, actor=9.5, ref=3.0),
            "only 20.0 ms slower: its busiest group, actor on 2 devices, works 9.50 s of each step "
            "and waits the rest for other groups",
        ),
        (
            assignment(10.0, actor=10.0, ref=3.0),
            "as fast as the best plan; of plans that take the same time the first one found wins",
        ),
    ],
)
def test_the_reason_compares_with_the_step_that_is_shown(second: Assignment, why: str) -> None:
    lost = runner_up(second, assignment(10.0, actor=8.0, ref=2.0))
    assert lost is not None
    assert lost.description == "actor on 2; ref on 2"
    assert lost.step_time_s == second.step_time_s
    assert lost.why == why


def test_no_other_plan() -> None:
    assert runner_up(None, assignment(10.0, actor=8.0)) is None
