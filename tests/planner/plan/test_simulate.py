"""What a plan takes when the engine's scheduler plays it through."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.dataflow.errors import PlanError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind
from penstock.planner.cost.time_parts import CallTime
from penstock.planner.inputs.calls import Call, Lengths, Workload, calls_of
from penstock.planner.plan.plan import one_group_plan
from penstock.planner.plan.planner import part_lengths, part_times
from penstock.planner.plan.simulate import Simulation, simulate, simulate_plan

from ..hand_made import CALLS, SPLIT, ppo, split_plan
from ..shapes import model_of

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
    assert min(found.idle_share, key=found.idle_share.__getitem__) == "a"
    assert (1 - found.idle_share["b"]) * found.step_time_s == pytest.approx(17.0)
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
        busy_s = (1 - found.idle_share[group]) * found.step_time_s
        assert busy_s == pytest.approx(work_s, abs=1e-6)
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


# --- rows that go on in parts

SHAPE = model_of("tiny", 64, 2, 4, 4, 192, vocab_size=64, tied_embeddings=True, dtype="float32")
GRPO_GRAPH = build(grpo_step, cfg=GRPO(), name="grpo")
GENERATE, TRAIN = "actor.generate", "actor.train"
ON_ONE = {node.name: "train" for node in GRPO_GRAPH.nodes if node.kind is not NodeKind.SOURCE}
APART = {**ON_ONE, GENERATE: "rollout"}
LENGTHS = st.dictionaries(st.integers(1, 500), st.integers(1, 9), min_size=1, max_size=12)


def lengths(found: dict[int, int]) -> Lengths:
    tokens = tuple(sorted(found))
    return Lengths(tokens=tokens, weights=tuple(float(found[t]) for t in tokens))


def seconds_of(call: Call) -> CallTime:
    """A decode step takes a second, and training does so for every row and token."""
    if call.kind == "generate":
        return CallTime(prefill_s=5.0, matmul_s=float(call.response.longest))
    rows = call.num_sequences / 128
    return CallTime(matmul_s=rows * call.response.mean, optimizer_s=2.0)


def played(
    response: Lengths, num_parts: int, nodes: dict[str, str] = APART, max_lag: int = 0
) -> tuple[Simulation, Simulation, dict[str, float]]:
    """Without parts, with parts, and how long each call takes."""
    workload = Workload(
        num_prompts=32, samples_per_prompt=4, prompt=Lengths.constant(8), response=response
    )
    calls = calls_of(GRPO_GRAPH, workload, {"actor": SHAPE, "reward": None})
    durations_s = {call.name: seconds_of(call).total_s for call in calls}
    parts_s = {c.name: part_times(c, durations_s[c.name], seconds_of, num_parts) for c in calls}
    whole = simulate(GRPO_GRAPH, nodes, durations_s, max_lag=max_lag)
    return (
        whole,
        simulate(GRPO_GRAPH, nodes, durations_s, max_lag=max_lag, parts_s=parts_s),
        durations_s,
    )


def test_rows_of_equal_length_have_no_parts_that_end_early() -> None:
    whole, streamed, durations_s = played(Lengths.constant(100), 8)
    assert whole.step_time_s == sum(durations_s.values()) == 207.0
    assert streamed.step_time_s == pytest.approx(207.0)


def test_heavy_tails_let_training_begin_early() -> None:
    """As in `benchmarks/asynchrony.py`, where a step on two CPU cores is 1.3 to 1.4 times as fast.

    The longest of 128 rows is 8 times the mean.
    """
    sigma, middle = 0.994, NormalDist()
    quantiles = [middle.inv_cdf((i + 0.5) / 400) for i in range(400)]
    tokens = [max(1, round(48 * 2.718281828 ** (sigma * z - sigma**2 / 2))) for z in quantiles]
    counts = {t: tokens.count(t) for t in tokens}
    whole, streamed, _ = played(lengths(counts), 16)
    assert 1.05 < whole.step_time_s / streamed.step_time_s < 1.6


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from([2, 8, 32]), st.sampled_from([0, 1]))
def test_a_step_takes_its_slower_half_at_least_and_both_at_most(
    found: dict[int, int], num_parts: int, max_lag: int
) -> None:
    response = lengths(found)
    whole, streamed, durations_s = played(response, num_parts, max_lag=max_lag)
    assert streamed.step_time_s >= (1 - 1e-6) * durations_s[GENERATE]
    # Parts have rows as expected of their longest ones, which add up to all rows but for rounding.
    trained = sum(part.mean for part in part_lengths(response, 128 // num_parts, num_parts))
    slack = max(0.0, trained / num_parts - response.mean)
    assert streamed.step_time_s <= (1 + 1e-6) * (whole.step_time_s + slack)


@given(LENGTHS, st.integers(1, 40), st.integers(1, 20))
def test_parts_are_longer_and_longer(found: dict[int, int], rows: int, num_parts: int) -> None:
    parts = part_lengths(lengths(found), rows, num_parts)
    assert len(parts) == num_parts
    longest = [part.longest for part in parts]
    assert longest == sorted(longest)
    assert set(longest) <= found.keys()
    for part in parts:
        assert part.shares[-1] >= (1 - 1e-9) / rows, "one row at least is that long"


def test_on_the_same_devices_one_thing_is_done_at_a_time() -> None:
    whole, streamed, _ = played(lengths({10: 3, 400: 1}), 8, nodes=ON_ONE)
    assert streamed.step_time_s == pytest.approx(whole.step_time_s, rel=0.1)
