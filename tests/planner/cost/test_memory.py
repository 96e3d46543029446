"""The memory model against sums worked out by hand, and what must hold whatever the sizes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.cost.memory import (
    BUCKET_BYTES,
    GroupLedger,
    Parts,
    kv_bytes,
    resident_parts,
    rows_at_once,
    transient_parts,
    weight_bytes,
)
from penstock.planner.inputs.calls import Call, Lengths
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape

from ..shapes import LLAMA_7B, LLAMA_70B
from .memory_cases import MIXTURE, TINY, make_call

# Numbers of weights of one device of LLaMA-2 7B at tp=8, by hand: matrices divided, norms not.
_LAYER = (4 * 4096**2 + 3 * 4096 * 11008) // 8 + 2 * 4096
_EMBEDDING = 32000 * 4096 // 8
_AT_TP8 = 32 * _LAYER + 2 * _EMBEDDING + 4096


# --- states ---------------------------------------------------------------------------------------


def test_one_device_holds_all_weights_of_every_shape() -> None:
    tied = LLAMA_7B.model_copy(update={"tied_embeddings": True, "qkv_bias": True})
    for shape in (LLAMA_7B, LLAMA_70B, TINY, MIXTURE, tied):
        for head in ("vocabulary", "scalar"):
            expected = shape.num_params(head) * shape.dtype_bytes
            assert weight_bytes(shape, head, Layout()) == expected


FROZEN = make_call("forward", trained=False)
_TINY = TINY.num_params()


@pytest.mark.parametrize(
    ("call", "layout", "expected"),
    [
        (FROZEN, Layout(tp=8, dp=2), Parts(weights=2 * _AT_TP8)),
        (FROZEN, Layout(tp=8, dp=2, zero=3), Parts(weights=2 * _AT_TP8)),
        (make_call(), Layout(tp=8), Parts(2 * _AT_TP8, 4 * _AT_TP8, 12 * _AT_TP8)),
        (make_call(model=TINY), Layout(), Parts(4 * _TINY, 4 * _TINY, 8 * _TINY)),
    ],
    ids=["all but the norms are shared", "ZeRO leaves frozen roles alone",
         "18 bytes per weight of 16 bits", "16 bytes per weight of 32 bits"],
)  # fmt: skip
def test_what_a_device_always_holds(call: Call, layout: Layout, expected: Parts) -> None:
    assert _AT_TP8 == 842_534_912
    assert resident_parts(call, layout) == expected


def test_the_worst_stage_has_the_embedding_or_the_head() -> None:
    layout = Layout(tp=8, pp=4)
    last = 8 * _LAYER + _EMBEDDING + 4096
    assert resident_parts(FROZEN, layout).weights == 2 * last
    values = make_call("forward", trained=False, head="scalar")
    first = 8 * _LAYER + _EMBEDDING
    assert resident_parts(values, layout).weights == 2 * first


def test_both_ends_of_a_pipeline_hold_a_tied_embedding() -> None:
    tied = LLAMA_7B.model_copy(update={"tied_embeddings": True})
    for pp, copies in ((1, 1), (2, 1)):
        expected = 32 // pp * _LAYER + copies * _EMBEDDING + 4096
        assert weight_bytes(tied, "vocabulary", Layout(tp=8, pp=pp)) == 2 * expected


def test_key_heads_are_repeated_beyond_their_number() -> None:
    by_8 = weight_bytes(LLAMA_70B, "vocabulary", Layout(tp=8))
    by_16 = weight_bytes(LLAMA_70B, "vocabulary", Layout(tp=16))
    keys = 80 * 2 * 8192 * 128 * 2  # one key head with its values, in every layer
    norms = (80 * 2 + 1) * 8192 * 2
    assert by_16 - keys - norms == (by_8 - keys - norms) // 2


def test_experts_are_shared_by_expert_parallel_ranks() -> None:
    whole = weight_bytes(MIXTURE, "vocabulary", Layout(dp=4))
    shared = weight_bytes(MIXTURE, "vocabulary", Layout(dp=4, ep=4))
    experts = 4 * 8 * 3 * 1024 * 512 * 2
    assert whole - shared == experts * 3 // 4


def test_a_shared_expert_is_on_every_rank() -> None:
    beside = MIXTURE.model_copy(update={"shared_expert_size": 256})
    layout = Layout(tp=2, dp=4, ep=4)
    more = 4 * (3 * 1024 * 128 + 1024) * 2
    without = weight_bytes(MIXTURE, "vocabulary", layout)
    assert weight_bytes(beside, "vocabulary", layout) - without == more
    kept = [
        transient_parts(make_call(model=model), Layout()).activations for model in (MIXTURE, beside)
    ]
    assert kept[1] - kept[0] == 4 * 2048 * (4 * 256 + 1024) * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_shares_optimizer_then_gradients_then_weights(stage: int) -> None:
    call = make_call()
    alone = resident_parts(call, Layout(tp=8))
    shared = resident_parts(call, Layout.model_validate({"tp": 8, "dp": 16, "zero": stage}))
    parts = ((3, "weights"), (2, "gradients"), (1, "optimizer"))
    for first_stage, part in parts:
        ranks = 16 if stage >= first_stage else 1
        assert ranks * getattr(shared, part) == getattr(alone, part), part


def test_zero_shares_experts_among_the_ranks_that_have_the_same() -> None:
    call = make_call(model=MIXTURE)
    held = resident_parts(call, Layout(dp=8, ep=4, zero=1))
    experts = 4 * 8 * 3 * 1024 * 512
    dense = MIXTURE.num_params() - experts
    assert held.optimizer == 12 * (dense // 8 + experts // 4 // 2)


def test_zero_3_gathers_two_layers_and_scatters_the_gradients_of_one() -> None:
    parts = transient_parts(make_call(), Layout(tp=8, dp=2, zero=3))
    assert (parts.weights, parts.gradients) == (2 * 2 * _LAYER, 4 * _LAYER)


# --- activations and logits -----------------------------------------------------------------------


def test_a_layer_saves_what_the_literature_counts() -> None:
    # Korthikanti et al. 2022, section 4.1: 34 bytes per token and hidden unit at equal heads and a
    # feed-forward four times as wide. 2 of them are dropout masks; 16 are the feed-forward's two
    # inner tensors, of which a gated one has four.
    shape = LLAMA_7B.model_copy(update={"intermediate_size": 4 * 4096, "num_layers": 1})
    parts = transient_parts(make_call(model=shape), Layout())
    sums = 32 * 4  # of fused attention: one float32 per head
    assert parts.activations == 2048 * (4096 * (34 - 2 + 16) + sums)


@pytest.mark.parametrize(
    ("sequence_parallel", "hidden"), [(False, 4 * 4096 * 2), (True, 4 * 4096 * 2 // 8)]
)
def test_activations_under_tensor_parallelism(sequence_parallel: bool, hidden: int) -> None:
    layout = Layout(tp=8, micro_batch=4, sequence_parallel=sequence_parallel)
    per_token = hidden + (4 * 4096 * 2 + 32 * 4 + 4 * 11008 * 2) // 8
    parts = transient_parts(make_call(), layout)
    assert parts.activations == 32 * 4 * 2048 * per_token
    assert parts.logits == 4 * 2048 * 4000 * (2 + 8)


def test_checkpointing_keeps_a_hidden_state_per_layer_and_one_layer() -> None:
    # Few words, so that the layer that is computed again outweighs the logits.
    shape = LLAMA_7B.model_copy(update={"vocab_size": 1000})
    call = make_call(model=shape)
    plain = transient_parts(call, Layout(tp=8))
    kept = transient_parts(call, Layout(tp=8, checkpointing=True))
    assert kept.activations == 32 * 2048 * 4096 * 2 + plain.activations // 32
    assert kept.logits == 0
    many = make_call(model=LLAMA_7B.model_copy(update={"vocab_size": 800_000}))
    logits = transient_parts(many, Layout(tp=8, checkpointing=True))
    assert logits.activations == 32 * 2048 * 4096 * 2
    assert logits.logits == 2048 * 100_000 * 10


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    call = make_call()
    one_stage = transient_parts(call, Layout(tp=8))
    assert transient_parts(call, Layout(tp=8, pp=4)).activations == one_stage.activations
    # 1024 rows in 8 updates on 64 ranks: two micro-batches per update.
    few = transient_parts(call, Layout(tp=8, pp=4, dp=64))
    assert few.activations == one_stage.activations // 2


def test_micro_batches_are_no_larger_than_an_update() -> None:
    call = make_call()
    layout = Layout(tp=8, dp=64)  # 1024 / 8 / 64 = 2 rows
    two, many = (
        transient_parts(call, layout.model_copy(update={"micro_batch": size})) for size in (2, 16)
    )
    assert two == many
    # All rows are evaluated at once: 16 of them on each rank.
    evaluate = make_call("forward")
    assert transient_parts(evaluate, layout.model_copy(update={"micro_batch": 16})) != (
        transient_parts(evaluate, layout.model_copy(update={"micro_batch": 2}))
    )


def test_values_have_no_logits_to_speak_of() -> None:
    assert transient_parts(make_call(head="scalar"), Layout()).logits == 2048 * 4


def test_chosen_experts_save_their_own_inputs() -> None:
    dense = MIXTURE.model_copy(update={"num_experts": 0, "experts_per_token": 0})
    mixed, single = (
        transient_parts(make_call(model=model), Layout()).activations for model in (MIXTURE, dense)
    )
    inner, hidden = 4 * 512 * 2, 1024 * 2
    more = 2 * (inner + 2 * hidden) + 8 * 4 - inner
    assert mixed - single == 4 * 2048 * more


def test_experts_have_all_tokens_under_sequence_parallelism() -> None:
    whole, cut = (
        transient_parts(make_call(model=MIXTURE), Layout(tp=2, sequence_parallel=on)).activations
        for on in (False, True)
    )
    hidden = 1024 * 2
    # Four states of the layer are halved, but what is gathered of them for the experts is not, nor
    # what these take in and give out.
    assert whole - cut == 4 * 2048 * (4 - 1) * hidden // 2


# --- generation -----------------------------------------------------------------------------------


def test_the_cache_holds_all_rows_of_a_rank() -> None:
    call = make_call("generate")
    layout = Layout(tp=8, dp=16)
    assert rows_at_once(call, layout) == 64
    per_token = 2 * 32 * (32 // 8) * 128 * 2
    assert kv_bytes(call, layout, 64) == 64 * 2048 * per_token
    assert transient_parts(call, layout).kv_cache == 64 * 2048 * per_token
    assert transient_parts(call, layout, rows=16).kv_cache == 16 * 2048 * per_token


def test_grouped_queries_and_stages_divide_the_cache() -> None:
    call = make_call("generate", model=LLAMA_70B)
    whole = kv_bytes(call, Layout(), 1)
    assert whole == 2048 * 2 * 80 * 8 * 128 * 2
    assert kv_bytes(call, Layout(tp=8, pp=2), 1) == whole // 16
    assert kv_bytes(call, Layout(tp=16, pp=2), 1) == whole // 16  # each rank has one key head
    assert kv_bytes(call, Layout(cp=4), 1) == whole // 4


def test_rows_that_end_free_their_cache() -> None:
    # Half of the rows end at 100 tokens: then 100 + 100 are held by all, later 100 + 200 by half.
    mixed = make_call("generate", prompt=Lengths.constant(100), response=Lengths(tokens=(100, 200)))
    constant = dataclasses.replace(mixed, response=Lengths.constant(100))
    layout = Layout(tp=8)
    assert kv_bytes(mixed, layout, 10) == kv_bytes(constant, layout, 10)
    late = dataclasses.replace(mixed, response=Lengths(tokens=(100, 800)))
    per_token = kv_bytes(constant, layout, 1) // 200
    assert kv_bytes(late, layout, 10) == 10 * 450 * per_token


def test_a_borrowing_generation_copies_the_weights() -> None:
    call = make_call("generate")
    layout = Layout(tp=2, dp=64)
    copy = weight_bytes(LLAMA_7B, "vocabulary", layout)
    assert transient_parts(call, layout, borrows=True).weights == copy
    assert transient_parts(call, layout).weights == 0  # its own, which are resident
    assert resident_parts(call, layout) == Parts(weights=copy)


def test_weights_move_through_buckets_before_the_cache_is_there() -> None:
    call = make_call("generate", num_sequences=1, prompt=Lengths.constant(1))
    short = dataclasses.replace(call, response=Lengths.constant(1))
    moving = transient_parts(short, Layout(tp=2), borrows=True)
    assert (moving.transfer, moving.kv_cache) == (2 * BUCKET_BYTES, 0)
    running = transient_parts(make_call("generate"), Layout(tp=2), borrows=True)
    assert running.transfer == 0
    assert running.kv_cache > 2 * BUCKET_BYTES


def test_a_frozen_generator_gets_no_new_weights() -> None:
    call = make_call("generate", trained=False, num_sequences=1, response=Lengths.constant(1))
    assert transient_parts(call, Layout(tp=2)).transfer == 0


# --- laws -----------------------------------------------------------------------------------------

_SHAPES = st.builds(
    ModelShape,
    name=st.just("any"),
    hidden_size=st.sampled_from([64, 256, 1024]),
    num_layers=st.sampled_from([4, 8, 16]),
    num_heads=st.just(16),
    num_key_heads=st.sampled_from([1, 2, 8, 16]),
    head_dim=st.sampled_from([16, 64]),
    intermediate_size=st.sampled_from([128, 1024]),
    vocab_size=st.sampled_from([64, 4096]),
    tied_embeddings=st.booleans(),
    qkv_bias=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
_CALLS = st.builds(
    make_call,
    kind=st.sampled_from(["train", "forward", "generate"]),
    model=_SHAPES,
    trained=st.booleans(),
    num_sequences=st.sampled_from([16, 100, 1024]),
    prompt=st.sampled_from([Lengths.constant(64), Lengths(tokens=(10, 20, 200))]),
    response=st.sampled_from([Lengths.constant(64), Lengths(tokens=(10, 20, 200))]),
    updates=st.sampled_from([1, 4]),
)
_LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
    checkpointing=st.booleans(),
    micro_batch=st.sampled_from([1, 2, 8]),
)


@given(call=_CALLS, layout=_LAYOUTS, axis=st.sampled_from(["tp", "pp", "dp", "cp"]))
def test_more_ranks_never_hold_more_each(call: Call, layout: Layout, axis: str) -> None:
    more = layout.model_copy(update={axis: 2 * getattr(layout, axis)})
    assert resident_parts(call, more).total <= resident_parts(call, layout).total
    if layout.zero < 2:  # above, ranks gather what they share
        assert transient_parts(call, more).total <= transient_parts(call, layout).total


@given(call=_CALLS, layout=_LAYOUTS)
def test_less_at_once_never_needs_more(call: Call, layout: Layout) -> None:
    def total(**changes: object) -> int:
        return transient_parts(call, layout.model_copy(update=changes)).total

    most = total()
    assert total(micro_batch=1) <= most
    if call.kind == "train" and call.model.num_layers // layout.pp > 1:
        assert total(checkpointing=True) <= total(checkpointing=False)
    assert transient_parts(call, layout, rows=1).total <= most


@given(call=_CALLS, layout=_LAYOUTS)
def test_the_ranks_of_a_tensor_parallel_group_hold_the_whole_model(
    call: Call, layout: Layout
) -> None:
    held = weight_bytes(call.model, call.head, layout) * layout.tp * layout.pp
    assert held >= call.model.num_params(call.head) * call.model.dtype_bytes


def test_adapters_alone_have_gradients_and_moments_which_zero_3_shares_out() -> None:
    half = TINY.model_copy(update={"dtype": "bfloat16", "adapter_params": 600})
    call, layout = make_call(model=half, head="vocabulary"), Layout(dp=2, zero=3)
    params = TINY.num_params()
    assert resident_parts(call, Layout()) == Parts(2 * params + 2400, 2400, 4800)
    assert resident_parts(call, layout) == Parts(params + 1200, 1200, 2400)
    assert transient_parts(call, layout).gradients == 1200  # one layer's, before they are shared
    generate = make_call("generate", model=half)
    moving = transient_parts(generate, Layout(), rows=1)
    assert moving.transfer in (0, 2 * 2400)


GIB = 2**30
TRAIN = GroupLedger(
    "train",
    8,
    resident={
        "actor": Parts(weights=2 * GIB, optimizer=16 * GIB),
        "reference": Parts(weights=2 * GIB),
    },
    calls={
        "reference.logprob": Parts(activations=GIB // 2),
        "actor.train": Parts(activations=43 * GIB),
    },
)
ROLLOUT = GroupLedger(
    "rollout",
    2,
    resident={"actor.generate": Parts(weights=8 * GIB)},
    calls={"actor.generate": Parts(activations=GIB, kv_cache=60 * GIB)},
)

TABLE = """\
group                                weights  optimizer  activations     total
train x8  always: actor             2.00 GiB   16.0 GiB            -  18.0 GiB
          always: reference         2.00 GiB          -            -  2.00 GiB
          while: reference.logprob         -          -      512 MiB   512 MiB
          while: actor.train               -          -     43.0 GiB  43.0 GiB
          peak                      4.00 GiB   16.0 GiB     43.0 GiB  63.0 GiB
"""


def test_the_peak_is_what_is_held_and_the_hungriest_call() -> None:
    assert TRAIN.peak == (
        "actor.train",
        Parts(weights=4 * GIB, optimizer=16 * GIB, activations=43 * GIB),
    )


def test_a_group_without_calls_is_at_its_peak_at_rest() -> None:
    group = GroupLedger("idle", 1, {"judge": Parts(weights=7)}, {})
    assert group.peak == ("", Parts(weights=7))


_PARTS = st.builds(Parts, *[st.integers(0, 2**40)] * len(Parts._fields))


@given(
    resident=st.dictionaries(st.text(max_size=3), _PARTS, max_size=3),
    calls=st.dictionaries(st.text(max_size=3), _PARTS, max_size=4),
)
def test_no_moment_is_above_the_peak(resident: dict[str, Parts], calls: dict[str, Parts]) -> None:
    name, peak = GroupLedger("any", 1, resident, calls).peak
    held = sum(parts.total for parts in resident.values())
    assert peak.total == max([held, *(held + parts.total for parts in calls.values())])
    assert name in calls or peak.total == held


def test_the_table_shows_every_moment() -> None:
    assert TRAIN.table() == TABLE.strip()


def test_what_does_not_fit_is_refused_with_what_lacks() -> None:
    assert ROLLOUT.refusal(64 * GIB, "actor.train: zero=1") == (
        "group 'rollout' does not fit: during 'actor.generate' each of its 2 devices needs "
        "69.0 GiB, but roles can use 64.0 GiB; 5.00 GiB (5368709120 bytes) are missing. "
        f"The largest part is kv cache, 60.0 GiB\n{ROLLOUT.table()}\n"
        "the cheapest change that makes it fit: actor.train: zero=1"
    )


def test_a_group_that_cannot_even_rest_says_so() -> None:
    idle = GroupLedger("idle", 1, {"judge": Parts(weights=7)}, {})
    assert "at rest each of its 1 devices needs 7 B" in idle.refusal(3, "a smaller model")
