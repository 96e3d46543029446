"""What a plan takes whose rows go on in parts."""

from __future__ import annotations

from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind
from penstock.planner.cost.time_parts import CallTime
from penstock.planner.inputs.calls import Call, Lengths, Workload, calls_of
from penstock.planner.plan.planner import part_lengths, part_times
from penstock.planner.plan.simulate import Simulation, simulate

from ..shapes import model_of

SHAPE = model_of("tiny", 64, 2, 4, 4, 192, vocab_size=64, tied_embeddings=True, dtype="float32")
GRAPH = build(grpo_step, cfg=GRPO(), name="grpo")
GENERATE, TRAIN = "actor.generate", "actor.train"
NODES = {node.name: "train" for node in GRAPH.nodes if node.kind is not NodeKind.SOURCE}
APART = {**NODES, GENERATE: "rollout"}
LENGTHS = st.dictionaries(st.integers(1, 500), st.integers(1, 9), min_size=1, max_size=12)


def lengths(found: dict[int, int]) -> Lengths:
    tokens = tuple(sorted(found))
    return Lengths(tokens=tokens, weights=tuple(float(found[t]) for t in tokens))


def time(call: Call) -> CallTime:
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
    calls = calls_of(GRAPH, workload, {"actor": SHAPE, "reward": None})
    durations_s = {call.name: time(call).total_s for call in calls}
    parts_s = {c.name: part_times(c, durations_s[c.name], time, num_parts) for c in calls}
    whole = simulate(GRAPH, nodes, durations_s, max_lag=max_lag)
    return whole, simulate(GRAPH, nodes, durations_s, max_lag=max_lag, parts_s=parts_s), durations_s


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
    whole, streamed, _ = played(lengths({10: 3, 400: 1}), 8, nodes=NODES)
    assert streamed.step_time_s == pytest.approx(whole.step_time_s, rel=0.1)
