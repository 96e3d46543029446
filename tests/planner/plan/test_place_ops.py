"""Where nodes that cost nothing go, so that they hold nothing up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.dataflow.kinds import NodeKind
from penstock.planner.plan.place_ops import place_ops
from penstock.planner.plan.simulate import simulate

from ..hand_made import CALLS, SPLIT, ppo

GRAPH = ppo()
NODES = {node.name for node in GRAPH.nodes if node.kind is not NodeKind.SOURCE}


def test_with_one_group_there_is_nothing_to_choose() -> None:
    placed = place_ops(GRAPH, dict.fromkeys(CALLS, "all"), CALLS)
    assert placed == dict.fromkeys(NODES, "all")


def test_every_node_gets_a_group_and_calls_keep_theirs() -> None:
    placed = place_ops(GRAPH, SPLIT, CALLS)
    assert placed.keys() == NODES
    assert {name: placed[name] for name in SPLIT} == SPLIT


def test_no_op_waits_behind_a_generation_of_the_next_step() -> None:
    calls = {**dict.fromkeys(CALLS, "all"), "actor.generate": "rollout"}
    placed = place_ops(GRAPH, calls, CALLS, max_lag=1)
    assert simulate(GRAPH, placed, CALLS, max_lag=1).step_time_s == 34.0


def test_a_reached_target_ends_the_search() -> None:
    assert place_ops(GRAPH, SPLIT, CALLS, target_s=30.0) == place_ops(GRAPH, SPLIT, CALLS)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    groups=st.lists(st.sampled_from("abc"), min_size=6, max_size=6),
    seconds=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    max_lag=st.integers(0, 1),
)
def test_no_rule_alone_is_better(groups: list[str], seconds: list[int], max_lag: int) -> None:
    calls = dict(zip(CALLS, groups, strict=True))
    durations_s = dict(zip(CALLS, map(float, seconds), strict=True))
    placed = place_ops(GRAPH, calls, durations_s, max_lag=max_lag)
    found_s = simulate(GRAPH, placed, durations_s, max_lag=max_lag).step_time_s
    for group in dict.fromkeys(groups):
        nodes = {**dict.fromkeys(NODES, group), **calls}
        one_s = simulate(GRAPH, nodes, durations_s, max_lag=max_lag).step_time_s
        assert found_s <= one_s * (1 + 1e-9)


def test_an_unknown_call_is_refused() -> None:
    with pytest.raises(PlanError, match="'judge.score' is placed, but graph 'ppo' has no such"):
        place_ops(GRAPH, {"judge.score": "a"}, {})


def test_no_call_at_all_is_refused() -> None:
    with pytest.raises(PlanError, match="no node of graph 'ppo' is placed"):
        place_ops(GRAPH, {}, {})
