"""Several tokens without a look: the samples of the plain loop, few looks, bounded operations.

The loop runs here on the CPU, where its samples are those of `decode` bit for bit, and on a
pretended CUDA device, where a look raises. What only a real one can show is marked `gpu`.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from fake_device import CountedOps, fake_batch
from in_flight_streams import alone, check_parted, check_versions, streamed
from inductor_kernels import kernels_of
from kernel_reference import use_functions
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.call_context import CallKey
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine import device_decode, fused, generator, varlen
from penstock.workers.engines.torch_engine.attention import attend_cache
from penstock.workers.engines.torch_engine.decode import decode
from penstock.workers.engines.torch_engine.device_decode import (
    DeviceBatch,
    KeptBatch,
    bound_of,
    decode_on_device,
    span_bucket,
)
from penstock.workers.engines.torch_engine.generator import TorchGenerator
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.engines.torch_engine.varlen import UsedPositions, attend_used
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout import sampling as sampling_of_tokens
from penstock.workers.rollout.generation_engine import BegunRows, EndedRows, Responses, collected
from penstock.workers.rollout.response_sampler import ResponseSampler
from penstock.workers.rollout.sampling import SampleStreams
from penstock.workers.training.compiled import Compiled
from penstock.workers.training.host_memory import HostCopy
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch_models import BASE, EOS, TOKENIZER, VOCAB, make_policy, make_prompts
from varlen_reference import use_reference

FILTERS: dict[str, Any] = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "min_new_tokens": 5,
}
WAYS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "filtered": FILTERS,
    "greedily": {"temperature": 0.0},
    "to a total": {"max_total_tokens": 50},
    "to a string": {"stop": ("K", "LM", "AB", "PQ"), "stop_token_ids": (9,)},
}


@cache
def network_of(name: str, dtype: str = "float32") -> Any:
    policy: Any = make_policy(name, dtype=dtype)
    return policy.network


def stream(
    network: Any,
    sampling: Sampling,
    max_rows: int,
    begun: BegunRows | None = None,
    seed: int = 7,
) -> Iterator[EndedRows]:
    prompt, prompt_id = make_prompts(9, longest=40)
    streams = SampleStreams(seed, "actor", CallKey(4, 1), prompt_id, sampling.num_samples)
    engine = TorchGenerator(network, [EOS], max_rows, TOKENIZER)
    return engine.stream(prompt, streams, sampling, begun)


def sampled(
    network: Any,
    sampling: Sampling,
    max_rows: int = 512,
    begun: BegunRows | None = None,
    seed: int = 7,
) -> Responses:
    given = stream(network, sampling, max_rows, begun, seed)
    return collected(given, 9 * sampling.num_samples, sampling.max_new_tokens)


def on_device(
    monkeypatch: pytest.MonkeyPatch, network: Any, sampling: Sampling, *more: Any
) -> Responses:
    """What the loop for devices makes of the same."""
    with monkeypatch.context() as patch:
        patch.setattr(generator, "decode", decode_on_device)
        return sampled(network, sampling, *more)


def assert_same(left: Responses, right: Responses) -> None:
    assert torch.equal(left.token, right.token)
    assert torch.equal(left.logprob, right.logprob)
    assert torch.equal(left.length, right.length)
    assert torch.equal(left.finished, right.finished)
    assert torch.equal(left.versions, right.versions)


# --- the samples of the plain loop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dtype"), [*((way, "float32") for way in WAYS), ("plainly", "bfloat16")]
)
def test_samples_are_those_of_the_plain_loop(way: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    """With rows that enter as others end, prompts of 1 to 40 tokens, and up to 60 sampled."""
    network = network_of("qwen3", dtype)
    sampling = Sampling(num_samples=3, max_new_tokens=60, **WAYS[way])
    expected = sampled(network, sampling)
    assert len(expected.length.unique()) > (5 if way != "greedily" else 0)
    for max_rows in (512, 7):
        assert_same(on_device(monkeypatch, network, sampling, max_rows), expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plainly", "filtered", "to a string"])
def test_responses_go_on_as_in_the_plain_loop(way: str, monkeypatch: pytest.MonkeyPatch):
    network = network_of("qwen2-tied")
    sampling = Sampling(num_samples=2, max_new_tokens=40, **WAYS[way])
    first = sampled(network, sampling)
    kept = torch.arange(40) < torch.arange(18)[:, None]  # row n goes on after n tokens
    token, logprob = first.token.where(kept, -1), first.logprob.where(kept, 0)
    begun = BegunRows(token, logprob, (token >= 0).sum(1) == first.length, 19)
    expected = sampled(network, sampling, 512, begun)
    assert not torch.equal(expected.length, first.length)
    for max_rows in (512, 5):
        assert_same(on_device(monkeypatch, network, sampling, max_rows, begun), expected)


def test_rows_are_given_once_each_and_none_is_shorter_than_was_promised(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(generator, "decode", decode_on_device)
    network, sampling = network_of("qwen2-tied"), Sampling(num_samples=3, max_new_tokens=50)
    given = list(stream(network, sampling, 8))
    assert sorted(row for ended in given for row in ended.rows.tolist()) == list(range(27))
    for place, ended in enumerate(given):
        assert ended.rows.tolist() == sorted(ended.rows.tolist())
        for later in given[place + 1 :]:
            assert int(later.responses.length.min()) >= ended.at_least


@pytest.mark.slow
@pytest.mark.parametrize("rows", [512, 1])
def test_tokens_after_new_weights_are_theirs(rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generator, "decode", decode_on_device)
    policy: Any = make_policy("qwen2-tied", max_decode_rows=rows)
    sampling, prompts = Sampling(num_samples=3, max_new_tokens=30), make_prompts(4)
    first = {n: t.clone() for n, t in policy.export_weights().items()}
    second = {n: t + 0.05 * torch.randn_like(t) for n, t in first.items()}
    before = alone(policy, prompts, sampling)
    roll = streamed(policy, prompts, sampling, 5, lambda: policy.load_weights(second))
    check_parted(roll, before)
    num_old = torch.full((12,), 5)
    if rows == 1:  # one after another: those that the first five tokens were of
        lengths = roll.mask.sum(1)
        num_old = (5 - (lengths.cumsum(0) - lengths)).clamp(min=0)
    check_versions(roll, num_old)


# --- a batch that is kept


@pytest.mark.parametrize("way", ["plainly", "filtered"])
def test_a_batch_that_is_kept_samples_what_a_new_one_does(
    way: str, monkeypatch: pytest.MonkeyPatch
):
    """In three calls of other seeds; it shrinks in each, and has its rows back in the next."""
    network, kept = network_of("qwen3"), KeptBatch()
    sampling = Sampling(num_samples=12, max_new_tokens=60, **WAYS[way])
    made: list[DeviceBatch] = []
    begin = DeviceBatch.__init__

    def begun(self: DeviceBatch, *args: Any) -> None:
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(DeviceBatch, "__init__", begun)
    with monkeypatch.context() as patch:
        patch.setattr(device_decode, "_most_kept", lambda device: 1 << 30)  # pyright: ignore[reportUnknownLambdaType]
        patch.setattr(generator, "decode", partial(decode_on_device, kept=kept))
        found = [sampled(network, sampling, seed=seed) for seed in range(3)]
    assert len(made) == 1
    assert len(made[0].row) < 112  # of 108
    for seed, responses in enumerate(found):
        assert_same(responses, sampled(network, sampling, seed=seed))
    HostCopy([])
    assert kept.take(made[0]._sampler, 108, made[0]._positions) is None  # pyright: ignore[reportPrivateUsage]


def test_a_batch_of_other_sizes_is_not_used_again(monkeypatch: pytest.MonkeyPatch):
    network, kept = network_of("qwen2-tied"), KeptBatch()
    monkeypatch.setattr(generator, "decode", partial(decode_on_device, kept=kept))
    for size, samples, options in ((1 << 30, 3, {}), (1 << 30, 2, {}), (1 << 30, 2, FILTERS)):
        monkeypatch.setattr(device_decode, "_most_kept", lambda device, size=size: size)  # pyright: ignore[reportUnknownLambdaType]
        sampling = Sampling(num_samples=samples, max_new_tokens=20, **options)
        found = sampled(network, sampling)
        with monkeypatch.context() as patch:
            patch.setattr(generator, "decode", decode)
            assert_same(found, sampled(network, sampling))


def test_graphs_know_where_frozen_weights_lie_beside_adapters(monkeypatch: pytest.MonkeyPatch):
    model = ModelSpec(architecture={**BASE, "model_type": "qwen2"})
    lora: dict[str, Any] = {"lora": LoraSpec(rank=2, alpha=2.0), "optimizer": OptimizerSpec()}
    policy: Any = TorchPolicySpec(model=model, end_ids=(EOS,), **lora).build(WorkerContext("actor"))
    network, places = policy.network, list[tuple[int, int]]()

    class Graphs:
        def run(self, step: Any, span: int, weights_at: tuple[int, int]) -> None:
            places.append(weights_at)
            step(span)

    monkeypatch.setattr(DeviceBatch, "_graphs", lambda self: Graphs())  # pyright: ignore[reportUnknownLambdaType]
    sampling = Sampling(num_samples=1, max_new_tokens=4)
    on_device(monkeypatch, network, sampling)
    frozen = network.backbone.embedding
    before = frozen.data
    frozen.data = before.clone()
    on_device(monkeypatch, network, sampling)
    assert len({trained for trained, _ in places}) == 1
    assert {where for _, where in places} == {before.data_ptr(), frozen.data_ptr()}


# --- attention by the kernel over used lengths


@pytest.mark.parametrize("family", ["smollm3", "llama-biased", "llama-all-heads", "qwen2", "qwen3"])
def test_samples_by_the_kernel_are_those_of_the_plain_loop(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    """Kernels by plain torch, in float32, so that only rounding differs."""
    network = network_of(family)
    sampling = Sampling(num_samples=3, max_new_tokens=30)
    expected = sampled(network, sampling)
    use_reference(monkeypatch)
    use_functions(monkeypatch)
    monkeypatch.setattr(device_decode, "has_kernel", lambda x: True)  # pyright: ignore[reportUnknownLambdaType]
    for max_rows in (512, 7):
        found = on_device(monkeypatch, network, sampling, max_rows)
        assert torch.equal(found.token, expected.token)
        torch.testing.assert_close(found.logprob, expected.logprob, atol=3e-6, rtol=0)


def test_a_call_has_three_bounds_at_most():
    for most in (16, 300, 1023, 1024, 1025, 2500, 4096, 9000, 32_768):
        bounds = [bound_of(length, most) for length in range(1, most + 1)]
        assert bounds == sorted(bounds)
        assert len(set(bounds)) <= (1 if most <= 1024 else 3)
        assert bounds[-1] == most
        for length, bound in enumerate(bounds, 1):
            assert length <= bound <= max(1024, 2 * length, most // 2)


# --- looks and operations


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens at each look, and rows of the batch, from now on."""
    looks: list[tuple[int, int]] = []
    record = ResponseSampler.record

    def spy(
        self: ResponseSampler, row: Tensor, live: Tensor, token: Tensor, logprob: Tensor
    ) -> Tensor:
        looks.append((len(token), len(row)))
        return record(self, row, live, token, logprob)

    monkeypatch.setattr(ResponseSampler, "record", spy)
    return looks


def test_the_host_looks_at_every_16th_token(monkeypatch: pytest.MonkeyPatch):
    """A window is the only thing that is copied to the host, in one piece."""
    network, sampling = network_of("qwen2-tied"), Sampling(num_samples=3, max_new_tokens=77)
    looks = spied(monkeypatch)
    on_device(monkeypatch, network, sampling)
    # The first token comes of reading the prompts, 64 in looks of 16, and 12 are left.
    assert [count for count, _ in looks] == [1, 16, 16, 16, 16, 12]


def test_the_host_looks_at_every_token_for_strings(monkeypatch: pytest.MonkeyPatch):
    looks = spied(monkeypatch)
    sampling = Sampling(num_samples=3, max_new_tokens=20, stop=("K",))
    on_device(monkeypatch, network_of("qwen2-tied"), sampling)
    assert {count for count, _ in looks} == {1}


@pytest.mark.slow
def test_rows_that_ended_leave_by_halves(monkeypatch: pytest.MonkeyPatch):
    looks = spied(monkeypatch)
    network, sampling = network_of("qwen2-tied"), Sampling(num_samples=12, max_new_tokens=90)
    made = on_device(monkeypatch, network, sampling)
    sizes = [rows for _, rows in looks]
    assert sizes[0] == 112  # of 108
    assert sizes == sorted(sizes, reverse=True)
    distinct = sorted(set(sizes), reverse=True)
    assert len(distinct) > 1
    assert all(2 * less <= more for more, less in zip(distinct, distinct[1:], strict=False))
    assert_same(made, sampled(network, sampling))


_A_LAYER, _BESIDES, _FILTERS = 60, 63, 263
"""Operations of a token: of a Qwen3 layer (40 of Qwen2's), besides layers, and of every filter at
once, most of which are 30 halvings for the nucleus. A norm is six here, and one if it is fused."""
VIEWS = {
    *("detach", "device", "select", "slice", "split", "split_with_sizes", "t", "transpose"),
    *("unsqueeze", "view", "_unsafe_view", "as_strided", "unbind"),
}


@pytest.mark.parametrize(
    ("options", "more"), [({}, 0), ({"temperature": 0.0}, 0), (FILTERS, _FILTERS)]
)
def test_a_token_needs_no_look_and_a_bounded_number_of_operations(
    options: dict[str, Any], more: int
):
    """On a pretended device, where a look, a copy to the host or a mix of devices raises."""
    network, sampling = network_of("qwen3", "bfloat16"), Sampling(**options)
    num_layers = len(network.backbone.layers)
    with fake_batch(network, sampling, num_rows=32, positions=128) as batch, CountedOps() as ops:
        batch.sample_next(64)
    launched = sum(n for name, n in ops.counts.items() if name not in VIEWS)
    assert launched <= _A_LAYER * num_layers + _BESIDES + more
    assert not {"_local_scalar_dense", "nonzero"} & ops.counts.keys()


KERNELS = {"_sum_norm_compiled": 1, "_rotated_into_compiled": 2, "_product_compiled": 1}
"""Of functions that are compiled."""
_MOST_OF_A_LAYER = 12


def launches(num_layers: int) -> int:
    """Kernels of a token on a CUDA device with Triton; attention is a kernel, and one for parts."""
    fields: dict[str, Any] = {**BASE, "model_type": "qwen2", "hidden_size": 64}
    model = ModelSpec(architecture={**fields, "num_hidden_layers": num_layers}, dtype="bfloat16")
    policy: Any = TorchPolicySpec(model=model, end_ids=(EOS,)).build(WorkerContext("actor"))
    ops = CountedOps()

    def call(self: Compiled, *inputs: Any) -> Any:
        before = ops.counts.copy()
        made = self.function(*inputs)
        ops.counts = before + Counter({"compiled": KERNELS[self.function.__name__]})
        return made

    with (
        mock.patch.object(Compiled, "__call__", call),
        mock.patch.object(varlen, "most_head_size", return_value=256),
        fake_batch(policy.network, Sampling(), num_rows=32, positions=128) as batch,
        ops,
    ):
        batch.sample_next(128)
    assert ops.counts["_flash_attention_forward"] == num_layers
    launched = sum(n for name, n in ops.counts.items() if name not in VIEWS)
    return launched + num_layers


def test_a_layer_of_a_token_is_few_kernels():
    assert launches(4) - launches(2) <= 2 * _MOST_OF_A_LAYER


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its compiler
def test_functions_are_compiled_into_few_kernels():
    """Of a layer of a 1.5B; and those that sample read logits twice."""
    rows, size, b16 = 64, 128, torch.bfloat16
    vectors: list[Any] = [((rows, heads, size), b16) for heads in (12, 2, 2)]
    tables, flat = [((rows, 1, size // 2), b16)] * 2, ((rows * 2 * 576, size), b16)
    states = ((rows, 1536), b16)
    inputs: dict[Any, list[Any]] = {
        fused._rotated_into_compiled: [*vectors, *tables, flat, flat, ((rows, 2), torch.int64)],  # pyright: ignore[reportPrivateUsage]
        partial(fused._sum_norm_compiled, eps=1e-6): [states, states, ((1536,), b16)],  # pyright: ignore[reportPrivateUsage]
        fused._product_compiled: [((rows, 2 * 8960), b16)],  # pyright: ignore[reportPrivateUsage]
    }
    for function, given in inputs.items():
        name = getattr(function, "func", function).__name__
        assert kernels_of(function, *given)[0] == KERNELS[name]
    num_logits = rows * 151_936
    given = [((rows, 151_936), b16), ((), torch.float32)]
    kernels, num_bytes = kernels_of(sampling_of_tokens._sums_of_blocks, *given)  # pyright: ignore[reportPrivateUsage]
    assert kernels <= 3
    assert num_bytes <= 4.2 * num_logits


def test_a_look_would_be_noticed():
    """What the plain loop does with every token raises on a pretended device."""
    with fake_batch(network_of("qwen3"), Sampling(), num_rows=16, positions=64) as batch:
        for look in (lambda: bool(batch.live.any()), lambda: torch.nonzero(batch.live)):
            with pytest.raises(RuntimeError):
                look()
        with CountedOps(), pytest.raises(AssertionError):
            torch.ops.aten._to_copy(batch.live, device=torch.device("cpu"))


def test_rows_enter_without_a_look_once_their_texts_are_computed():
    """Three texts of up to 9 tokens, the second of two responses."""
    network = network_of("qwen3")
    layers = network.backbone
    with fake_batch(network, Sampling(), num_rows=16, positions=64) as batch, CountedOps() as ops:
        shape = (32, layers.num_key_heads, layers.head_dim)
        packed = [(torch.empty(shape, device="cuda"),) * 2 for _ in layers.layers]
        place = torch.empty(3, 9, dtype=torch.int64, device="cuda")
        logits = torch.empty(4, VOCAB, device="cuda")
        text, slots = (torch.empty(4, dtype=torch.int64, device="cuda") for _ in range(2))
        batch._fill(packed, place, logits, text, slots)
        entered = torch.zeros_like(batch.live).index_fill(0, slots, True)
        batch._take(batch.logits, entered)
    assert ops.counts["index_copy_"] == 1


@pytest.mark.parametrize("mixed", ["_token", "_tables", "live", "row"])
def test_a_mix_of_devices_would_be_noticed(mixed: str):
    with fake_batch(network_of("qwen3"), Sampling(), num_rows=16, positions=64) as batch:
        own = getattr(batch, mixed)
        parts = own if isinstance(own, tuple) else (own,)
        here = [torch.zeros(one.shape, dtype=one.dtype) for one in parts]
        setattr(batch, mixed, tuple(here) if isinstance(own, tuple) else here[0])
        with pytest.raises(RuntimeError, match="different devices|not on the same device|cuda"):
            batch.sample_next(64)


def test_spans_are_few_and_a_quarter_too_large_at_most():
    spans = {span_bucket(length, 10_000) for length in range(1, 10_001)}
    assert len(spans) == 25
    for length in range(1, 10_001):
        span = span_bucket(length, 10_000)
        assert length <= span <= max(length + 63, 1.25 * length)
    assert span_bucket(9_999, 10_000) == 10_000
    assert span_bucket(1, 16) == 16


# --- what only a device can show


def cuda_network(name: str, dtype: str) -> Any:
    context = WorkerContext("actor", seed=7, device="cuda")
    policy: Any = make_policy(name, dtype=dtype, context=context)
    return policy.network


def no_graphs(*args: Any) -> None:
    """Instead of `StepGraphs`."""


def eagerly(monkeypatch: pytest.MonkeyPatch, network: Any, *given: Any) -> Responses:
    with monkeypatch.context() as patch:
        patch.setattr(device_decode, "StepGraphs", no_graphs)
        return sampled(network, *given)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_equals_eager(way: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    network = cuda_network("qwen3", dtype)
    sampling = Sampling(num_samples=3, max_new_tokens=100, **WAYS[way])
    for max_rows in (512, 7):
        assert_same(
            sampled(network, sampling, max_rows), eagerly(monkeypatch, network, sampling, max_rows)
        )


@pytest.mark.gpu
def test_graphs_are_captured_once_for_each_size(monkeypatch: pytest.MonkeyPatch):
    batches: list[DeviceBatch] = []
    sizes: set[tuple[int, int]] = set()
    begin, step = DeviceBatch.__init__, DeviceBatch.sample_next

    def begun(self: DeviceBatch, *args: Any) -> None:
        begin(self, *args)
        batches.append(self)

    def stepped(self: DeviceBatch, span: int) -> None:
        sizes.add((len(self.row), span))
        step(self, span)

    monkeypatch.setattr(DeviceBatch, "__init__", begun)
    monkeypatch.setattr(DeviceBatch, "sample_next", stepped)
    sampled(cuda_network("qwen3", "bfloat16"), Sampling(num_samples=12, max_new_tokens=150))
    (batch,) = batches
    assert sum(graphs.num_captured for graphs in batch.graphs.values()) == len(sizes)
    assert 1 < len(sizes) < 12


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plainly", "filtered"])
def test_a_call_of_the_same_size_captures_nothing(way: str, monkeypatch: pytest.MonkeyPatch):
    network = cuda_network("qwen3", "bfloat16")
    sampling = Sampling(num_samples=12, max_new_tokens=100, **WAYS[way])
    engine = TorchGenerator(network, [EOS], 512, TOKENIZER)

    def call(seed: int) -> Responses:
        prompt, prompt_id = make_prompts(9, longest=40)
        streams = SampleStreams(seed, "actor", CallKey(4, 1), prompt_id, 12)
        return collected(engine.stream(prompt, streams, sampling), 108, 100)

    def captured() -> int:
        kept = engine._kept._batch  # pyright: ignore[reportPrivateUsage]
        assert kept is not None
        return sum(graphs.num_captured for graphs in kept.graphs.values())

    call(7)
    before = captured()
    assert_same(call(7), eagerly(monkeypatch, network, sampling))
    assert captured() == before > 0
    call(8)
    assert captured() <= before + 2  # it may shrink to other numbers of rows


@pytest.mark.gpu
def test_memory_that_torch_has_for_others_stays_while_graphs_are_captured():
    network, sampling = cuda_network("qwen3", "bfloat16"), Sampling(max_new_tokens=40)
    spare = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del spare
    before = torch.cuda.memory_reserved()
    sampled(network, sampling)
    assert torch.cuda.memory_reserved() >= before


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [12, 2])
def test_the_kernel_attends_to_used_positions_alone(heads: int):
    random = torch.Generator("cuda").manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cuda").bfloat16()

    caches = (some(32, 2, 192, 64), some(32, 2, 192, 64))
    query = some(32, 3 * heads, 64)[:, heads : 2 * heads]  # a view, as of queries beside keys
    position = torch.arange(0, 192, 6, device="cuda")
    hidden = torch.arange(192, device="cuda") > position[:, None, None]
    bias = torch.zeros(hidden.shape, device="cuda").masked_fill_(hidden, -torch.inf)
    key, value = (part.float() for part in caches)
    expected = attend_cache(query.float(), key, value, bias, 0.125)
    for most in (192, 1024):
        used = UsedPositions.until(position, most, 2, 192)
        found = attend_used(query, caches, used, 0.125)
        torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.gpu
def test_weights_written_in_place_are_used_by_graphs():
    policy: Any = make_policy("qwen3", context=WorkerContext("actor", seed=7, device="cuda"))
    sampling, prompts = Sampling(num_samples=3, max_new_tokens=40), make_prompts(4)
    first = {n: t.clone() for n, t in policy.export_weights().items()}
    second = {n: t + 0.05 * torch.randn_like(t) for n, t in first.items()}
    before = alone(policy, prompts, sampling)
    roll = streamed(policy, prompts, sampling, 5, lambda: policy.load_weights(second))
    check_parted(roll, before)
    check_versions(roll, torch.full((12,), 5))


@pytest.mark.gpu
def test_what_a_call_took_of_the_device_is_free_after_it():
    """At once, not when Python looks for cycles; what a graph used as well."""
    network, sampling = cuda_network("qwen3", "bfloat16"), Sampling(max_new_tokens=40)
    sampled(network, sampling)  # what libraries keep is there from now on
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        sampled(network, sampling)
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_device_waits_for_nobody_between_looks(monkeypatch: pytest.MonkeyPatch):
    """Without graphs, so that each operation is seen; a capture refuses to wait by itself."""
    run = DeviceBatch.run

    def strictly(self: DeviceBatch, count: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            run(self, count)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(DeviceBatch, "run", strictly)
    sampling = Sampling(num_samples=3, max_new_tokens=40, **FILTERS)
    made = eagerly(monkeypatch, cuda_network("qwen3", "bfloat16"), sampling)
    assert int(made.length.max()) == 40


@pytest.mark.gpu
def test_tokens_are_those_of_the_cpu():
    """In float32, where rounding alone differs: few tokens can be others, and then all after."""
    sampling = Sampling(num_samples=3, max_new_tokens=20)
    here = sampled(network_of("qwen3"), sampling)
    there = sampled(cuda_network("qwen3", "float32"), sampling)
    same = (here.token == there.token).all(1)
    assert float(same.double().mean()) > 0.9
    torch.testing.assert_close(here.logprob[same], there.logprob[same], atol=1e-4, rtol=0)
