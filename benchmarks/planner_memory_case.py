"""One process of `planner_memory.py`: predict the peak of one call, then run it and measure.

What is measured is the peak of live tensor memory, in bytes, while the call runs on a worker in its
steady state (a trained one has taken a step before). On CUDA that is
`torch.cuda.max_memory_allocated`. On the CPU it is the same figure of torch's CPU allocator: the
profiler reports every allocation and release, those inside kernels and of the backward pass
included, and their running sum has a peak. The call's input is not counted: it lies with the host.
`--rss` measures resident pages instead, in a process without the profiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss
from penstock.algorithms.roles import PolicyBatch, Sampling, ValueBatch
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.model_shape import Head, adapter_params, shape_of
from penstock.workers.engines.torch_engine.declaration import (
    torch_resident_parts,
    torch_transient_parts,
)
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec, TorchValueSpec
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

SPREAD = tuple(range(16, 257, 16))
"""Lengths of the cases whose rows differ."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a call and its rows."""

    kind: CallKind
    head: Head = "vocabulary"
    trained: bool = True
    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocab: int
    tied: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    rows: int
    samples: int = 1
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    """Lengths, equally likely; for a generation the last is the most it may sample."""
    ends: bool = False
    """For a generation: end each response with probability 1 / vocab at every token."""
    micro_batch_tokens: int = 4096
    minibatches: int = 1
    entropy: bool = False
    checkpointing: bool = False
    adapter_rank: int = 0
    experts: tuple[int, int] = (0, 0)
    """Of a mixture: how many there are, and how many compute a token."""

    @property
    def architecture(self) -> dict[str, Any]:
        """Of the Hugging Face config."""
        number, chosen = self.experts
        mixture = {"model_type": "mixtral", "num_local_experts": number,
                   "num_experts_per_tok": chosen}  # fmt: skip
        return {
            "model_type": "qwen2", "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_heads,
            "max_position_embeddings": 2048, "tie_word_embeddings": self.tied,
            **(mixture if number else {}),
        }  # fmt: skip

    @property
    def call(self) -> Call:
        """What the planner sees of it."""
        shape = shape_of(self.architecture, dtype=self.dtype)
        adapters = adapter_params(shape, self.adapter_rank)
        return Call(
            name=f"model.{self.kind}",
            role="model",
            kind=self.kind,
            model=shape.model_copy(update={"adapter_params": adapters}),
            head=self.head,
            trained=self.trained,
            num_sequences=self.rows,
            prompt=Lengths(tokens=self.prompt),
            response=Lengths(tokens=self.response),
            samples_per_prompt=self.samples,
            updates=self.minibatches,
        )


CASES = {
    "small": Case(
        kind="train", hidden=192, layers=3, heads=6, key_heads=3, inner=512, vocab=500,
        rows=32, samples=4, prompt=(40,), response=(60,), micro_batch_tokens=1600,
    ),
    "small, bfloat16, large vocabulary, checkpointing": Case(
        kind="train", hidden=64, layers=4, heads=2, key_heads=1, inner=128, vocab=80000, tied=True,
        dtype="bfloat16", rows=12, samples=4, prompt=(32,), response=(96,), checkpointing=True,
    ),
    "small, bfloat16, large vocabulary, adapters": Case(
        kind="train", hidden=192, layers=4, heads=3, key_heads=1, inner=512, vocab=40000, tied=True,
        dtype="bfloat16", rows=32, samples=8, prompt=(32,), response=(96,), adapter_rank=16,
    ),
    "small, experts": Case(
        kind="train", hidden=192, layers=4, heads=6, key_heads=3, inner=256, vocab=500,
        rows=32, prompt=(40,), response=(60,), experts=(8, 4),
    ),
    "train: adapters": Case(
        kind="train", hidden=256, layers=6, heads=8, key_heads=8, inner=704, vocab=1000,
        rows=64, prompt=(96,), response=(128,), micro_batch_tokens=2048, adapter_rank=8,
    ),
    "train: many tokens": Case(
        kind="train", hidden=256, layers=6, heads=8, key_heads=8, inner=704, vocab=1000,
        rows=64, prompt=(96,), response=(128,), micro_batch_tokens=4096,
    ),
    "train: large vocabulary, tied": Case(
        kind="train", hidden=256, layers=2, heads=4, key_heads=2, inner=704, vocab=32000, tied=True,
        rows=32, samples=4, prompt=(64,), response=(64,), micro_batch_tokens=2048,
    ),
    "train: mixed lengths, shared prompts, 2 minibatches": Case(
        kind="train", hidden=384, layers=6, heads=6, key_heads=2, inner=1024, vocab=4000,
        rows=128, samples=8, prompt=(32, 48, 64, 80), response=SPREAD, micro_batch_tokens=2048,
        minibatches=2,
    ),
    "train: entropy, mixed lengths": Case(
        kind="train", hidden=128, layers=4, heads=4, key_heads=1, inner=384, vocab=8000,
        rows=64, prompt=(24,), response=SPREAD, micro_batch_tokens=2048, entropy=True,
    ),
    "train: bfloat16": Case(
        kind="train", hidden=256, layers=4, heads=4, key_heads=2, inner=704, vocab=8000,
        dtype="bfloat16", rows=16, prompt=(64,), response=(128,), micro_batch_tokens=2048,
    ),
    "train: bfloat16, large vocabulary, tied": Case(
        kind="train", hidden=192, layers=3, heads=3, key_heads=1, inner=512, vocab=40000, tied=True,
        dtype="bfloat16", rows=32, samples=8, prompt=(32,), response=(96,),
    ),
    "train: bfloat16, checkpointing": Case(
        kind="train", hidden=192, layers=8, heads=3, key_heads=1, inner=512, vocab=2000, tied=True,
        dtype="bfloat16", rows=64, samples=8, prompt=(32,), response=(128,), checkpointing=True,
    ),
    "train: checkpointing, mixed lengths": Case(
        kind="train", hidden=256, layers=6, heads=4, key_heads=4, inner=704, vocab=500, rows=64,
        prompt=(32, 64), response=SPREAD, checkpointing=True,
    ),
    "train: checkpointing, long rows": Case(
        kind="train", head="scalar", hidden=256, layers=6, heads=4, key_heads=2, inner=704,
        vocab=500, rows=8, prompt=(128,), response=(512,), checkpointing=True,
    ),
    "train: value head, 12 layers, few tokens": Case(
        kind="train", head="scalar", hidden=768, layers=12, heads=12, key_heads=12, inner=2048,
        vocab=1000, rows=4, prompt=(64,), response=(64,), micro_batch_tokens=512,
    ),
    "train: bfloat16, value head, few tokens": Case(
        kind="train", head="scalar", hidden=512, layers=4, heads=8, key_heads=4, inner=1536,
        vocab=500, rows=2, prompt=(32,), response=(32,), dtype="bfloat16",
    ),
    "train: value head, mixed lengths": Case(
        kind="train", head="scalar", hidden=256, layers=8, heads=8, key_heads=2, inner=1024,
        vocab=100, rows=96, prompt=(16, 32, 64), response=SPREAD, micro_batch_tokens=4096,
    ),
    "evaluate: frozen, large vocabulary": Case(
        kind="forward", trained=False, hidden=256, layers=4, heads=4, key_heads=4, inner=704,
        vocab=32000, rows=32, prompt=(64,), response=(64,), micro_batch_tokens=2048,
    ),
    "evaluate: bfloat16, large vocabulary": Case(
        kind="forward", trained=False, hidden=192, layers=4, heads=3, key_heads=1, inner=512,
        vocab=40000, tied=True, dtype="bfloat16", rows=32, samples=8, prompt=(32,), response=(96,),
    ),
    "evaluate: bfloat16, long rows": Case(
        kind="forward", trained=False, hidden=192, layers=4, heads=3, key_heads=1, inner=512,
        vocab=1000, dtype="bfloat16", rows=16, prompt=(256,), response=(512,),
        micro_batch_tokens=8192,
    ),
    "train: few tokens, large vocabulary, tied": Case(
        kind="train", hidden=256, layers=2, heads=4, key_heads=2, inner=704, vocab=32000, tied=True,
        rows=2, prompt=(32,), response=(32,),
    ),
    "train: few tokens, large vocabulary, tied, bfloat16": Case(
        kind="train", hidden=256, layers=2, heads=4, key_heads=2, inner=704, vocab=32000, tied=True,
        rows=2, prompt=(32,), response=(32,), dtype="bfloat16",
    ),
    "evaluate: trained values, long rows": Case(
        kind="forward", head="scalar", hidden=384, layers=4, heads=8, key_heads=2, inner=1024,
        vocab=1000, rows=16, prompt=(256,), response=(512,), micro_batch_tokens=8192,
    ),
    "generate: long responses": Case(
        kind="generate", trained=False, hidden=384, layers=8, heads=6, key_heads=6, inner=1024,
        vocab=1000, rows=64, samples=8, prompt=(32,), response=(160,),
    ),
    "generate: large vocabulary, grouped queries": Case(
        kind="generate", hidden=256, layers=4, heads=8, key_heads=2, inner=704, vocab=32000,
        tied=True, rows=256, samples=4, prompt=(48,), response=(24,),
    ),
    "generate: rows end and leave": Case(
        kind="generate", trained=False, hidden=256, layers=6, heads=4, key_heads=4, inner=512,
        vocab=100, rows=256, samples=8, prompt=(32, 64), response=(*range(8, 128, 8), 128),
        ends=True,
    ),
}  # fmt: skip
"""Name -> case."""


def build(case: Case, device: str) -> Any:
    """The worker, through its spec."""
    model = ModelSpec(architecture=case.architecture, dtype=case.dtype)
    optimizer = OptimizerSpec() if case.trained else None
    context = WorkerContext("model", seed=7, device=device)
    if case.head == "scalar":
        return TorchValueSpec(
            model=model,
            optimizer=optimizer,
            micro_batch_tokens=case.micro_batch_tokens,
            activation_checkpointing=case.checkpointing,
            lora=LoraSpec(rank=case.adapter_rank),
        ).build(context)
    return TorchPolicySpec(
        model=model,
        end_ids=(2,) if case.ends else (-5,),
        optimizer=optimizer,
        micro_batch_tokens=case.micro_batch_tokens,
        activation_checkpointing=case.checkpointing,
        lora=LoraSpec(rank=case.adapter_rank),
    ).build(context)


@dataclass(frozen=True)
class Rows:
    """Random tokens and the mask of the responses, [rows, T], and the prompts, [prompts, T]."""

    tokens: Tensor
    mask: Tensor
    prompt: Tensor


def rows_of(case: Case) -> Rows:
    """What the call is given; lengths are sampled independently of the prediction's."""
    lengths = random.Random(1)
    prompts = [lengths.choice(case.prompt) for _ in range(case.rows // case.samples)]
    responses = [lengths.choice(case.response) for _ in range(case.rows)]
    width = max(case.prompt) + max(case.response)
    tokens = torch.full((case.rows, width), -1)
    mask = torch.zeros(case.rows, width, dtype=torch.bool)
    text = torch.full((len(prompts), max(prompts)), -1)
    for at, length in enumerate(prompts):
        text[at, :length] = torch.randint(3, case.vocab, (length,))
    for at, response in enumerate(responses):
        owner = at // case.samples
        begin, end = prompts[owner], prompts[owner] + response
        tokens[at, :begin] = text[owner, :begin]
        tokens[at, begin:end] = torch.randint(3, case.vocab, (response,))
        mask[at, begin:end] = True
    return Rows(tokens, mask, text)


def settle(case: Case, rows: Rows, worker: Any) -> None:
    """Bring the worker into its steady state."""
    if case.ends:
        # Equal logits: every token, the ending one too, has probability 1 / vocab.
        weights = worker.export_weights()
        weights["lm_head.weight"].zero_()
        worker.load_weights(weights)
    if case.trained:
        train(case, Rows(rows.tokens[:1], rows.mask[:1], rows.prompt), worker, 1)


def train(case: Case, rows: Rows, worker: Any, minibatches: int) -> None:
    """Train on all rows."""
    columns = {"tokens": rows.tokens, "mask": rows.mask}
    zeros = torch.zeros(rows.tokens.shape)
    if case.head == "scalar":
        values = ValueBatch(**columns, old_value=zeros, value_target=zeros)
        worker.train(ClippedValueLoss(), values, num_minibatches=minibatches)
    else:
        loss = ClippedPolicyLoss(entropy_coef=0.01 if case.entropy else 0.0)
        batch = PolicyBatch(**columns, behavior_logprob=zeros, advantage=zeros)
        worker.train(loss, batch, num_minibatches=minibatches)


def run(case: Case, rows: Rows, worker: Any) -> None:
    """Run the call to measure."""
    if case.kind == "train":
        train(case, rows, worker, case.minibatches)
    elif case.kind == "generate":
        sampling = Sampling(num_samples=case.samples, max_new_tokens=max(case.response))
        worker.generate(rows.prompt, torch.arange(len(rows.prompt)), sampling)
    elif case.head == "scalar":
        worker.value(rows.tokens, rows.mask)
    else:
        worker.logprob(rows.tokens, rows.mask)


def peak_on_cuda(case: Case) -> int:
    """Bytes, from torch's allocator."""
    rows, worker = rows_of(case), build(case, "cuda")
    settle(case, rows, worker)
    torch.cuda.reset_peak_memory_stats()
    run(case, rows, worker)
    return torch.cuda.max_memory_allocated()


def peak_on_cpu(case: Case) -> int:
    """Bytes, from the profiler's account of torch's allocator; the call's input not counted."""
    rows = rows_of(case)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        worker = build(case, "cpu")
        settle(case, rows, worker)
        gc.collect()
        with record_function("measured call"):
            run(case, rows, worker)
    profiler: Any = recorded.profiler
    changes: list[tuple[int, int]] = []
    begin = 0
    todo: list[Any] = list(profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name == "measured call":
            begin = event.start_time_ns
        elif str(event.tag).endswith("Allocation"):
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for at, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        if at >= begin:
            peak = max(peak, live)
    return peak


def growth_of_rss(case: Case) -> int:
    """Growth of resident pages to their peak in the call; kernels have been loaded before."""
    for warm in (CASES["small"], CASES["generate: rows end and leave"]):
        run(warm, rows_of(warm), build(warm, "cpu"))
    gc.collect()
    before = _status("VmRSS")
    rows, worker = rows_of(case), build(case, "cpu")
    settle(case, rows, worker)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run(case, rows, worker)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def main() -> None:
    """Write one case's figures as JSON."""
    arguments = argparse.ArgumentParser(description="One process of planner_memory.py.")
    arguments.add_argument("--case", choices=list(CASES), required=True)
    arguments.add_argument("--json", type=Path, required=True)
    arguments.add_argument("--rss", action="store_true", help="measure resident pages instead")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = CASES[options.case]
    if options.rss:
        result: dict[str, Any] = {"rss_growth_bytes": growth_of_rss(case)}
    else:
        cuda = torch.cuda.is_available()
        measured = peak_on_cuda(case) if cuda else peak_on_cpu(case)
        running = torch_transient_parts(
            case.call,
            micro_batch_tokens=case.micro_batch_tokens,
            checkpointing=case.checkpointing,
        )
        parts = torch_resident_parts(case.call).plus(running)
        result = {
            "device": "cuda" if cuda else "cpu",
            "measured_bytes": measured,
            "predicted_bytes": parts.total,
            "predicted_parts_bytes": parts._asdict(),
        }
    options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
