"""The model of time against sums worked out by hand, and what must hold whatever the numbers."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.time_model import TimeModel, move_time, offload_time
from penstock.planner.inputs.calls import CallKind, Lengths
from penstock.planner.inputs.layout import Layout

from .time_cases import IDEAL, MIXTURE, TINY, call, call_time, mesh, timed

NANO = 1e-9  # one operation or byte of the round machine

# A forward pass over 6 rows of 4 tokens: in each of 2 layers 2 x 592 operations per token and
# 2 x 8 per squared length; in the head 2 x 256 per token.
LAYERS = 2 * 2 * 592 * 24
ATTENTION = 2 * 16 * (6 * 4**2)
HEAD = 2 * 256 * 24
WEIGHTS = 2 * 592 + 256 + 256


def parts(**seconds: float) -> dict[str, Any]:
    """Expected parts from nanoseconds."""
    return {name: pytest.approx(value * NANO) for name, value in seconds.items()}


def test_a_forward_call_on_one_device() -> None:
    time = timed(call("forward"))
    assert time.parts() == parts(matmul=LAYERS + HEAD, attention=ATTENTION)
    assert time.total_s == pytest.approx((LAYERS + HEAD + ATTENTION) * NANO)


def test_a_scalar_head_costs_one_column() -> None:
    time = timed(call("forward", head="scalar"))
    assert time.matmul_s == pytest.approx((LAYERS + 2 * 8 * 24) * NANO)


def test_few_tokens_wait_for_the_weights_to_be_read() -> None:
    time = timed(call("forward"), mesh(memory=1e6))
    assert time.matmul_s == pytest.approx((2 * 592 * 2 + 256 * 2) / 1e6)


def test_attention_grows_with_the_mean_square_of_lengths() -> None:
    # Responses of 1 and 5 tokens: 3 and 7 with the prompt, mean square 29 where 5 would give 25.
    response = Lengths(tokens=(1, 5))
    time = timed(call("forward", response=response))
    assert time.attention_s == pytest.approx(2 * 16 * 6 * 29 * NANO)


def test_training_is_three_forward_passes_and_a_fourth_with_checkpointing() -> None:
    step = WEIGHTS * (28 + 2) / 1000  # 16-bit copy beside float32 states; memory is 1000 x faster
    assert timed(call("train")).parts() == parts(
        matmul=3 * (LAYERS + HEAD), attention=3 * ATTENTION, optimizer=step
    )
    assert timed(call("train"), checkpointing=True).parts() == parts(
        matmul=4 * LAYERS + 3 * HEAD, attention=4 * ATTENTION, optimizer=step
    )


def test_updates_share_the_rows_of_all_passes() -> None:
    time = timed(call("train", passes=2, updates=4))
    step = WEIGHTS * 30 / 1000
    assert time.parts() == parts(
        matmul=2 * 3 * (LAYERS + HEAD), attention=2 * 3 * ATTENTION, optimizer=4 * step
    )


def test_tensor_parallel_ranks_halve_the_work_and_sum_twice_a_layer() -> None:
    # 24 tokens x 8 x 2 bytes = 384; a ring of two moves half of it twice.
    expected = parts(matmul=(LAYERS + HEAD) / 2, attention=ATTENTION / 2, tp_comm=2 * 2 * 384)
    assert timed(call("forward"), tp=2).parts() == expected
    assert timed(call("forward"), tp=2, sequence_parallel=True).parts() == expected
    for checkpointing, times in ((False, 2), (True, 3)):
        time = timed(call("train"), tp=2, checkpointing=checkpointing)
        assert time.tp_comm_s == pytest.approx(times * 4 * 384 * NANO)


def test_a_pipeline_waits_at_both_ends() -> None:
    # 3 micro-batches of 2 rows; a stage is one layer and hands over 8 tokens x 8 x 2 bytes.
    layer, attention, sent = 2 * 592 * 8, 16 * 2 * 4**2, 8 * 8 * 2
    assert timed(call("forward"), pp=2, micro_batch=2).parts() == parts(
        matmul=LAYERS / 2 + HEAD, attention=ATTENTION / 2, p2p=3 * sent,
        bubble=layer + attention + sent,
    )  # fmt: skip
    train = timed(call("train"), pp=2, micro_batch=2)
    assert train.p2p_s == pytest.approx(2 * 3 * sent * NANO)
    assert train.bubble_s == pytest.approx((3 * (layer + attention) + 2 * sent) * NANO)
    cut = timed(call("forward"), tp=2, pp=2, micro_batch=2, sequence_parallel=True)
    assert cut.p2p_s == pytest.approx(3 * sent / 2 * NANO)


def test_a_last_smaller_micro_batch_counts_its_share() -> None:
    whole, part = (timed(call("forward", rows=rows), pp=2, micro_batch=2) for rows in (6, 5))
    assert part.matmul_s == pytest.approx(whole.matmul_s * 5 / 6)
    assert part.bubble_s == pytest.approx(whole.bubble_s)


@pytest.mark.parametrize(
    ("zero", "sync", "gather", "states"), [(0, 2, 0, 1), (1, 1, 1, 2), (2, 3, 1, 2), (3, 3, 6, 2)]
)
def test_zero_trades_messages_for_memory(zero: int, sync: int, gather: int, states: int) -> None:
    # Two ranks, 3 micro-batches of one row each; a gather moves the half that a rank lacks:
    # gradients in float32, weights in 16 bits.
    time = timed(call("train"), dp=2, micro_batch=1, zero=zero)
    assert time.grad_sync_s == pytest.approx(sync * WEIGHTS * 4 / 2 * NANO)
    assert time.weight_gather_s == pytest.approx(gather * WEIGHTS * 2 / 2 * NANO)
    assert time.optimizer_s == pytest.approx(WEIGHTS * 30 / states / 1000 * NANO)
    assert time.matmul_s == pytest.approx(3 * (LAYERS + HEAD) / 2 * NANO)


def test_weights_that_zero_has_cut_are_gathered_for_every_kind_of_call() -> None:
    half = WEIGHTS * 2 / 2 * NANO
    forward = timed(call("forward"), dp=2, micro_batch=1, zero=3)
    assert forward.weight_gather_s == pytest.approx(3 * half)
    generate = timed(call("generate", response=3), dp=2, zero=3)
    assert generate.weight_gather_s == pytest.approx(2 * half)  # a decode step each


def test_context_parallel_ranks_pass_on_keys_and_values() -> None:
    # 12 tokens a rank; each receives the other's 12 x 16 bytes in every layer.
    expected = parts(matmul=(LAYERS + HEAD) / 2, attention=ATTENTION / 2, cp_comm=2 * 12 * 16)
    assert timed(call("forward"), cp=2).parts() == expected
    assert timed(call("train"), cp=2).cp_comm_s == pytest.approx(2 * 2 * 12 * 16 * NANO)


def test_key_heads_that_all_ranks_share_travel_whole() -> None:
    time = timed(call("forward"), tp=2, cp=2)
    assert time.cp_comm_s == pytest.approx(2 * 12 * 16 * NANO)


def test_the_optimizer_steps_over_what_a_rank_holds() -> None:
    # A stage of one layer with the embedding or the head; experts are cut over ep and dp / ep.
    stage = timed(call("train"), pp=2)
    assert stage.optimizer_s == pytest.approx((592 + 256) * 30 / 1e12)
    dense, experts = 2 * 240 + 512, 2 * 4 * 384
    for zero, held in ((0, dense + experts / 2), (1, dense / 4 + experts / 2 / 2)):
        time = timed(call("train", model=MIXTURE), dp=4, ep=2, zero=zero)
        assert time.optimizer_s == pytest.approx(held * 30 / 1e12)


def test_tensor_parallel_ranks_each_route_all_tokens() -> None:
    alone = timed(call("forward", model=MIXTURE), dp=2, ep=2).ep_comm_s
    for cut in (True, False):
        time = timed(call("forward", model=MIXTURE), tp=2, dp=2, ep=2, sequence_parallel=cut)
        assert time.ep_comm_s == pytest.approx(alone)


def test_experts_get_their_tokens_and_give_them_back() -> None:
    # 12 tokens a rank, each to 2 of 4 experts: half of 12 x 2 x 8 x 2 bytes goes, and comes back.
    time = timed(call("forward", model=MIXTURE), dp=2, ep=2)
    assert time.parts() == parts(
        matmul=2 * 2 * 1008 * 12 + HEAD / 2, attention=ATTENTION / 2, ep_comm=2 * 2 * 192
    )
    train = timed(call("train", model=MIXTURE), dp=2, ep=2)
    assert train.ep_comm_s == pytest.approx(2 * 2 * 2 * 192 * NANO)
    # What the ranks hold in common is summed, their own experts are not.
    assert train.grad_sync_s == pytest.approx(2 * (2 * 240 + 512) * 4 / 2 * NANO)


def test_a_call_has_a_fixed_cost() -> None:
    for kind in get_args(CallKind):
        what = call(kind, updates=3 if kind == "train" else 1)
        more = timed(what, constants=IDEAL.replaced(call_s=2.0)).total_s - timed(what).total_s
        assert more == pytest.approx(2.0)


def test_launches_bound_small_work_from_below() -> None:
    slow = IDEAL.replaced(launch_s=1.0)
    assert timed(call("forward"), constants=slow).total_s == pytest.approx(3.0)  # head included
    assert timed(call("train"), constants=slow).total_s == pytest.approx(9.0)
    assert timed(call("train"), constants=slow, checkpointing=True).total_s == pytest.approx(11.0)
    quick = IDEAL.replaced(launch_s=1e-9)
    assert timed(call("forward"), constants=quick) == timed(call("forward"))


def test_moving_weights() -> None:
    assert offload_time(1e6, mesh()) == pytest.approx(0.1)
    assert move_time(1e6, mesh(4, latency=1e-6), IDEAL) == pytest.approx(1e-3 + 1e-6)
    assert move_time(1e6, mesh(8, latency=1e-6), IDEAL) == pytest.approx(1e-2 + 1e-5)
    assert move_time(0, mesh(8, latency=1e-6), IDEAL) == 0


def test_a_device_without_a_figure_for_the_dtype() -> None:
    what = call("forward", model=TINY.model_copy(update={"dtype": "float16"}))
    with pytest.raises(PlanError) as caught:
        timed(what)
    assert str(caught.value) == ("device 'round' has no flops_per_s for float16; it has bfloat16")


# --- properties

KINDS = st.sampled_from(get_args(CallKind))
SPLITS = st.sampled_from([1, 2])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of the mixture, on up to 32 devices."""
    tp, dp = draw(SPLITS), draw(st.sampled_from([1, 2, 4]))
    return Layout(
        tp=tp,
        pp=draw(SPLITS),
        dp=dp,
        cp=draw(SPLITS),
        ep=draw(st.sampled_from([e for e in (1, 2, 4) if dp % e == 0])),
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        checkpointing=draw(st.booleans()),
        micro_batch=draw(st.integers(1, 8)),
    )


@given(kind=KINDS, layout=layouts(), rows=st.integers(1, 40), more=st.integers(1, 40),
       samples=st.integers(1, 5), kv_rows=st.one_of(st.none(), st.integers(2, 9)))  # fmt: skip
def test_more_rows_are_never_faster(
    kind: CallKind, layout: Layout, rows: int, more: int, samples: int, kv_rows: int | None
) -> None:
    on = mesh(layout.num_devices, latency=1e-6)
    kv_bytes = None if kv_rows is None else kv_rows * 4.0 * 32
    few, many = (
        call_time(call(kind, rows=count, model=MIXTURE, samples_per_prompt=samples), layout, on,
                  GPU_DEFAULTS, kv_bytes=kv_bytes).total_s
        for count in (rows, rows + more)
    )  # fmt: skip
    assert many >= few * (1 - 1e-12)


@given(kind=KINDS, layout=layouts(), factor=st.floats(1, 100),
       what=st.sampled_from(["flops", "memory", "within", "between"]))  # fmt: skip
def test_a_better_device_or_link_is_never_slower(
    kind: CallKind, layout: Layout, factor: float, what: str
) -> None:
    peaks: dict[str, Any] = {"flops": 1e9, "memory": 1e6, "within": 1e9, "between": 1e8}
    better = {**peaks, what: peaks[what] * factor}
    slow, fast = (
        call_time(
            call(kind, model=MIXTURE), layout, mesh(layout.num_devices, **sizes), GPU_DEFAULTS
        )
        for sizes in (peaks, better)
    )
    assert fast.total_s <= slow.total_s * (1 + 1e-12)


@given(kind=KINDS, layout=layouts(), factor=st.floats(1, 100),
       name=st.sampled_from(["launch_s", "hop_s", "stage_s", "call_s"]))  # fmt: skip
def test_more_latency_is_never_faster(
    kind: CallKind, layout: Layout, factor: float, name: str
) -> None:
    slower = GPU_DEFAULTS.replaced(**{name: getattr(GPU_DEFAULTS, name) * factor})
    on = mesh(layout.num_devices)
    base, worse = (call_time(call(kind), layout, on, c).total_s for c in (GPU_DEFAULTS, slower))
    assert worse >= base * (1 - 1e-12)


@given(kind=KINDS, layout=layouts())
def test_parts_are_not_negative_and_none_is_there_without_its_cause(
    kind: CallKind, layout: Layout
) -> None:
    time = call_time(call(kind, model=MIXTURE), layout, mesh(layout.num_devices), GPU_DEFAULTS)
    assert min(time) >= 0
    assert time.total_s == pytest.approx(sum(time.parts().values()))
    causes = {
        "tp_comm": layout.tp > 1,
        "cp_comm": layout.cp > 1,
        "ep_comm": layout.ep > 1,
        "p2p": layout.pp > 1,
        "bubble": layout.pp > 1 and kind != "generate",
        "grad_sync": layout.dp * layout.cp > 1 and kind == "train",
        "weight_gather": layout.dp * layout.cp > 1 and (
            layout.zero == 3 or (kind == "train" and layout.zero > 0)
        ),
        "optimizer": kind == "train",
        "prefill": kind == "generate",
    }  # fmt: skip
    assert {name: name in time.parts() for name in causes} == causes


@given(kind=KINDS, layout=layouts(), kv_rows=st.one_of(st.none(), st.integers(2, 9)))
def test_the_model_that_remembers_says_the_same(
    kind: CallKind, layout: Layout, kv_rows: int | None
) -> None:
    model, on = TimeModel(GPU_DEFAULTS), mesh(layout.num_devices)
    kv_bytes = None if kv_rows is None else kv_rows * 4.0 * 32
    for what in (call(kind, model=MIXTURE), call(kind)):
        expected = call_time(what, layout, on, GPU_DEFAULTS, kv_bytes=kv_bytes)
        for _ in range(2):
            assert model.call_time(what, layout, on, kv_bytes=kv_bytes) == expected
