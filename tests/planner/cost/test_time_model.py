"""Generation: prompts once, then steps that read weights and cache, launch, and sum."""

from __future__ import annotations

import pytest
from penstock.dataflow.errors import PlanError
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.time_model import kv_bytes_per_token, rows_at_once
from penstock.planner.cost.time_parts import Work
from penstock.planner.inputs.calls import Lengths
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout

from ..shapes import llama
from .time_cases import IDEAL, MIXTURE, TINY, call, call_time, mesh, timed

READING = mesh(flops=1e15, memory=1e6)
"""A device that waits for its memory, one byte a microsecond."""
MICRO = 1e-6
STEP = 2 * 592 * 2 + 256 * 2
"""Bytes of weights that a step reads: two layers and the head."""


def test_a_step_reads_all_weights_and_every_row_its_cache() -> None:
    # 3 tokens: one from the prefill, two steps at contexts of 3 and 4 (mean 4 with the new one).
    time = timed(call("generate", response=3), READING)
    assert time.matmul_s == pytest.approx(2 * STEP * MICRO)
    assert time.attention_s == pytest.approx(2 * 6 * 4 * 32 * MICRO)
    assert time.prefill_s == pytest.approx(STEP * MICRO, rel=1e-5)
    assert time.total_s == pytest.approx(time.prefill_s + time.matmul_s + time.attention_s)


def test_samples_share_their_prompt() -> None:
    # 2 prompts of 2 tokens through the layers, then the first token of each of 6 rows.
    time = timed(call("generate", samples_per_prompt=3))
    layers, attention, head = 2 * 2 * 592 * 4, 2 * 16 * 2 * 2**2, 2 * 256 * 6
    assert time.prefill_s == pytest.approx((layers + attention + head) * 1e-9)


def test_one_token_needs_no_decoding() -> None:
    assert set(timed(call("generate", response=1)).parts()) == {"prefill"}


def test_rows_that_have_ended_cost_nothing() -> None:
    # Half of the rows end with the prefill's token; the others decode twice at a context of 4.
    time = timed(call("generate", response=Lengths(tokens=(1, 3))), READING)
    assert time.attention_s == pytest.approx(2 * 3 * 4 * 32 * MICRO)
    # Ends after 2 and 4 tokens: one step of 6 rows at 3.5, two of 3 rows at 5.
    time = timed(call("generate", response=Lengths(tokens=(2, 4))), READING)
    assert time.attention_s == pytest.approx((6 * 3.5 + 2 * 3 * 5) * 32 * MICRO)


def test_launches_are_what_a_small_step_waits_for() -> None:
    time = timed(call("generate", response=3), constants=IDEAL.replaced(launch_s=1.0))
    assert time.prefill_s == pytest.approx(3.0)
    assert time.total_s - time.prefill_s == pytest.approx(2 * 3.0)


def test_key_heads_are_cut_until_each_rank_has_one() -> None:
    heads = {1: 1, 2: 2, 4: 4}
    work = {n: Work.of(call("generate", model=TINY.model_copy(update={"num_key_heads": n})))
            for n in heads}  # fmt: skip
    found = {n: [kv_bytes_per_token(work[n], Layout(tp=tp)) for tp in (1, 2, 4, 8)] for n in heads}
    assert found == {1: [32, 32, 32, 32], 2: [64, 32, 32, 32], 4: [128, 64, 32, 32]}
    assert kv_bytes_per_token(work[4], Layout(pp=2, cp=2)) == 32


def test_more_ranks_than_key_heads_read_the_same_cache() -> None:
    one, two = (timed(call("generate"), mesh(tp, flops=1e15, memory=1e6), tp=tp) for tp in (1, 2))
    assert two.attention_s == pytest.approx(one.attention_s)
    assert two.matmul_s == pytest.approx(one.matmul_s / 2)


def test_tensor_parallel_steps_sum_twice_a_layer_and_gather_the_logits() -> None:
    # 6 rows x 8 x 2 bytes: five all-reduces (the embedding's too); then half of 6 x 32 x 2.
    time = timed(call("generate"), tp=2)
    assert time.tp_comm_s == pytest.approx((5 * 96 + 192) * 1e-9)
    slow = timed(call("generate"), mesh(2, latency=1.0), tp=2)
    assert slow.tp_comm_s == pytest.approx(5 * 2 + 1)


def test_a_token_goes_round_all_stages_of_a_pipeline() -> None:
    # Two groups of 3 rows: a round is two stages of one layer each, and twice the head.
    time = timed(call("generate"), mesh(2, flops=1e15, memory=1e6), pp=2)
    assert time.matmul_s == pytest.approx(2 * (592 * 2 + 512) * MICRO)
    assert time.attention_s == pytest.approx(2 * 3 * 3.5 * 16 * MICRO)
    assert time.p2p_s == pytest.approx(2 * 3 * 8 * 2 * 1e-9)
    # One row fills one stage at a time, and still goes round.
    alone = timed(call("generate", rows=1), mesh(2, flops=1e15, memory=1e6), pp=2)
    assert alone.matmul_s == pytest.approx((2 * 592 * 2 + 512) * MICRO)


def test_prompts_fill_the_pipeline_one_group_a_stage() -> None:
    # Two groups of 6 tokens and one bubble; the head twice for 3 first tokens each.
    time = timed(call("generate"), pp=2)
    layer, attention, sent, head = 2 * 592 * 6, 16 * 3 * 2**2, 6 * 8 * 2, 2 * 256 * 3
    expected = 3 * (layer + attention + sent) + 2 * head
    assert time.prefill_s == pytest.approx(expected * 1e-9)


def test_context_parallel_ranks_share_the_cache_and_sum_what_heads_found() -> None:
    # Two ranks sum 6 rows x 2 heads x 4 numbers of 2 bytes in each of two layers.
    time = timed(call("generate"), mesh(2, flops=1e15, memory=1e6), cp=2)
    assert time.attention_s == pytest.approx(6 * 3.5 * 32 / 2 * MICRO)
    assert time.cp_comm_s == pytest.approx(2 * 96 * 1e-9)
    cut = timed(call("generate"), tp=2, cp=2)
    assert cut.cp_comm_s == pytest.approx(2 * 96 / 2 * 1e-9)


def test_a_row_that_outlives_the_others_is_still_a_row() -> None:
    # One row in eight goes on after 2 tokens: of the single row a rank has, that is the row.
    tail = Lengths(tokens=(2, 4), weights=(7, 1))
    time = timed(call("generate", rows=1, response=tail), READING)
    assert time.attention_s == pytest.approx((3.5 + 2 * 5) * 32 * MICRO)
    assert time.matmul_s == pytest.approx(3 * STEP * MICRO)


def test_every_wave_computes_its_prompts() -> None:
    # 6 samples of one prompt in two waves: the prompt is computed twice.
    what = call("generate", samples_per_prompt=6)
    time = timed(what, kv_bytes=3 * 32 * 4)
    layers, attention, head = 2 * 2 * 592 * 2, 2 * 16 * 2**2, 2 * 256 * 6
    assert time.prefill_s == pytest.approx(2 * (layers + attention + head) * 1e-9)


def test_experts_of_other_ranks_get_tokens_too() -> None:
    # One row a rank, each to 2 of 4 experts: two rows meet 3 of 4, a rank's own 2 by 3 / 4.
    what = call("generate", rows=2, model=MIXTURE)
    time = timed(what, mesh(2, flops=1e15, memory=1e6), dp=2, ep=2)
    assert time.matmul_s == pytest.approx((2 * (240 + 2 * 384 * 0.75) * 2 + 512) * MICRO)
    assert time.ep_comm_s == pytest.approx(2 * 2 * 16 * 1e-9)


def test_data_parallel_ranks_share_the_rows_rounded_up() -> None:
    time = timed(call("generate", rows=7), dp=4)
    assert time == timed(call("generate", rows=2))


def test_a_step_reads_only_the_experts_that_its_tokens_met() -> None:
    # One row meets 2 of 4 experts, many rows meet all.
    one = timed(call("generate", rows=1, model=MIXTURE), READING)
    assert one.matmul_s == pytest.approx((2 * (240 + 2 * 384) * 2 + 512) * MICRO)
    many = timed(call("generate", rows=60, model=MIXTURE), READING)
    assert many.matmul_s == pytest.approx((2 * 1776 * 2 + 512) * MICRO)


def test_rows_that_do_not_fit_run_in_waves() -> None:
    what = call("generate")
    row = 32 * 4.0
    assert rows_at_once(Work.of(what), Layout(), 3 * row) == 3
    assert rows_at_once(Work.of(what), Layout(), 3 * row - 1) == 2
    half = timed(call("generate", rows=3), READING)
    assert timed(what, READING, kv_bytes=3 * row).total_s == pytest.approx(2 * half.total_s)
    assert timed(what, READING, kv_bytes=6 * row) == timed(what, READING)


def test_a_cache_for_no_row_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        timed(call("generate"), kv_bytes=127)
    assert str(caught.value) == (
        "a key-value cache of 127 bytes per device holds no row of 4 tokens, which needs 128; cut "
        "the heads or layers over more devices, or leave more memory to the cache"
    )


# --- what was measured elsewhere


def gpus(nodes: int, *, memory: float, flops: float, within: float, between: float) -> Mesh:
    """Nodes of 8 GPUs with 80 GB."""
    device = DeviceSpec(
        name="gpu",
        memory_bytes=80 * 10**9,
        flops_per_s={"bfloat16": flops},
        memory_bytes_per_s=memory,
        host_bytes_per_s=2e10,
    )
    group = NodeGroup(
        num_nodes=nodes,
        devices_per_node=8,
        device=device,
        within=LinkSpec(bytes_per_s=within, latency_s=5e-6),
    )
    cluster = ClusterSpec(
        name="gpus", node_groups=(group,), between=LinkSpec(bytes_per_s=between, latency_s=2e-5)
    )
    return Mesh(cluster, (8 * nodes,))


def test_decoding_without_graphs_waits_for_launches_and_all_reduces() -> None:
    """An H100 node needed 1.2-1.8 ms per layer and token at tp = 8, and 0.57 ms at tp = 1."""
    node = gpus(1, memory=3.35e12, flops=989e12, within=450e9, between=25e9)
    without_graphs = GPU_DEFAULTS.replaced(launch_s=5.33e-4, hop_s=2.08e-5, call_s=0.0)

    def per_layer_ms(layout: Layout) -> float:
        short, long = (
            call_time(
                call("generate", rows=128, prompt=128, response=tokens, model=llama(7)),
                layout, node, without_graphs,
            ).total_s
            for tokens in (128, 896)
        )  # fmt: skip
        return (long - short) / (896 - 128) / 32 * 1e3

    assert 1.2 <= per_layer_ms(Layout(tp=8)) <= 1.8
    assert per_layer_ms(Layout(dp=8)) == pytest.approx(0.57, rel=0.1)


@pytest.mark.parametrize(("billions", "best"), [(7, 2), (13, 4)])
def test_the_best_tp_for_generation_beside_a_tp_8_trainer(billions: int, best: int) -> None:
    """HybridFlow, section 8.3: 16 A100, 1024 prompts of 1024 tokens and as long responses.

    The cache gets what four models leave: actor and critic with weights, float32 gradients and an
    optimizer cut over dp, the reference and the reward model with weights, all at tp = 8, dp = 2;
    the generation's own weights take what they need beyond the actor's.
    """
    nodes = gpus(2, memory=2.039e12, flops=312e12, within=300e9, between=3.1e9)
    model = llama(billions)
    params = model.num_params()
    held = 2 * params * (2 / 8 + 4 / 8 + 12 / 16) + 2 * params * 2 / 8
    seconds: dict[int, float] = {}
    for tp in (1, 2, 4, 8):
        kv_bytes = 77e9 - held - 2 * params * (1 / tp - 1 / 8)
        what = call("generate", rows=1024, prompt=1024, response=1024, model=model)
        layout = Layout(tp=tp, dp=16 // tp)
        seconds[tp] = call_time(what, layout, nodes, GPU_DEFAULTS, kv_bytes=kv_bytes).total_s
    assert min(seconds, key=lambda tp: seconds[tp]) == best
    assert seconds[8] > 1.2 * seconds[best]
