"""What the stages of `gpu.py` share: figures, sizes, models, a batch, and a device that is timed.

Models have random weights of the shapes of Qwen2.5-0.5B, 1.5B and 7B, in bfloat16, made on
the device and saved nowhere. Peaks are measured in every stage anew, by the device's own clock:
products of 8,192 x 8,192, copies of 4 GiB into memory that is there, and sums that read 4 GiB. So a
device that is throttled or shared is compared with itself.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from penstock.algorithms.roles import PolicyBatch
from penstock.configs.references import option_file
from penstock.dataflow.runtime.executor import build_role
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.inputs.model_shape import ModelShape, shape_of
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine import network
from penstock.workers.engines.torch_engine.packing import Pack, pack_rows
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from transformers import AutoModelForCausalLM, PreTrainedModel

SAMPLES = 8
REPEATS = 3
LEFT_S = 20.0
"""Seconds of a stage to import, and to read the results that an ended command left."""
FEWEST_TOKEN_ID, MOST_TOKEN_ID = 3, 90
TINY = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a stage has found, or why it has not.

    Attributes:
        name: What was measured.
        value: None if it was not.
        unit: Of the value.
        goal: The value to reach, if there is one.
        most: Whether the goal is the most that is good, and not the least.
        open: Why there is no value.
        details: What the value was made of, ratios in the same run among it.
    """

    name: str
    value: float | None = None
    unit: str = ""
    goal: float | None = None
    most: bool = False
    open: str = ""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached; None if there is no value or no goal."""
        if self.value is None or self.goal is None:
            return None
        return self.value <= self.goal if self.most else self.value >= self.goal

    def as_data(self) -> dict[str, Any]:
        """For the result file."""
        return {**asdict(self), "is_met": self.is_met}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured, and where.

    Attributes:
        device: Of torch.
        models: Name -> fields of the model's config: the smaller one, and the larger.
        prompt: Tokens of a prompt.
        response: Tokens of a response; they vary by a third around it.
        prompts: Of a train call, with `SAMPLES` responses each.
        step_prompts: Of a whole step, in which shapes are counted.
        decode_rows: Rows that are decoded at once, one measurement for each.
        decode_tokens: Tokens of each row.
        long: Lengths of rows whose log-probabilities are computed.
        product: Width of the matrices by which the peak is measured.
        copied_bytes: Of the memory that is copied, and read, to measure its bandwidth.
        sent: The model whose weights are sent from process to process.
        steps: Of a run that is timed, after a first one.
        widths: Hidden sizes that a calibration times.
    """

    device: str
    models: Mapping[str, dict[str, Any]]
    prompt: int
    response: int
    prompts: int
    step_prompts: int
    decode_rows: tuple[int, ...]
    decode_tokens: int
    long: tuple[int, ...]
    product: int
    copied_bytes: int
    sent: dict[str, Any]
    steps: int
    widths: tuple[int, ...]

    @property
    def small(self) -> str:
        """Name of the smaller model."""
        return next(iter(self.models))

    @property
    def large(self) -> str:
        """Name of the larger one, which may be the same."""
        return list(self.models)[-1]

    @property
    def is_cuda(self) -> bool:
        """Whether the device is one."""
        return self.device.startswith("cuda")


def scale(*, tiny: bool) -> Scale:
    """The sizes of a GPU, or of a demonstration."""
    if tiny:
        return Scale(
            device="cpu", models={"tiny": TINY}, prompt=8, response=9, prompts=2, step_prompts=4,
            decode_rows=(8, 16), decode_tokens=8, long=(32, 64), product=256, copied_bytes=2**22,
            sent=TINY, steps=2, widths=(),
        )  # fmt: skip
    names = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")
    small, large, sent = (option_file("model", name)["architecture"] for name in names)
    return Scale(
        device="cuda:0", models={names[0]: small, names[1]: large}, prompt=300, response=900,
        prompts=4, step_prompts=64, decode_rows=(8, 64, 512), decode_tokens=256,
        long=(4096, 8192, 16384), product=8192, copied_bytes=2**32, sent=sent, steps=3,
        widths=(1024, 1536, 2048),
    )  # fmt: skip


class Meter:
    """Times what a device does."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def seconds(self, body: Callable[[], object]) -> float:
        """Median of some repeats, after one that is not counted."""
        self.once(body)
        return statistics.median(self.once(body) for _ in range(REPEATS))

    def once(self, body: Callable[[], object]) -> float:
        """Seconds of a single time, from an idle device to an idle device."""
        self._wait()
        began_s = time.perf_counter()
        body()
        self._wait()
        return time.perf_counter() - began_s

    def device_seconds(self, body: Callable[[], object], times: int = 10) -> float:
        """Return the median seconds of `body` by the device's clock: between two events.

        Neither the host's calls nor its waits are in it, as long as the device has work queued.
        """
        if not self._cuda:
            return self.seconds(body)
        body()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        events[0].record()
        for event in events[1:]:
            body()
            event.record()
        self._wait()
        pairs = zip(events, events[1:], strict=False)
        return statistics.median(1e-3 * one.elapsed_time(other) for one, other in pairs)

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def peak_gib(self, *, reset: bool = False) -> float | None:
        """The most that torch has had allocated since the last reset; None on a CPU."""
        if not self._cuda:
            return None
        peak = torch.cuda.max_memory_allocated() / 2**30
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return peak


class DeviceModel(ModelSpec):
    """Random weights made on the device in 16 bits, which takes less than a second there.

    They are others on another device, and nothing that is measured depends on them.
    """

    def causal_lm(self, device: str) -> PreTrainedModel:
        """See `ModelSpec.causal_lm`."""
        cuda = [device] if device.startswith("cuda") else []
        with torch.random.fork_rng(devices=cuda), torch.device(device):
            torch.manual_seed(self.init_seed)
            made: Any = AutoModelForCausalLM.from_config(
                self.config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        return self._placed(made, device)


class Bench:
    """What a stage is given: the sizes, the device, and models with random weights.

    Args:
        sizes: How much is measured.
        smollm2: A folder with SmolLM2-135M-Instruct, if there is one.
        runs: Where runs are kept, and a profile of the device; nowhere if None.
        limit_s: How long the stage may take, imports included.
    """

    def __init__(
        self,
        sizes: Scale,
        smollm2: Path | None = None,
        runs: Path | None = None,
        limit_s: float = 600.0,
    ) -> None:
        self.sizes, self.smollm2, self.runs = sizes, smollm2, runs
        self._until_s = time.monotonic() + limit_s - LEFT_S
        self.meter = Meter(sizes.device)

    @property
    def left_s(self) -> float:
        """Seconds that a command may still take, so that it can be said that it took longer."""
        return max(self._until_s - time.monotonic(), 1.0)

    @cached_property
    def products_per_s(self) -> float:
        """FLOP/s of a large product in bfloat16, measured."""
        size = (self.sizes.product, self.sizes.product)
        left = torch.randn(size, device=self.sizes.device).bfloat16()
        out = torch.empty_like(left)
        seconds = self.meter.device_seconds(lambda: torch.matmul(left, left, out=out))
        return 2 * self.sizes.product**3 / seconds

    @cached_property
    def copied_per_s(self) -> float:
        """Bytes of device memory read and written per second by a long copy, measured."""
        here = self._numbers()
        there = torch.empty_like(here)
        return 2 * here.nbytes / self.meter.device_seconds(lambda: there.copy_(here))

    @cached_property
    def read_per_s(self) -> float:
        """Bytes of device memory read per second by a long sum, measured."""
        here = self._numbers()
        return here.nbytes / self.meter.device_seconds(here.sum)

    def _numbers(self) -> torch.Tensor:
        return torch.ones(self.sizes.copied_bytes // 4, device=self.sizes.device)

    @cached_property
    def sheet(self) -> Mapping[str, Any] | None:
        """What the data sheet says of this device, if an option of `cluster=` has it."""
        if not self.sizes.is_cuda:
            return None
        name = torch.cuda.get_device_name().lower()
        known = (option for option in ("h200", "h100") if option in name)
        option = next(known, "a100-80g" if "a100" in name else None)
        return None if option is None else option_file("cluster", option)["device"]

    def shape(self, name: str) -> ModelShape:
        """Of a model, in bfloat16."""
        return shape_of(self.sizes.models[name], name=name, dtype="bfloat16")

    def model(self, name: str) -> ModelSpec:
        """A model with random weights, which are made where it is built and saved nowhere."""
        return DeviceModel(architecture=self.sizes.models[name], dtype="bfloat16")

    def policy(
        self,
        name: str,
        *,
        recipe: Callable[..., Any] = TorchPolicySpec,
        trained: bool = True,
        lr: float = 1e-6,
        **options: Any,
    ) -> PolicyWorker:
        """A policy of which no response ends early.

        Args:
            name: Of the model.
            recipe: Of which engine.
            trained: Whether it has an optimizer.
            lr: Its learning rate.
            options: Further fields of the spec.
        """
        spec = recipe(
            model=self.model(name),
            end_ids=(self.sizes.models[name]["vocab_size"],),
            optimizer=OptimizerSpec(lr=lr) if trained else None,
            **options,
        )
        gc.collect()
        if self.sizes.is_cuda:
            torch.cuda.empty_cache()  # of the model before, whose peak would count otherwise
        context = WorkerContext("actor", device=self.sizes.device)
        policy: Any = build_role("actor", spec, context)
        return policy


def batch_of(sizes: Scale, prompts: int, seed: int = 0) -> PolicyBatch:
    """Rows of prompts that are shared and responses of two to four thirds of the usual length.

    Args:
        sizes: Of the tokens.
        prompts: How many, each with `SAMPLES` responses.
        seed: Of lengths and tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    rows = prompts * SAMPLES
    lengths = (sizes.response * (2 + 2 * torch.rand(rows, generator=draw)) / 3).long()
    tokens = torch.full((rows, sizes.prompt + int(lengths.max())), -1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    texts = _ids(prompts, sizes.prompt, draw)
    for row, length in enumerate(lengths.tolist()):
        end = sizes.prompt + length
        tokens[row, : sizes.prompt] = texts[row // SAMPLES]
        tokens[row, sizes.prompt : end] = _ids(1, length, draw)[0]
        mask[row, sizes.prompt : end] = True
    advantage = torch.randn(mask.shape, generator=draw) * mask
    behavior = torch.full(mask.shape, -4.0) * mask
    return PolicyBatch(tokens=tokens, mask=mask, behavior_logprob=behavior, advantage=advantage)


def prompts_of(sizes: Scale, prompts: int, seed: int = 0) -> torch.Tensor:
    """i64[prompts, tokens]: random prompts, all of the usual length."""
    return _ids(prompts, sizes.prompt, torch.Generator().manual_seed(seed))


def _ids(rows: int, count: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(FEWEST_TOKEN_ID, MOST_TOKEN_ID, (rows, count), generator=draw)


def train_flops(
    shape: ModelShape, prompts: Sequence[int], responses: Sequence[Sequence[int]]
) -> float:
    """FLOP of a train call, forward and backward, each prompt computed once for its samples.

    Products: 2 per weight and token forward, twice that backward; the vocabulary's only where a
    token is predicted. Attention: 4 per attended token, head and dimension, causal.

    Args:
        shape: Of the model.
        prompts: Tokens of each prompt.
        responses: For each prompt, tokens of each of its responses.
    """
    sampled = sum(map(sum, responses))
    products = 2.0 * shape.num_layers * shape.active_layer_params * (sum(prompts) + sampled)
    head = 2.0 * shape.embedding_params * sampled
    pairs = sum(
        prompt**2 / 2 + sum(((prompt + length) ** 2 - prompt**2) / 2 for length in lengths)
        for prompt, lengths in zip(prompts, responses, strict=True)
    )
    attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return 3.0 * (products + head + attention)


@contextmanager
def packs_seen() -> Generator[list[Pack]]:
    """Give the packs that the torch engine makes of rows meanwhile, one for each micro-batch."""
    seen: list[Pack] = []

    def noted(*args: Any, **options: Any) -> Pack:
        seen.append(pack_rows(*args, **options))
        return seen[-1]

    with mock.patch.object(network, "pack_rows", noted):
        yield seen


def computed_flops(shape: ModelShape, packs: Sequence[Pack]) -> float:
    """FLOP of a train call as it was computed: padding, prompts not shared, and logits made twice.

    Products of a layer three times for each packed token, of the head four times for each state
    that is read: logits are made again in the backward pass. Attention as in `train_flops`.

    Args:
        shape: Of the model.
        packs: Of all micro-batches.
    """
    tokens = sum(len(pack.tokens) for pack in packs)
    reads = sum(len(pack.read) for pack in packs)
    pairs = 0.0
    for pack in packs:
        before, own = pack.sequences.before[1].double(), pack.sequences.length.double()
        pairs += float((own * before + own**2 / 2).sum())
    products = 2.0 * shape.num_layers * shape.active_layer_params * tokens
    attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return 3.0 * (products + attention) + 4 * 2.0 * shape.embedding_params * reads
