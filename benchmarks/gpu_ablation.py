"""Stage of `gpu.py` that switches off, one at a time, what makes training and decoding fast.

All calls are of one process, in turn with the call as it is, and the learning rate is 0, so that
every call trains the same weights. What is nearer the truth is seen against the same weights in
float32.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from gpu_case import SAMPLES, Bench, DeviceModel, Figure, batch_of, packs_seen, prompts_of
from gpu_compute import mfu, train_step
from gpu_generate import drop_captures
from penstock.algorithms.roles import Sampling
from penstock.algorithms.roles.language_tables import Rollout
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.executor import build_role
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from torch import Tensor
from transformers import PreTrainedModel

TURNS = 2
SAMPLED = 7
"""One element in so many of a gradient is compared."""
EXACT_ROWS = 8
"""Rows whose log-probabilities are computed in float32 as well."""
GENERATED_TOKENS = 64


@dataclass(frozen=True)
class Switch:
    """Something that can be switched off.

    Attributes:
        name: What it is.
        off: For each attribute the module, or "" for the policy, its name there, with dots within,
            and its value when it is off.
    """

    name: str
    off: Sequence[tuple[str, str, Any]]

    @contextmanager
    def switched_off(self, policy: PolicyWorker) -> Generator[None]:
        """Have it off meanwhile."""
        with ExitStack() as stack:
            for module, path, value in self.off:
                within = importlib.import_module(f"penstock.workers.{module}") if module else None
                owner: Any = within or policy
                *parts, name = path.split(".")
                for part in parts:
                    owner = getattr(owner, part)
                off = owner._plain if value is _PLAIN else value
                stack.enter_context(mock.patch.object(owner, name, off))
            drop_captures()
            yield
        drop_captures()


_PLAIN = object()
"""What is called where nothing is compiled."""


def _compiled(module: str, *names: str) -> list[tuple[str, str, Any]]:
    return [(module, f"{name}.compiled", _PLAIN) for name in names]


def _never(*of: object, **others: object) -> bool:
    return False


def _a_fifth(*, on_cpu: bool) -> float:
    return 0.2


_FUSED, _PACKING = "engines.torch_engine.fused", "engines.torch_engine.packing"
_LOGPROB = "training.token_logprob"
SWITCHES = (
    Switch("prompts shared wherever that saves tokens (S1)",
           [(_PACKING, "least_shared", _a_fifth),
            ("engines.torch_engine.network", "LeanNetwork.shares_prompts", False)]),
    Switch("norms by torch's kernels (S2)",
           [(_FUSED, "has_kernels", _never), *_compiled(_FUSED, "_sum_norm")]),
    Switch("log-probabilities in one pass (S3)", _compiled(_LOGPROB, "_sums", "_change")),
    Switch("SwiGLU, rotation and sums with norms compiled (S4)",
           _compiled(_FUSED, "_sum_norm", "_before_sum_norm", "_rotated", "_rotated_back",
                     "_heads_rotated_back", "_product", "_before_product")),
    Switch("large micro-batches (S5)",
           [("", "_micro_batch_tokens", 4096), ("", "_trainer._micro_batch_tokens", 4096)]),
    Switch("gradients added in float32 by the product (S5)",
           [("training.weight_gradients", "ADDED_ON", frozenset[str]())]),
    Switch("clipping in the optimizer's step (S6)",
           [("training.optimizer", "AdamW.clips_at_once", frozenset[str]())]),
    Switch("kept logits (S6)", [(_LOGPROB, "keeps_logits", _never)]),
)  # fmt: skip
"""Of training."""
DECODING = (
    Switch("attention over used positions (D1)",
           [("engines.torch_engine.device_decode", "DeviceBatch.flash", False)]),
    Switch("steps and sampling compiled (D3, D4)",
           [*_compiled(_FUSED, "_sum_norm", "_rotated", "_rotated_into", "_product"),
            *_compiled("rollout.sampling", "_block_sums")]),
)  # fmt: skip
_ALL = Switch("all of them", [one for switch in SWITCHES for one in switch.off])


class ExactModel(DeviceModel):
    """The same weights as a `DeviceModel`'s, in float32."""

    def causal_lm(self, device: str) -> PreTrainedModel:
        """See `ModelSpec.causal_lm`."""
        return self._placed(super().causal_lm(device).float(), device)


def ablation(bench: Bench) -> Iterator[Figure]:
    """A train call without each switch, and without all; then what is nearer to float32."""
    for name in reversed(list(bench.sizes.models)):
        yield from _trained(bench, name)
        gc.collect()
    yield from _generated(bench, bench.sizes.large)
    yield from _exactness(bench, bench.sizes.large)


def _trained(bench: Bench, name: str) -> Iterator[Figure]:
    sizes, meter = bench.sizes, bench.meter
    policy = bench.policy(name, lr=0.0, micro_batch_tokens=16_384)
    timed = mfu(bench, policy, name, f"train MFU with all switches on, {name}", None)
    yield timed
    batch = batch_of(sizes, sizes.prompts)
    grad = _gradient(policy)
    for step, switch in enumerate((*SWITCHES, _ALL), 2):
        with switch.switched_off(policy), packs_seen() as packs:
            first_s = meter.once(lambda step=step: train_step(policy, batch, step))
        error = float((_gradient(policy) - grad).norm() / grad.norm())
        on_s, off_s, peak_gib = list[float](), list[float](), None

        def take_turn(seconds: list[float], step: int = step) -> float | None:
            train_step(policy, batch, step)  # torch gives memory of other sizes back
            meter.peak_gib(reset=True)
            seconds.append(meter.once(lambda: train_step(policy, batch, step)))
            return meter.peak_gib()

        for _ in range(TURNS):
            with switch.switched_off(policy):
                peak_gib = take_turn(off_s)
            take_turn(on_s)
        yield Figure(
            name=f"train call without {switch.name} over the call with it, {name}",
            value=median(off_s) / median(on_s),
            details={
                "off_s": off_s,
                "on_s": on_s,
                "first_s": first_s,
                "peak_gib": peak_gib,
                "micro_batches": len(packs),
                "computed_tokens": sum(len(pack.tokens) for pack in packs),
                "gradient_changed_by": error,
            },
        )


def _generated(bench: Bench, name: str) -> Iterator[Figure]:
    """A generate call without each switch of decoding, for few rows and for many."""
    sizes, meter = bench.sizes, bench.meter
    policy = bench.policy(name, trained=False)
    for rows in (sizes.decode_rows[0], sizes.decode_rows[-1]):

        def call(rows: int = rows) -> None:
            _sampled(policy, prompts_of(sizes, rows // SAMPLES), sizes.decode_tokens // 2)

        for switch in DECODING:
            on_s, off_s = list[float](), list[float]()
            meter.once(call)
            for _ in range(TURNS):
                with switch.switched_off(policy):
                    meter.once(call)  # its graphs are others
                    off_s.append(meter.once(call))
                meter.once(call)
                on_s.append(meter.once(call))
            yield Figure(
                name=f"{rows} rows without {switch.name} over the call with it, {name}",
                value=median(off_s) / median(on_s),
                details={"off_s": off_s, "on_s": on_s},
            )


def _sampled(policy: PolicyWorker, prompt: Tensor, tokens: int) -> Rollout:
    with call_scope(0, 0):
        sampling = Sampling(num_samples=SAMPLES, max_new_tokens=tokens)
        return policy.generate(prompt, torch.arange(len(prompt)), sampling)


def _gradient(policy: Any) -> Tensor:
    return policy.network.flat.grad[::SAMPLED].clone()


def _exactness(bench: Bench, name: str) -> Iterator[Figure]:
    """Log-probabilities with all switches on, and off, and those noted while sampling."""
    sizes = bench.sizes
    policy = bench.policy(name, trained=False)
    prompt = prompts_of(sizes, EXACT_ROWS)
    tokens = min(GENERATED_TOKENS, sizes.decode_tokens)
    rollout = _sampled(policy, prompt, tokens)
    kernels = [one for switch in (_ALL, *DECODING) for one in switch.off if one[0]]
    everything = Switch("all of them", list(dict.fromkeys(kernels)))
    found = {"sampled": rollout.behavior_logprob, "on": _logprobs(policy, rollout)}
    with everything.switched_off(policy):
        found["off"] = _logprobs(policy, rollout)
        other = _sampled(policy, prompt, tokens)
        found["off, sampled and evaluated"] = other.behavior_logprob - _logprobs(policy, other)
    del policy
    exact_spec = TorchPolicySpec(
        model=ExactModel(architecture=sizes.models[name], dtype="float32"),
        end_ids=(sizes.models[name]["vocab_size"],),
    )
    exact: Any = build_role("actor", exact_spec, WorkerContext("actor", device=sizes.device))
    truth, mask = _logprobs(exact, rollout), rollout.mask.bool()

    def error(of: Tensor, to: Tensor | float) -> dict[str, float]:
        wrong = (of - to).abs()[mask]
        return {"mean": float(wrong.mean()), "largest": float(wrong.max())}

    for key in ("on", "off", "sampled"):
        wrong = error(found[key], truth)
        what = f"log-probabilities, {key}, error to float32 on average, {name}"
        yield Figure(name=what, value=wrong["mean"], details=wrong)
    between = {
        "on": error(found["sampled"], found["on"]),
        "off": error(found["off, sampled and evaluated"], 0.0),
    }
    for key, wrong in between.items():
        what = f"sampled and evaluated log-probabilities, {key}, difference on average, {name}"
        yield Figure(name=what, value=wrong["mean"], details=wrong)


def _logprobs(policy: PolicyWorker, rollout: Rollout) -> Tensor:
    with call_scope(0, 1):
        return policy.logprob(rollout.tokens, rollout.mask)
