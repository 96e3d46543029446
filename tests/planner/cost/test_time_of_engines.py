"""The time of what engines and processors do in their own way, against sums worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.planner.cost.engine_model import EngineModel
from penstock.planner.cost.time_model import TimeModel
from penstock.planner.cost.time_parts import CallTime, Work
from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.cluster import ClusterSpec, Mesh
from penstock.planner.inputs.layout import Layout

from .test_calibration import call as wide
from .time_cases import IDEAL, MIXTURE, TINY, call, mesh, timed

NANO = 1e-9  # one operation or byte of the round machine
LAYERS = 2 * 2 * 592 * 24
ATTENTION = 2 * 16 * (6 * 4**2)
HEAD = 2 * 256 * 24


def cpus(number: int = 1, *, memory: float = 1e12) -> Mesh:
    """The round machine as a CPU."""
    on = mesh(number, memory=memory)
    node = on.cluster.node_groups[0]
    device = node.device.model_copy(update={"name": "cpu"})
    cluster: ClusterSpec = on.cluster.model_copy(
        update={"node_groups": (node.model_copy(update={"device": device}),)}
    )
    return Mesh(cluster, on.counts)


def by(engine: EngineModel, made: Call, on: Mesh, **layout: int) -> CallTime:
    sizes = Layout.model_validate({"micro_batch": made.num_sequences, **layout})
    return TimeModel(IDEAL, engine).call_time(made, sizes, on)


# --- processors


def test_a_cpu_reads_and_computes_one_after_the_other() -> None:
    read = (2 * 592 * 2 + 256 * 2) * 1000  # memory as fast as a millionth of what it computes
    gpu, cpu = (timed(call("forward"), on) for on in (mesh(memory=1e6), cpus(memory=1e6)))
    assert gpu.matmul_s == pytest.approx(read * NANO)
    assert cpu.matmul_s == pytest.approx((read + LAYERS + HEAD) * NANO)


@pytest.mark.parametrize("kind", ["forward", "generate"])
def test_a_cpu_launches_before_it_computes(kind: str) -> None:
    made = call("forward") if kind == "forward" else call("generate")
    slow = IDEAL.replaced(launch_s=1e-3)
    gpu, cpu = (timed(made, on, slow) for on in (mesh(), cpus()))
    # Two layers and the head, once for each of a generation's steps but that of the prompts.
    assert cpu.launch_s == pytest.approx(3e-3)
    busy = gpu.matmul_s + gpu.attention_s
    assert gpu.launch_s + busy == pytest.approx(3e-3)


def test_attention_reaches_a_share_of_its_own() -> None:
    half = IDEAL.replaced(attention_efficiency=0.5)
    time = timed(call("forward"), None, half)
    assert time.attention_s == pytest.approx(2 * ATTENTION * NANO)
    assert time.matmul_s == pytest.approx((LAYERS + HEAD) * NANO)


def test_what_products_read_reaches_a_share_of_its_own() -> None:
    half = IDEAL.replaced(read_efficiency=0.5)
    made, on = call("train"), mesh(memory=1e6)
    whole, slower = timed(made, on), timed(made, on, half)
    assert slower.matmul_s == pytest.approx(2 * whole.matmul_s)
    assert slower.optimizer_s == whole.optimizer_s


def test_a_backward_pass_may_be_more_than_its_products() -> None:
    time = timed(call("train"), None, IDEAL.replaced(backward=3.0))
    assert time.matmul_s == pytest.approx((4 * LAYERS + 3 * HEAD) * NANO)
    assert time.attention_s == pytest.approx(4 * ATTENTION * NANO)


def test_every_optimizer_step_costs_something_besides() -> None:
    slow = IDEAL.replaced(update_s=0.5, call_s=2.0)
    assert timed(call("train", updates=3), None, slow).fixed_s == pytest.approx(3.5)
    assert timed(call("forward"), None, slow).fixed_s == pytest.approx(2.0)


# --- engines


def test_a_head_of_responses_alone() -> None:
    engine = EngineModel(name="reads", reads_responses=True)
    time = by(engine, call("forward"), mesh())
    assert time.matmul_s == pytest.approx((LAYERS + HEAD / 2) * NANO)  # 2 of 4 tokens


def test_logits_that_are_made_again() -> None:
    engine = EngineModel(name="again", head_products=(9, 4))
    assert by(engine, call("train"), mesh()).matmul_s == pytest.approx(
        (3 * LAYERS + 4 * HEAD) * NANO
    )
    assert by(engine, call("forward"), mesh()).matmul_s == pytest.approx((LAYERS + HEAD) * NANO)


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.integers(2, 8), own=st.integers(2, 16), cuts=st.integers(1, 8), seed=st.integers(0, 99)
)
def test_a_rank_computes_the_rows_that_are_drawn_of_its_own(
    ranks: int, own: int, cuts: int, seed: int
) -> None:
    """The step waits for the rank with most of them: a tenth or half a row off at most."""
    rows = ranks * own
    updates = min(cuts, own)
    engine = EngineModel(name="draws", draws_minibatches=True)
    made = call("train", rows=rows, updates=updates)
    even = timed(made, cpus(ranks), dp=ranks).matmul_s / -(-own // updates)
    expected = by(engine, made, cpus(ranks), dp=ranks).matmul_s / even
    draws = random.Random(seed)
    largest: list[int] = []
    for _ in range(300):
        counts = [0] * ranks
        for row in draws.sample(range(rows), round(rows / updates)):
            counts[row // own] += 1
        largest.append(max(counts))
    assert expected == pytest.approx(mean(largest), rel=0.12, abs=0.5)


def test_ranks_that_share_experts_deal_their_rows_out() -> None:
    engine = EngineModel(name="draws", draws_minibatches=True)
    made = call("train", rows=16, updates=4, model=MIXTURE)
    alone = by(engine, made, mesh(4), dp=4)
    shared = by(engine, made, mesh(4), dp=4, ep=4)
    even = by(EngineModel(name="even"), made, mesh(4), dp=4, ep=4)
    assert shared.matmul_s == pytest.approx(even.matmul_s)
    assert alone.matmul_s > 1.3 * shared.matmul_s


def test_all_rows_at_once_are_equally_many() -> None:
    engine = EngineModel(name="draws", draws_minibatches=True)
    made = call("train", rows=8)
    assert by(engine, made, mesh(2), dp=2) == by(EngineModel(name="even"), made, mesh(2), dp=2)


# --- adapters


def test_adapters_alone_have_gradients() -> None:
    adapted = TINY.model_copy(update={"adapter_params": 60})
    time = timed(call("train", model=adapted))
    # No product for the gradient of a weight; Adam's states of the adapters, all in float32.
    assert time.matmul_s == pytest.approx(2 * (LAYERS + HEAD) * NANO)
    assert time.attention_s == pytest.approx(3 * ATTENTION * NANO)
    assert time.optimizer_s == pytest.approx(60 * 28 / 1000 * NANO)
    # Two ranks: each sends and receives half of 60 numbers of 4 bytes, twice.
    assert timed(call("train", model=adapted), dp=2).grad_sync_s == pytest.approx(240 * NANO)
    assert timed(call("forward", model=adapted)) == timed(call("forward"))


# --- engines that compute the prompt of several rows once

SHARING = EngineModel(name="sharing", shares_prompts=True)


def grouped(kind: CallKind, samples: int = 4, prompt: int = 32, updates: int = 1) -> Call:
    made = wide(kind, 64, 16, updates=updates)
    return replace(made, samples_per_prompt=samples, prompt=Lengths.constant(prompt))


def test_a_prompt_counts_once_for_all_of_its_rows() -> None:
    work = Work.of(grouped("forward"), SHARING)
    assert work.tokens == 32 / 4 + 32
    # The prompt's own square once; every response token still looks back at the whole prompt.
    assert work.tokens_square == 32**2 / 4 + 2 * 32 * 32 + 32**2


@pytest.mark.parametrize(
    "alone",
    [
        grouped("forward", samples=1),
        grouped("forward", prompt=4),  # would save less than a fifth of the tokens
        grouped("generate"),  # has its own rule for prompts
    ],
)
def test_nothing_is_shared_where_the_engine_shares_nothing(alone: Call) -> None:
    assert Work.of(alone, SHARING) == Work.of(alone)


def test_a_random_half_of_the_rows_shares_less() -> None:
    # Of a prompt's 4 rows a half of the batch has at least one with probability 15/16.
    work = Work.of(grouped("train", prompt=64, updates=2), SHARING)
    assert work.tokens == pytest.approx(64 * (15 / 16) / (4 * 0.5) + 32)


def test_the_time_follows() -> None:
    made, on = call("train", rows=8, prompt=4, response=4, samples_per_prompt=4), mesh(1)
    whole = TimeModel(IDEAL).call_time(made, Layout(micro_batch=8), on)
    shared = TimeModel(IDEAL, SHARING).call_time(made, Layout(micro_batch=8), on)
    assert shared.matmul_s == pytest.approx(whole.matmul_s * 5 / 8)
