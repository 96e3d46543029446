"""What a plan takes when the engine's scheduler plays it through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.dataflow.kinds import NodeKind
from penstock.planner.plan.plan import one_group_plan
from penstock.planner.plan.simulate import Simulation, simulate, simulate_plan

from ..hand_made import CALLS, SPLIT, ppo, split_plan

GRAPH = ppo()
NODES = tuple(node.name for node in GRAPH.nodes if node.kind is not NodeKind.SOURCE)
COLOCATED = dict.fromkeys(NODES, "all")


def path(simulation: Simulation) -> list[tuple[str, int, float, str]]:
    return [(i.node, i.step, i.seconds, i.waited_for) for i in simulation.critical_path]


def test_calls_that_share_all_devices_take_the_sum_of_their_times() -> None:
    found = simulate(GRAPH, COLOCATED, CALLS)
    assert found.step_time_s == sum(CALLS.values()) == 46.0
    assert found.idle_share == {"all": 0.0}
    assert path(found) == [
        ("actor.generate", 0, 12.0, "devices"),
        ("reward.score", 0, 2.0, "input"),
        ("critic.value", 0, 2.0, "devices"),
        ("ref.logprob", 0, 3.0, "devices"),
        ("actor.train", 0, 14.0, "input"),
        ("critic.train", 0, 13.0, "devices"),
    ]


def test_lag_buys_nothing_where_nothing_waits() -> None:
    assert simulate(GRAPH, COLOCATED, CALLS, max_lag=1).step_time_s == 46.0


def test_a_split_overlaps_what_does_not_depend() -> None:
    found = simulate_plan(GRAPH, split_plan())
    assert found.step_time_s == 12.0 + 4.0 + 14.0 == 30.0
    assert found.idle_share == pytest.approx({"a": 1 / 30, "b": 13 / 30})
    assert found.busiest == "a"
    assert found.busy_s("b") == pytest.approx(17.0)
    assert path(found) == [
        ("actor.generate", 0, 12.0, "weights"),
        ("reward.score", 0, 2.0, "input"),
        ("critic.value", 0, 2.0, "devices"),
        ("actor.train", 0, 14.0, "input"),
    ]


def test_generation_on_devices_of_its_own_overlaps_training_once_it_may_lag() -> None:
    nodes = {**COLOCATED, "actor.generate": "rollout"}
    assert simulate(GRAPH, nodes, CALLS).step_time_s == 46.0
    lagging = simulate(GRAPH, nodes, CALLS, max_lag=1)
    assert lagging.step_time_s == 34.0
    assert lagging.idle_share == pytest.approx({"all": 0.0, "rollout": 22 / 34})


def test_a_generation_longer_than_all_else_is_the_only_thing_waited_for() -> None:
    nodes = {**COLOCATED, "actor.generate": "rollout"}
    found = simulate(GRAPH, nodes, {**CALLS, "actor.generate": 50.0}, max_lag=2)
    assert found.step_time_s == 50.0
    assert path(found) == [("actor.generate", 0, 50.0, "devices")]


def test_an_op_behind_a_call_it_does_not_need_is_seen_to_wait_for_devices() -> None:
    """The critic's advantage, computed where generation runs, waits for the next step's samples."""
    nodes = {**COLOCATED, "actor.generate": "rollout", "gae": "rollout"}
    found = simulate(GRAPH, nodes, CALLS, max_lag=1)
    assert (
        found.step_time_s > simulate(GRAPH, {**nodes, "gae": "all"}, CALLS, max_lag=1).step_time_s
    )
    assert ("actor.train", "devices") in {(i.node, i.waited_for) for i in found.critical_path}


@pytest.mark.slow
@settings(max_examples=60)
@given(
    groups=st.lists(st.sampled_from("abc"), min_size=6, max_size=6),
    seconds=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    max_lag=st.integers(0, 3),
)
def test_what_always_holds(groups: list[str], seconds: list[int], max_lag: int) -> None:
    homes = dict(zip(CALLS, groups, strict=True))
    nodes = {**dict.fromkeys(NODES, groups[4]), **homes}
    durations_s = dict(zip(CALLS, map(float, seconds), strict=True))
    found = simulate(GRAPH, nodes, durations_s, max_lag=max_lag)
    # The critical path has no hole, so it is as long as the steps it goes through.
    path_s = sum(item.seconds for item in found.critical_path)
    assert path_s == pytest.approx(found.critical_steps * found.step_time_s)
    at_s = 0.0
    for item in found.critical_path:
        assert item.start_s == pytest.approx(at_s)
        at_s += item.seconds
    # Every group does its calls once per step, and nothing is faster than its busiest group.
    for group in set(nodes.values()):
        work_s = sum(s for call, s in durations_s.items() if nodes[call] == group)
        assert found.step_time_s >= work_s - 1e-6
        assert found.busy_s(group) == pytest.approx(work_s, abs=1e-6)
    assert found.step_time_s <= sum(seconds) + 1e-6


@given(seconds=st.lists(st.integers(1, 40), min_size=6, max_size=6))
def test_steps_that_follow_each_other_repeat_exactly(seconds: list[int]) -> None:
    durations_s = dict(zip(CALLS, map(float, seconds), strict=True))
    found = simulate(GRAPH, {**COLOCATED, **SPLIT}, durations_s)
    steps = [b - a for a, b in zip((0.0, *found.completed_s), found.completed_s, strict=False)]
    assert found.cycle_steps == 1
    assert steps == [found.step_time_s] * len(steps)


def test_the_window_shows_one_cycle_and_cuts_what_sticks_out() -> None:
    nodes = {**COLOCATED, "actor.generate": "rollout"}
    found = simulate(GRAPH, nodes, CALLS, max_lag=1)
    spans = found.window()
    assert {span.group for span in spans} == {"all", "rollout"}
    assert all(found.start_s <= s.start_s < s.end_s <= found.end_s for s in spans)
    assert sum(s.end_s - s.start_s for s in spans if s.group == "all") == pytest.approx(34.0)


@pytest.mark.parametrize(
    ("play", "said"),
    [
        (
            lambda: simulate_plan(GRAPH, one_group_plan()),
            "the plan has no prediction, so nothing says how long",
        ),
        (lambda: simulate(GRAPH, COLOCATED, {}), "no node of 'ppo' takes any time"),
        (
            lambda: simulate(GRAPH, COLOCATED, {"judge.score": 1.0}),
            "there is a duration for 'judge.score'",
        ),
        (
            lambda: simulate_plan(GRAPH, split_plan().model_copy(update={"nodes": {"judge": "a"}})),
            "names node 'judge', which graph 'ppo' does not have",
        ),
    ],
    ids=["no prediction", "no durations", "unknown node", "another graph"],
)
def test_what_cannot_be_played_is_refused(play: Callable[[], Simulation], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        play()
