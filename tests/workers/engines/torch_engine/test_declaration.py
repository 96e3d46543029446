"""The torch engine's memory: sums worked out by hand, laws, and a live call."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.roles import Demonstrations
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.cost.engine_model import tokens_on_device
from penstock.planner.cost.memory import Parts
from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.workers.engines.torch_engine.declaration import (
    TORCH,
    TorchMemory,
    expected_packs,
    tokens_alone,
    torch_resident_parts,
    torch_transient_parts,
)
from penstock.workers.engines.torch_engine.packing import pack_rows
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import Head, ModelSpec
from penstock.workers.training.flat_parameters import ADDED_AT_ONCE
from penstock.workers.training.host_memory import sent
from penstock.workers.training.microbatch import micro_batches
from torch_models import FAMILIES

from ....planner.cost.memory_cases import TINY, make_call

CASE = Path(__file__).parents[4] / "benchmarks" / "planner_memory_case.py"
HALF = TINY.model_copy(update={"dtype": "bfloat16"})
PARAMS = TINY.num_params()


def rows(num: int, prompt: int, response: int) -> dict[str, Any]:
    """Fields of a call of one update."""
    lengths = {"prompt": Lengths.constant(prompt), "response": Lengths.constant(response)}
    return {"num_sequences": num, "updates": 1, **lengths}


# --- states ---------------------------------------------------------------------------------------


def test_weights_gradients_and_moments_are_whole() -> None:
    call = make_call(model=TINY)
    assert torch_resident_parts(call) == Parts(4 * PARAMS, 4 * PARAMS, 8 * PARAMS)
    layout = Layout(dp=4, zero=3, offload=True)  # the engine does neither
    assert TorchMemory().resident(call, layout) == torch_resident_parts(call)


def test_16_bit_weights_have_a_float32_master_copy_and_gradient() -> None:
    call = make_call(model=HALF)
    assert torch_resident_parts(call) == Parts(2 * PARAMS, 4 * PARAMS, 12 * PARAMS)


def test_adapters_have_gradients_and_moments_and_the_weights_below_have_none() -> None:
    call = make_call(model=HALF.model_copy(update={"adapter_params": 500}))
    assert torch_resident_parts(call) == Parts(2 * PARAMS + 2000, 2000, 4000)
    assert torch_transient_parts(call).gradients == 0
    copy = dataclasses.replace(call, kind="generate")
    assert TorchMemory().resident(copy, Layout()) == Parts(weights=2 * PARAMS + 2000)


def test_on_a_device_weights_have_no_gradient_beside_the_buffer_and_logits_are_kept() -> None:
    model = HALF.model_copy(update={"vocab_size": 100_000})
    call = make_call(model=model, **rows(num=64, prompt=1, response=64))
    there, here = (
        torch_transient_parts(call, micro_batch_tokens=4096, on_cpu=on_cpu)
        for on_cpu in (False, True)
    )
    assert there.gradients == 0 < here.gradients
    assert 64 * 63 <= there.logits / model.vocab_size / 2 <= 64 * 64
    forward = dataclasses.replace(call, kind="forward")
    assert torch_transient_parts(forward, on_cpu=False).logits <= 2 << 28


def test_a_copy_that_generates_has_weights_alone() -> None:
    call = make_call("generate", model=TINY)
    assert TorchMemory().resident(call, Layout()) == Parts(weights=4 * PARAMS)


def test_a_frozen_worker_has_weights_alone() -> None:
    call = make_call("forward", model=TINY, trained=False)
    assert torch_resident_parts(call) == Parts(weights=4 * PARAMS)


# --- calls ----------------------------------------------------------------------------------------


def test_few_tokens_peak_at_the_embedding() -> None:
    shape = TINY.model_copy(update={"vocab_size": 32000})
    call = make_call(model=shape, head="scalar", **rows(1, 2, 2))
    embedding = 32000 * shape.hidden_size
    assert torch_transient_parts(call) == Parts(gradients=4 * embedding)
    # One of 16 bits is converted, a part at a time, and added to the float32 gradient.
    half = shape.model_copy(update={"dtype": "bfloat16"})
    assert torch_transient_parts(dataclasses.replace(call, model=half)) == Parts(
        gradients=2 * embedding + 4 * ADDED_AT_ONCE
    )
    # A head that is the embedding has another one, which waits for it.
    both = shape.model_copy(update={"tied_embeddings": True})
    assert torch_transient_parts(make_call(model=both, **rows(1, 2, 2))) == Parts(
        gradients=2 * 4 * embedding
    )


def test_updates_share_one_gradient() -> None:
    once = make_call(model=HALF, head="scalar", **rows(4, 8, 8))
    twice = dataclasses.replace(once, passes=2, updates=2)
    assert torch_transient_parts(twice) == torch_transient_parts(once)


def test_logits_are_made_in_parts_of_the_weights_dtype() -> None:
    vocab = 1 << 16
    shape = HALF.model_copy(update={"vocab_size": vocab})
    # 60 rows of 8 + 64 tokens: 3,840 positions are read, 128 at once, 32 of them in float32.
    call = make_call(model=shape, **rows(60, 8, 64))
    part, in_float = 128 * vocab * 2, 32 * vocab * 4
    found = torch_transient_parts(call, micro_batch_tokens=2**20)
    assert found.logits == part + 3 * in_float
    assert found.gradients == vocab * shape.hidden_size * 4  # the head's, of several parts
    evaluate = dataclasses.replace(call, kind="forward")
    assert torch_transient_parts(evaluate, micro_batch_tokens=2**20).logits == part + 2 * in_float


def test_checkpointing_keeps_what_goes_into_a_layer() -> None:
    deep = TINY.model_copy(update={"num_layers": 64})
    call = make_call(model=deep, head="scalar", **rows(64, 32, 32))
    kept, again = (torch_transient_parts(call, checkpointing=on) for on in (False, True))
    tokens = 64 * 63 + 64  # aligned
    assert again.activations > 62 * tokens * deep.hidden_size * 4
    assert again.activations < kept.activations / 5
    layout = Layout(checkpointing=True)
    assert TorchMemory().transient(call, layout) == again


def test_every_expert_of_a_token_counts() -> None:
    one = TINY.model_copy(update={"num_experts": 8, "experts_per_token": 1, "num_layers": 64})
    two = one.model_copy(update={"experts_per_token": 2})
    tokens = 64 * 63 + 64  # aligned
    # The token itself, gate, up, the activated gate, the product, and what the expert says.
    expert = tokens * (2 * TINY.hidden_size + 4 * TINY.intermediate_size) * 4

    def activations(shape: ModelShape, kind: CallKind, *, checkpointing: bool = False) -> int:
        call = make_call(kind, model=shape, head="scalar", **rows(64, 32, 32))
        return torch_transient_parts(call, checkpointing=checkpointing).activations

    more = activations(two, "train") - activations(one, "train")
    assert more == pytest.approx(64 * expert, rel=0.02)
    # Computed again, or without gradients, one layer's experts are there at a time.
    again = activations(two, "train", checkpointing=True)
    assert again - activations(one, "train", checkpointing=True) >= expert
    wide = {"intermediate_size": 8 * TINY.intermediate_size}  # more than attention needs
    one, two = one.model_copy(update=wide), two.model_copy(update=wide)
    assert activations(two, "forward") - activations(one, "forward") == (
        tokens * (2 * TINY.hidden_size + 3 * one.intermediate_size) * 4
    )
    generated = [
        torch_transient_parts(make_call("generate", model=shape, **rows(64, 20, 2)))
        for shape in (one, two)
    ]
    assert generated[1].total > generated[0].total


def test_the_gradient_of_all_experts_is_one() -> None:
    mixture = TINY.model_copy(update={"num_experts": 64, "experts_per_token": 1})
    call = make_call(model=mixture, head="scalar", **rows(1, 2, 2))
    down = 64 * TINY.hidden_size * TINY.intermediate_size * 4
    assert torch_transient_parts(call).activations > 2 * down


def test_a_shared_prompt_is_computed_once() -> None:
    alone = make_call(model=TINY, head="scalar", **rows(32, 64, 16))
    shared = dataclasses.replace(alone, samples_per_prompt=8)
    before, after = (torch_transient_parts(call).activations for call in (alone, shared))
    assert after < before / 2
    # Where it would save less than a tenth of the tokens nothing is shared.
    short = make_call(model=TINY, head="scalar", samples_per_prompt=8, **rows(32, 7, 64))
    once = dataclasses.replace(short, samples_per_prompt=1)
    assert torch_transient_parts(short) == torch_transient_parts(once)


def test_micro_batches_on_a_gpu_follow_from_its_size_and_the_model() -> None:
    large = ModelShape(
        name="1.5b", family="qwen2", hidden_size=1536, num_layers=28, num_heads=12, num_key_heads=2,
        head_dim=128, intermediate_size=8960, vocab_size=151_936, tied_embeddings=True,
    )  # fmt: skip

    def tokens(size: float, shape: ModelShape = large, *, trained: bool = True) -> int:
        return tokens_alone(
            shape, "vocabulary", trained=trained, checkpointing=False, device_bytes=int(size)
        )

    assert (tokens(80e9), tokens(52e9), tokens(24e9)) == (16_384, 8192, 4096)
    assert tokens(24e9, trained=False) == 16_384
    assert tokens(1e12, large.model_copy(update={"family": "gemma2"})) == 4096
    # Beside a critic and a reference: what they hold is taken from what there is.
    call = make_call(model=large, **rows(16, 1, 1023))
    held = torch_resident_parts(call).total
    room = 77_000_000_000 - 2 * held - 2 * large.num_params()
    assert tokens_on_device(TORCH.planned, [(call, Layout())], room) == 8192


def test_a_worker_on_a_gpu_chooses_its_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TorchPolicySpec(model=ModelSpec(architecture=FAMILIES["qwen2"]), end_ids=(2,))
    memory = {"cuda:0": 80e9, "cuda:1": 1e6}

    def properties(device: str) -> Any:
        return SimpleNamespace(total_memory=int(memory[device]))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found = [
        made.tokens_at_once(WorkerContext("actor", device=device), Head("lm_head"))
        for made in (spec, dataclasses.replace(spec, micro_batch_tokens=100))
        for device in ("cpu", "cuda", "cuda:1")
    ]
    assert found == [4096, 16_384, 4096, 100, 100, 100]


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    samples=st.integers(1, 6),
    response=st.integers(1, 60),
    bound=st.integers(1, 700),
    device=st.sampled_from(["cpu", "meta"]),
)
def test_packs_are_those_that_are_predicted(
    prompts: list[int], samples: int, response: int, bound: int, device: str
) -> None:
    """As the engine cuts and packs rows of one length of prompts, so does the ledger."""
    prompt, count = prompts[0], len(prompts) * samples
    tokens = torch.randint(3, 1 << 40, (len(prompts), prompt)).repeat_interleave(samples, 0)
    tokens = torch.cat([tokens, torch.randint(3, 50, (count, response))], 1)
    mask = (torch.arange(prompt + response) >= prompt).expand(count, -1)
    batch = Demonstrations(tokens=tokens, mask=mask)
    every = torch.arange(count)
    parts = micro_batches(batch, every, "row", bound, sort_by_length=False, shares_prompts=True)
    packs = set[tuple[int, int]]()
    for part in parts:
        reads = mask[part].roll(-1, 1)
        there = sent(tokens[part], torch.device(device))
        pack = pack_rows(there, reads, torch.full((len(part),), prompt))
        packs.add((len(pack.tokens), len(pack.read)))
    call = make_call(model=TINY, samples_per_prompt=samples, **rows(count, prompt, response))
    expected = expected_packs(call, 1, bound, on_cpu=device == "cpu")
    predicted = {(pack.tokens, pack.reads) for pack in expected}
    assert max(predicted) == max(packs)
    assert predicted == packs or (samples == 1 and predicted < packs)  # without the last, smaller


def test_the_cache_has_whole_rows_and_positions_of_16() -> None:
    # 60 rows become 64; 20 + 200 - 1 positions are kept, rounded up to 224.
    call = make_call("generate", model=TINY, **rows(60, 20, 200))
    layers = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size, bytes
    packed = 60 * 20 + 16  # the prompts, not yet copied to their rows
    assert torch_transient_parts(call).kv_cache == (64 * 224 + packed) * layers


def test_the_rows_decoded_at_once_bound_the_cache() -> None:
    call = make_call("generate", model=TINY, **rows(64, 20, 400))
    layers = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, size, bytes
    whole, half = (torch_transient_parts(call, max_decode_rows=size) for size in (64, 32))
    assert whole.kv_cache == 64 * 432 * layers
    # The prompts of the second half are computed while the cache of the first is there.
    assert half.kv_cache == (32 * 432 + 704) * layers


def test_texts_are_computed_beside_the_cache_where_rows_wait_or_in_parts() -> None:
    layers = 2 * 2 * 2 * 16 * 4
    for prompt, waits in ((100, True), (300, False)):  # 64 prompts of 300 are more than 2^14 tokens
        few, many = (
            torch_transient_parts(
                make_call("generate", model=TINY, **rows(num, prompt, 4)), max_decode_rows=64
            )
            for num in (64, 128)
        )
        cache = 64 * (prompt // 16 * 16 + 16) * layers
        assert many.kv_cache - few.kv_cache == (cache if waits else 0)
        assert many.kv_cache > cache


def test_the_generic_model_asks_the_torch_engine() -> None:
    call = make_call(model=TINY, num_sequences=64)
    found = TorchMemory().transient(call, Layout(dp=4))
    assert found == torch_transient_parts(call, num_ranks=4)


_LENGTHS = st.sampled_from([Lengths.constant(1), Lengths.constant(40), Lengths(tokens=(5, 9, 60))])
_CALLS = st.builds(
    make_call,
    kind=st.sampled_from(["train", "forward", "generate"]),
    model=st.sampled_from([TINY, HALF]),
    head=st.sampled_from(["vocabulary", "scalar"]),
    trained=st.booleans(),
    num_sequences=st.integers(1, 64),
    samples_per_prompt=st.sampled_from([1, 4]),
    prompt=_LENGTHS,
    response=_LENGTHS,
    passes=st.sampled_from([1, 2]),
    updates=st.sampled_from([2, 8]),
)


@given(call=_CALLS, num_ranks=st.integers(1, 9), tokens=st.integers(1, 5000))
def test_every_call_has_a_peak(call: Call, num_ranks: int, tokens: int) -> None:
    added = torch_transient_parts(call, num_ranks=num_ranks, micro_batch_tokens=tokens)
    assert min(added) >= 0
    assert added.total > 0
    assert (added.kv_cache > 0) == (call.kind == "generate")


@pytest.mark.parametrize("kind", ["train", "forward"])
def test_activations_grow_with_the_micro_batch(kind: CallKind) -> None:
    call = make_call(kind, model=TINY, head="scalar", **rows(2048, 64, 64))
    # Both are more than a piece of attention.
    small, large = (torch_transient_parts(call, micro_batch_tokens=2**size) for size in (14, 17))
    assert large.activations == pytest.approx(8 * small.activations, rel=0.1)
    # No more than there is.
    assert torch_transient_parts(call, micro_batch_tokens=2**20) == (
        torch_transient_parts(call, micro_batch_tokens=2**18)
    )


# --- measured -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "small",
        *(
            pytest.param(f"small, bfloat16, large vocabulary, {way}", marks=pytest.mark.nightly)
            for way in ("checkpointing", "adapters")
        ),
        pytest.param("small, experts", marks=pytest.mark.nightly),
    ],
)
def test_a_live_call_needs_what_is_predicted(case: str, tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    command = [sys.executable, str(CASE), "--case", case, "--json", str(file)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    found = json.loads(file.read_text())
    assert found["measured_bytes"] > 20e6
    assert abs(found["predicted_bytes"] / found["measured_bytes"] - 1) < 0.1
