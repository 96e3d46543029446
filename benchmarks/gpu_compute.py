"""Stages of `gpu.py` that compute: the device, training, log-probabilities."""

from __future__ import annotations

import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from gpu_case import SAMPLES, Bench, Figure, batch_of, computed_flops, packs_seen, train_flops
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.dataflow.runtime.call_context import call_scope
from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.model_shape import ModelShape
from penstock.workers.engines.engine import MICRO_BATCH_TOKENS
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.declaration import (
    torch_resident_parts,
    torch_transient_parts,
)
from torch import Tensor

MFU = {"qwen2.5-0.5b": 0.24, "qwen2.5-1.5b": 0.42}
"""Goals of training: the share of the data sheet's products."""

MEMORY_ERROR = 0.1
SCALES = {"TFLOP/s": 1e12, "GB/s": 1e9}

# --- inventory


def inventory(bench: Bench) -> Iterator[Figure]:
    """What this machine has, and how fast it multiplies and copies."""
    yield Figure(name="versions", details=_versions())
    sheet = bench.sheet or {}
    products = sheet.get("flops_per_s", {}).get("bfloat16")
    for name, unit, value, said in (
        ("products in bfloat16", "TFLOP/s", bench.products_per_s / 1e12, products),
        ("copies in device memory", "GB/s", bench.copied_per_s / 1e9,
         sheet.get("memory_bytes_per_s")),
        ("reads of device memory", "GB/s", bench.read_per_s / 1e9, sheet.get("memory_bytes_per_s")),
    ):  # fmt: skip
        share = {} if said is None else {"share_of_data_sheet": value * SCALES[unit] / said}
        yield Figure(name=name, value=value, unit=unit, details=share)
    if not bench.sizes.is_cuda:
        return
    there = torch.empty(2**30, dtype=torch.uint8, device=bench.sizes.device)
    for name, pinned in (("pinned", True), ("pageable", False)):
        host = torch.empty(2**30, dtype=torch.uint8, pin_memory=pinned)
        down_s = bench.meter.seconds(lambda host=host: host.copy_(there))
        up_s = bench.meter.seconds(lambda host=host: there.copy_(host))
        rates = {"down": 2**30 / down_s / 1e9, "up": 2**30 / up_s / 1e9}
        yield Figure(name=f"to {name} host memory", value=rates["down"], unit="GB/s", details=rates)


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
    }
    if torch.cuda.is_available():
        one = torch.cuda.get_device_properties(0)
        found |= {
            "device": one.name,
            "memory_gib": one.total_memory / 2**30,
            "multiprocessors": one.multi_processor_count,
            "capability": f"{one.major}.{one.minor}",
        }
    if shutil.which("nvidia-smi"):
        asked = ["--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        said = subprocess.run(
            ["nvidia-smi", *asked], capture_output=True, text=True, timeout=30, check=False
        )
        found["driver, power limit, clock"] = (said.stdout or said.stderr).strip()
    return found


# --- training


def train_step(policy: PolicyWorker, batch: Any, step: int = 0) -> None:
    """Train on a batch once."""
    with call_scope(step, 0):
        policy.train(ClippedPolicyLoss(), batch)


def train(bench: Bench) -> Iterator[Figure]:
    """MFU of both models, memory against the planner's ledger, and waits for the device."""
    for name in bench.sizes.models:
        yield from _trained(bench, name)


def _trained(bench: Bench, name: str) -> Iterator[Figure]:
    sizes = bench.sizes
    policy, batch = bench.policy(name), batch_of(sizes, sizes.prompts)
    figure = mfu(bench, policy, name, f"train MFU, {name}", MFU.get(name))
    yield figure
    lengths = batch.mask.sum(1).tolist()
    call = _call("train", bench.shape(name), sizes.prompt, lengths)
    at_once: int = policy._micro_batch_tokens  # pyright: ignore[reportPrivateUsage]
    yield _memory(f"memory of training, {name}", call, figure.details["peak_gib"], at_once)
    if sizes.is_cuda:
        waits = _waits(lambda: train_step(policy, batch, 2))
        yield Figure(name=f"waits for the device in a train call, {name}", value=waits)


def mfu(bench: Bench, policy: PolicyWorker, name: str, what: str, goal: float | None) -> Figure:
    """The share of the data sheet's products that a train call gets, and what it is made of.

    The share counts each prompt once for its samples, and logits once: what is distinct. What was
    computed stands beside it.
    """
    sizes, meter = bench.sizes, bench.meter
    batch = batch_of(sizes, sizes.prompts)
    with packs_seen() as packs:
        first_s = meter.once(lambda: train_step(policy, batch))
    meter.peak_gib(reset=True)
    seconds = meter.seconds(lambda: train_step(policy, batch, 1))
    lengths = batch.mask.sum(1).tolist()
    grouped = [lengths[i : i + SAMPLES] for i in range(0, len(lengths), SAMPLES)]
    flops = train_flops(bench.shape(name), [sizes.prompt] * sizes.prompts, grouped)
    flops_per_s = flops / seconds
    computed = computed_flops(bench.shape(name), packs)
    details: dict[str, Any] = {
        "seconds": seconds,
        "first_s": first_s,
        "peak_gib": meter.peak_gib(),
        "tokens_per_s": int((batch.tokens >= 0).sum()) / seconds,
        "tflop_per_s": flops_per_s / 1e12,
        "share_of_measured_products": flops_per_s / bench.products_per_s,
        "distinct_tflop": flops / 1e12,
        "distinct_tokens": sizes.prompt * sizes.prompts + sum(lengths),
    }
    if packs:  # the torch engine's
        details |= {
            "micro_batches": len(packs),
            "computed_tflop": computed / 1e12,
            "computed_tokens": sum(len(pack.tokens) for pack in packs),
            "computed_tflop_per_s": computed / seconds / 1e12,
            "computed_share_of_measured_products": computed / seconds / bench.products_per_s,
        }
    if bench.sheet is None:
        return Figure(name=what, open="no data sheet of this device", details=details)
    share = flops_per_s / bench.sheet["flops_per_s"]["bfloat16"]
    return Figure(name=what, value=share, goal=goal, details=details)


def engines(bench: Bench) -> Iterator[Figure]:
    """MFU of the larger model with engines that divide one, in a group of one process."""
    name = bench.sizes.large
    recipes = {"fsdp": FsdpPolicySpec, "megatron": MegatronPolicySpec}
    for engine, recipe in recipes.items():
        what = f"train MFU, {name}, engine={engine}"
        if engine == "megatron" and find_spec("megatron") is None:
            yield Figure(name=what, open="megatron-core is not installed")
            continue
        yield mfu(bench, bench.policy(name, recipe=recipe), name, what, None)


def _call(kind: CallKind, shape: ModelShape, prompt: int, responses: Sequence[int]) -> Call:
    trained = kind == "train"
    counts = {length: responses.count(length) for length in sorted(set(responses))}
    return Call(
        name=f"actor.{kind}", role="actor", kind=kind, model=shape, head="vocabulary",
        trained=trained, num_sequences=len(responses), prompt=Lengths.constant(prompt),
        response=Lengths(tokens=tuple(counts), weights=tuple(counts.values())),
        samples_per_prompt=SAMPLES if trained else 1,
    )  # fmt: skip


def _memory(
    name: str, call: Call, peak_gib: float | None, at_once: int = MICRO_BATCH_TOKENS
) -> Figure:
    """How far the planner's ledger is from what torch had allocated."""
    adds = torch_transient_parts(call, micro_batch_tokens=at_once, on_cpu=False)
    parts = torch_resident_parts(call).plus(adds)
    predicted_gib = parts.total / 2**30
    details = {"predicted_gib": predicted_gib, "measured_gib": peak_gib}
    if peak_gib is None:
        return Figure(name=name, open="torch counts memory of CUDA devices only", details=details)
    error = abs(predicted_gib / peak_gib - 1)
    return Figure(name=name, value=error, goal=MEMORY_ERROR, most=True, details=details)


def _waits(body: Callable[[], object]) -> int:
    """How often a call waits for the device; torch warns of each."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in said)


# --- log-probabilities


def logprobs(bench: Bench) -> Iterator[Figure]:
    """Of rows up to 16,384 tokens: seconds, the share of products, memory against the ledger."""
    name, meter, sizes = bench.sizes.large, bench.meter, bench.sizes
    policy, shape = bench.policy(name, trained=False), bench.shape(name)
    for length in sizes.long:
        tokens = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, : sizes.prompt] = False

        def call(tokens: Tensor = tokens, mask: Tensor = mask) -> None:
            with call_scope(0, 0):
                policy.logprob(tokens, mask)

        first_s = meter.once(call)
        meter.peak_gib(reset=True)
        seconds = meter.seconds(call)
        peak_gib = meter.peak_gib()
        sampled = length - sizes.prompt
        flops = train_flops(shape, [sizes.prompt], [[sampled]]) / 3
        details = {
            "seconds": seconds,
            "first_s": first_s,
            "share_of_measured_products": flops / seconds / bench.products_per_s,
        }
        yield Figure(
            name=f"log-probabilities of {length} tokens, {name}",
            value=length / seconds,
            unit="tokens/s",
            details=details,
        )
        yield _memory(
            f"memory of log-probabilities of {length} tokens, {name}",
            _call("forward", shape, sizes.prompt, [sampled]),
            peak_gib,
            policy._micro_batch_tokens,  # pyright: ignore[reportPrivateUsage]
        )
