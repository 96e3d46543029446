"""Placing a step that acts: costs, the search against brute force, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from penstock.algorithms.dqn import DQN, dqn_step
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.algorithms.impala import Impala, impala_step
from penstock.algorithms.papers.self_play import SelfPlay, self_play_step
from penstock.dataflow.errors import InfeasibleError, PlanError
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind
from penstock.planner.cost.acting import ActingLayout, acting_times, rollout_parts
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.inputs.task_profile import (
    ActingPins,
    CallProfile,
    ExecutorProfile,
    LoopProfile,
    TaskProfile,
)
from penstock.planner.plan.acting_plan import Tried, layouts, plan_acting, play
from penstock.planner.plan.plan import Plan
from penstock.planner.plan.simulate import simulate_plan
from penstock.planner.report.explain import explain
from penstock.planner.report.json_report import to_json
from pydantic import ValidationError

LINK = LinkSpec(bytes_per_s=1e9, latency_s=1e-4)
CPU = DeviceSpec(
    name="cpu",
    memory_bytes=4 << 30,
    flops_per_s={"float32": 6e10},
    memory_bytes_per_s=1e10,
    host_bytes_per_s=1e10,
)

IN_PROCESS = ExecutorProfile(name="in_process", call_s=1e-4)
ROLLOUT = {"env_ppo": "env.rollout", "impala": "env.rollout", "dqn": "env.rollout"}


def cluster(cores: int | None = 2, num_nodes: int = 1, **fields: Any) -> ClusterSpec:
    node = NodeGroup(
        num_nodes=num_nodes,
        devices_per_node=cores or 2,
        device=CPU,
        within=LINK,
        cores_per_node=cores,
        **fields,
    )
    return ClusterSpec(name="ours", node_groups=(node,), between=LINK)


def ppo() -> Graph:
    return build(env_ppo_step, cfg=EnvPPO(horizon=32))


def loop(rows: int, step_s: float, cpu_share: float = 1.0, ask_s: float = 1e-4) -> LoopProfile:
    return LoopProfile(
        rows=rows,
        turns=32,
        step_s=step_s,
        step_cpu_s=step_s * cpu_share,
        ask_s=ask_s,
        ask_cpu_s=ask_s,
    )


def profile(
    graph: Graph,
    *loops: LoopProfile,
    acts: str = "env.rollout",
    two_ranks: float | None = None,
    call_s: float = 2e-3,
    request_s: float = 4e-4,
    **fields: Any,
) -> TaskProfile:
    names = [node.name for node in graph.nodes if node.kind is not NodeKind.SOURCE]
    call = CallProfile(one_rank_s=5e-3, two_ranks_s=two_ranks)
    return TaskProfile(
        setting={"task.id": '"Sleepy-v0"'},
        rows={acts: loops[-1].rows},
        loops={acts: loops},
        calls={name: call for name in names if name != acts},
        executor=ExecutorProfile(
            name="ray", call_s=call_s, publish_s=1e-3, request_s=request_s, request_cpu_s=request_s
        ),
        cores=2,
        machine="a machine",
        date="2026-11-28",
        **fields,
    )


def planned(graph: Graph, found: TaskProfile, on: ClusterSpec | None = None, **asked: Any) -> Plan:
    asked = {"max_lag": (0,), "num_groups": None, **asked}
    return plan_acting(graph, found, on or cluster(), **asked)


def test_a_rollout_takes_as_long_as_its_formula_says() -> None:
    graph = ppo()
    found = profile(graph, loop(4, 1e-3), loop(8, 2e-3))
    times = acting_times(graph, found, ActingLayout("copied", 2, 2, 1), cores=2)
    # 32 turns of 1 ms and 0.1 ms in each of two processes, on a core each.
    parts = times.parts_s["env.rollout"]
    assert parts["environments"] + parts["actor"] == pytest.approx(32 * 1.1e-3)
    assert parts["calls"] == 2e-3
    assert parts["weight_move"] == 1e-3
    # On one core they take turns.
    one_core = acting_times(graph, found, ActingLayout("copied", 2, 2, 1), cores=1)
    parts = one_core.parts_s["env.rollout"]
    assert parts["environments"] + parts["actor"] == pytest.approx(2 * 32 * 1.1e-3)
    # Values and advantages are computed part by part, and trained on together.
    assert times.parts_s["actor.value"]["calls"] == 2 * 2e-3
    assert times.parts_s["actor.train"]["calls"] == 2e-3


def test_the_slowest_of_more_processes_takes_longer() -> None:
    uneven = loop(8, 2e-3).model_copy(update={"spread_s": 1e-3})
    found = profile(ppo(), uneven)
    extra_s = [
        sum(rollout_parts(found, "env.rollout", ActingLayout("inline", n, n, 1), 64)[0].values())
        - sum(rollout_parts(found, "env.rollout", ActingLayout("inline", 1, 1, 1), 64)[0].values())
        for n in range(1, 17)
    ]
    assert extra_s == sorted(extra_s)
    # The largest of 2, 4, 8 and 16 standard normal numbers on average, by published tables; the
    # approximation is within 5 % of them.
    for n, expected in {2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766}.items():
        assert extra_s[n - 1] == pytest.approx(expected * 1e-3 * 32**0.5, rel=0.05)


def test_calls_with_different_rows_have_groups_of_one_size() -> None:
    found = profile(ppo(), loop(4, 1e-3), loop(8, 2e-3))
    both = {"env.rollout": (loop(4, 1e-3),), "other.rollout": (loop(4, 1e-3),)}
    rows = {"env.rollout": 8, "other.rollout": 24}
    found = found.model_copy(update={"loops": both, "rows": rows})
    layout = ActingLayout("inline", 1, 2, 1)
    (one, _), (three, _) = (rollout_parts(found, call, layout, 2) for call in rows)
    # Groups of 4: two of the one call, six of the other.
    assert one["environments"] + one["actor"] == pytest.approx(2 * 32 * 1.1e-3)
    assert three["environments"] == pytest.approx(3 * one["environments"])


def test_environments_that_wait_are_overlapped_and_those_that_compute_have_a_process_each() -> None:
    graph = ppo()
    sleeping = planned(graph, profile(graph, loop(1, 5e-3, 0.01), loop(8, 4e-2, 0.01)))
    assert sleeping.role_options["env"]["num_overlapped"] >= 4
    assert sleeping.group_size == 1
    computing = planned(graph, profile(graph, loop(4, 5e-3), loop(8, 1e-2)))
    assert computing.group("acting").num_ranks == 2
    assert computing.role_options["env"]["num_overlapped"] == 1


def test_fast_environments_stay_in_the_process_that_trains() -> None:
    graph = ppo()
    found = planned(graph, profile(graph, loop(4, 2e-5), loop(8, 3e-5)))
    assert [group.name for group in found.groups] == ["all"]
    assert found.group_size == 8


def test_a_lag_lets_acting_run_beside_training() -> None:
    graph = build(impala_step, cfg=Impala(horizon=32))
    found = profile(graph, loop(8, 1e-3))
    both = planned(graph, found, max_lag=(0, 1), num_groups=1)
    assert both.max_lag == 1
    assert both.group("acting").num_ranks == 1
    assert both.prediction is not None
    assert both.prediction.other_schedules[0].max_lag == 0
    assert both.prediction.step_time_s < both.prediction.other_schedules[0].step_time_s  # pyright: ignore[reportOperatorIssue] - it fits


def test_a_replay_keeps_training_on_one_rank() -> None:
    graph = build(dqn_step, cfg=DQN())
    found = profile(graph, loop(4, 1e-3), loop(8, 2e-3), two_ranks=3e-3)
    every = list(layouts(graph, found, 4, None, ActingPins()))
    assert {one.num_ranks for one in every if one.inference == "inline"} == {1}
    assert {one.num_ranks for one in every if one.inference == "copied"} == {1, 2, 3, 4}


def test_processes_that_were_not_measured_are_not_planned() -> None:
    graph = ppo()
    alone = profile(graph, loop(4, 5e-3), loop(8, 1e-2)).model_copy(update={"executor": IN_PROCESS})
    assert {one.inference for one in layouts(graph, alone, 4, None, ActingPins())} == {"inline"}
    assert [group.num_ranks for group in planned(graph, alone).groups] == [1]


def test_games_are_placed_with_both_of_their_players() -> None:
    graph = build(self_play_step, cfg=SelfPlay())
    found = profile(graph, loop(4, 5e-3), loop(8, 1e-2), acts="board.play", overlaps=False)
    pins = ActingPins(inference="served")
    plan = planned(graph, found, pins=pins)
    assert dict(plan.group("acting").served) == {"first": "policy", "second": "policy"}
    assert plan.role_options == {}
    plan.placement(graph)


GRAPHS = {
    "ppo": ppo,
    "impala": lambda: build(impala_step, cfg=Impala(horizon=32)),
    "dqn": lambda: build(dqn_step, cfg=DQN()),  # its replay keeps training on one rank
    "games": lambda: build(self_play_step, cfg=SelfPlay()),
}


def _random_case(number: int) -> tuple[Graph, TaskProfile, int, tuple[int, ...], ActingPins]:
    rng = random.Random(number)
    kind = list(GRAPHS)[number % 4]
    graph, acts = GRAPHS[kind](), "board.play" if kind == "games" else "env.rollout"
    step_s, share = 10 ** rng.uniform(-5, -2), rng.choice([0.01, 0.5, 1.0])
    ask_s = 10 ** rng.uniform(-5, -3)
    found = profile(
        graph,
        loop(1, step_s / 4, share, ask_s),
        loop(4, step_s, share, 2 * ask_s),
        acts=acts,
        two_ranks=rng.choice([None, 3e-3]),
        call_s=10 ** rng.uniform(-4, -2),
        request_s=10 ** rng.uniform(-5, -3),
        overlaps=kind != "games",
    )
    lags = (0, 1) if kind == "impala" else (0,)
    some = [ActingPins(), ActingPins(num_groups=2), ActingPins(inference="served")]
    return graph, found, rng.choice([2, 3, 4]), lags, rng.choice(some)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(15))
def test_the_search_equals_brute_force(number: int) -> None:
    graph, found, cores, lags, pins = _random_case(number)
    plan = planned(graph, found, cluster(cores), max_lag=lags, pins=pins)
    every = [
        play(graph, found, Tried(one, lag, acting_times(graph, found, one, cores), 0.0, 0.0), cores)
        for one in layouts(graph, found, cores, None, pins)
        for lag in lags
    ]
    best_s = min(one.step_time_s for one in every)
    assert plan.prediction is not None
    assert plan.prediction.step_time_s == pytest.approx(best_s, rel=1e-9)
    assert plan.prediction.gap == 0.0
    others = {other.max_lag: other.step_time_s for other in plan.prediction.other_schedules}
    assert others.keys() == {*lags} - {plan.max_lag}
    for lag, step_s in others.items():
        best_s = min(one.step_time_s for one in every if one.max_lag == lag)
        assert step_s == pytest.approx(best_s, rel=1e-9)


def test_more_processes_answer_and_train_where_one_is_the_bottleneck() -> None:
    graph = GRAPHS["impala"]()
    found = profile(graph, loop(1, 1e-3, 1.0, 1e-3), loop(64, 6e-2, 1.0, 2e-3), two_ranks=2.6e-3)
    found = found.model_copy(update={"process_bytes": 0})
    pins = ActingPins(inference="served")
    many = planned(graph, found, cluster(64), max_lag=(1,), pins=pins)
    assert many.group("policy").num_ranks > 1
    one = planned(
        graph, found, cluster(64), max_lag=(1,), pins=ActingPins(num_trainers=1, num_servers=1)
    )
    assert many.prediction is not None
    assert one.prediction is not None
    assert many.prediction.step_time_s < one.prediction.step_time_s
    many.placement(graph)


def test_a_plan_says_what_it_chose_and_why() -> None:
    graph = ppo()
    plan = planned(graph, profile(graph, loop(1, 5e-3, 0.01), loop(8, 4e-2, 0.01)))
    text = explain(graph, plan)
    assert "no plan is faster" in text
    assert "runner-up" in text
    assert f"with env.num_overlapped={plan.role_options['env']['num_overlapped']}" in text
    assert "task.group_size=1" in text
    assert to_json(graph, plan)["step_time_s"] == plan.prediction.step_time_s  # pyright: ignore[reportOptionalMemberAccess]
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_the_scheduler_agrees_with_the_prediction() -> None:
    graph = ppo()
    plan = planned(graph, profile(graph, loop(4, 5e-3), loop(8, 1e-2)))
    assert plan.prediction is not None
    assert simulate_plan(graph, plan).step_time_s == pytest.approx(plan.prediction.step_time_s)


def test_processes_of_several_nodes_have_devices_of_them() -> None:
    graph = ppo()
    found = profile(graph, loop(1, 5e-3), loop(8, 4e-2))
    plan = planned(graph, found, cluster(4, num_nodes=2))
    assert plan.group("acting").num_ranks > 2
    devices = [device for group in plan.groups for device in group.devices]
    assert len(devices) == len(set(devices)) == sum(group.num_ranks for group in plan.groups)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cores that are not known": (
        {"on": cluster(None)},
        "cluster 'ours' does not say how many cores its nodes have, and this step computes on "
        "cores\n    set cluster.cores_per_node (penstock plan), or measure its machines again: "
        "penstock profile",
    ),
    "cores that a pin needs": (
        {"pins": ActingPins(num_ranks=64)},
        "no placement of acting fits cluster 'ours': plan.pins.acting.num_ranks=64 processes act, "
        "and it has 2 cores\n    pin fewer, or plan for a cluster with more cores "
        "(cluster.cores_per_node)",
    ),
    "more processes than groups": (
        {"pins": ActingPins(num_ranks=2), "num_groups": 1},
        "no placement of acting fits cluster 'ours': 2 processes act in 1 group of environments, "
        "and a group is in one of them\n    pin fewer, or have more groups: task.group_size=auto",
    ),
    "groups that the task does not have": (
        {"pins": ActingPins(num_groups=4), "num_groups": 1},
        "no placement of acting fits cluster 'ours': plan.pins.acting.num_groups=4, and the task's "
        "rows fall into 1 group (task.group_size)\n    set task.group_size=auto, or leave the "
        "pin out",
    ),
    "groups that do not divide the rows": (
        {"pins": ActingPins(num_groups=3)},
        "no placement of acting fits cluster 'ours' with plan.pins.acting.num_groups=3\n    leave "
        "out a pin",
    ),
    "rows that are one team": (
        {"team": 8, "least_groups": 2},
        "no placement of acting fits cluster 'ours': the rows of a step do not fall into 2 or more "
        "equal groups\n    raise algorithm.per_step",
    ),
    "processes that were not measured": (
        {"executor": IN_PROCESS, "pins": ActingPins(inference="copied")},
        "no placement of acting fits cluster 'ours' with plan.pins.acting.inference=copied: the "
        "task was measured in one process (executor=in_process)\n    measure it with executor=ray",
    ),
    "memory": (
        {"on": cluster(host_bytes=100 << 20)},
        "no placement of acting fits cluster 'ours': a process takes 400 MiB, and its nodes have "
        "100 MiB of host memory (cluster.host_bytes)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(case: str) -> None:
    asked, message = REFUSED[case]
    graph = ppo()
    fields = {key: asked[key] for key in ("team", "least_groups", "executor") if key in asked}
    asked = {key: value for key, value in asked.items() if key not in fields}
    found = profile(graph, loop(8, 1e-3), process_bytes=400 << 20).model_copy(update=fields)
    with pytest.raises((PlanError, InfeasibleError)) as caught:
        planned(graph, found, **asked)
    assert str(caught.value) == message


def test_a_cost_that_was_not_measured_is_refused() -> None:
    graph = ppo()
    found = profile(graph, loop(8, 1e-3))
    less = {name: call for name, call in found.calls.items() if name != "gae"}
    with pytest.raises(PlanError, match="the profile of the task has no cost of 'gae'"):
        planned(graph, found.model_copy(update={"calls": less}))


def test_a_profile_of_another_task_is_refused() -> None:
    found = profile(ppo(), loop(8, 1e-3))
    found.check({"task.id": '"Sleepy-v0"'}, "p.json", "penstock profile")
    with pytest.raises(PlanError) as caught:
        found.check({"task.id": '"CartPole-v1"'}, "p.json", "penstock profile ...")
    assert str(caught.value) == (
        "task profile p.json is of another task: 'task.id' was \"Sleepy-v0\" where it was "
        'measured, and is "CartPole-v1" here\n    measure this one: penstock profile ...'
    )


@pytest.mark.parametrize("sizes", [(), (8, 8), (8, 2)])
def test_a_profile_whose_groups_do_not_grow_is_refused(sizes: tuple[int, ...]) -> None:
    fields = profile(ppo(), loop(8, 1e-3)).model_dump()
    fields["loops"] = {"env.rollout": [loop(size, 1e-3).model_dump() for size in sizes]}
    with pytest.raises(ValidationError, match="expected one size or more, each larger"):
        TaskProfile.model_validate(fields)


def test_group_sizes_between_the_measured_ones_are_interpolated() -> None:
    found = profile(ppo(), loop(2, 1e-3), loop(8, 4e-3))
    assert found.loop("env.rollout", 4).step_s == pytest.approx(2e-3)
    assert found.loop("env.rollout", 1).step_s == pytest.approx(5e-4)
    assert found.loop("env.rollout", 8).step_s == 4e-3


def test_two_measurements_say_how_a_call_is_divided() -> None:
    call = CallProfile(one_rank_s=1.0, two_ranks_s=0.6)  # 0.2 each, and 0.8 shared
    assert call.on(2) == pytest.approx(0.6)
    assert call.on(4) == pytest.approx(0.4)
    assert CallProfile(one_rank_s=1.0).on(4) == 1.0


def test_a_run_corrects_what_it_was_planned_with() -> None:
    graph = ppo()
    found = profile(graph, loop(8, 1e-3), two_ranks=4e-3)
    again = found.learned(
        "run", {"env.rollout": 0.1, "actor.train": 5e-3}, {"env.rollout": 0.2, "actor.train": 1e-2}
    )
    assert again.corrections == {"env.rollout": 2.0}
    assert again.calls["actor.train"] == CallProfile(one_rank_s=1e-2, two_ranks_s=8e-3)
    assert again.calls["gae"] == found.calls["gae"]
    assert again.source.endswith(", corrected by run")
    layout = ActingLayout("inline", 1, 1, 1)
    before, after = (acting_times(graph, one, layout, 2).durations_s for one in (found, again))
    assert after["env.rollout"] > 1.9 * before["env.rollout"]
