"""Tokens that a train call computes of prompts with 8 responses each, and what that saves on a CPU.

Of each pair of lengths: tokens packed for a device, over the distinct ones, which are each prompt
once and each response. Lengths of responses are spread as in `gpu_case.batch_of`; nothing is
computed.

With `--train` a small model is trained on this CPU with prompts of 1,000 tokens and responses of
200, in turn as it is and as it was before: prompts shared only where a fifth of the tokens is
saved, and counted for every row where micro-batches are bounded. Processor time, one thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from bench import parser, report, spread, table
from gpu_case import SAMPLES, Scale, batch_of, scale
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.cost.engine_model import least_shared
from penstock.workers.engines.torch_engine import packing
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.host_memory import sent
from penstock.workers.training.microbatch import micro_batches, take_rows
from penstock.workers.training.optimizer import OptimizerSpec

PAIRS = ((300, 900), (150, 300), (300, 300), (1000, 1000), (2000, 500))
"""Tokens of a prompt and, in the mean, of a response."""
BOUNDS = (4096, 16_384)
PROMPTS = 4
TRAINED = (1000, 200)
BEFORE = 0.2
"""The share of tokens that had to be saved for prompts to be shared."""
WORDS = 2048
SIZES = {
    "model_type": "qwen2",
    "vocab_size": WORDS,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def sizes_of(prompt: int, response: int) -> Scale:
    """Sizes of a batch."""
    return dataclasses.replace(scale(tiny=False), prompt=prompt, response=response)


def packed_tokens(batch: PolicyBatch, bound: int, *, shares: bool) -> list[int]:
    """Tokens of each micro-batch as a device would compute it, bounded by distinct ones or all."""
    rows = torch.arange(len(batch.tokens))
    parts = micro_batches(batch, rows, "row", bound, sort_by_length=False, shares_prompts=shares)
    found: list[int] = []
    for part in parts:
        own = take_rows(batch, part)
        reads = torch.zeros_like(own.mask)
        reads[:, :-1] = own.mask[:, 1:]
        tokens = sent(own.tokens, torch.device("meta"))
        found.append(len(packing.pack_rows(tokens, reads, own.mask.long().argmax(1)).tokens))
    return found


@contextmanager
def shared_as_before() -> Generator[None]:
    """Share prompts where that saves a fifth of the tokens."""
    module: Any = packing

    def before(*, on_cpu: bool) -> float:
        return BEFORE

    module.least_shared = before
    try:
        yield
    finally:
        module.least_shared = least_shared


@contextmanager
def as_before(network: Any) -> Generator[None]:
    """Bound micro-batches by all tokens, too."""
    network.shares_prompts = False
    try:
        with shared_as_before():
            yield
    finally:
        del network.shares_prompts


def pair(prompt: int, response: int, bound: int) -> dict[str, Any]:
    """Figures of a pair of lengths."""
    batch = batch_of(sizes_of(prompt, response), PROMPTS)
    packed = packed_tokens(batch, bound, shares=True)
    with shared_as_before():
        before = packed_tokens(batch, bound, shares=False)
    distinct = int(batch.mask.sum()) + PROMPTS * prompt
    return {
        "prompt": prompt,
        "response": response,
        "micro_batch_tokens": bound,
        "micro_batches": len(packed),
        "packed_over_distinct": round(sum(packed) / distinct, 4),
        "before": round(sum(before) / distinct, 4),
    }


def trained(repeats: int) -> dict[str, Any]:
    """Seconds of train calls in turn, as before and as it is."""
    torch.set_num_threads(1)
    batch = batch_of(sizes_of(*TRAINED), PROMPTS)
    for row, begin in enumerate(batch.mask.long().argmax(1).tolist()):  # all of one length
        batch.mask[row, begin + TRAINED[1] :] = False
        batch.tokens[row, begin + TRAINED[1] :] = -1
    policy = TorchPolicySpec(
        model=ModelSpec(architecture=SIZES),
        end_ids=(WORDS,),
        optimizer=OptimizerSpec(lr=0.0),
    ).build(WorkerContext("actor"))

    def seconds() -> float:
        with call_scope(0, 0):
            begun = time.process_time()
            policy.train(ClippedPolicyLoss(), batch)
            return time.process_time() - begun

    found: dict[str, list[float]] = {"before": [], "now": []}
    for _ in range(repeats + 1):
        with as_before(policy.network):
            found["before"].append(seconds())
        found["now"].append(seconds())
    before, now = (times[1:] for times in found.values())  # without the first, which loads kernels
    ratios = [a / b for a, b in zip(before, now, strict=True)]
    result = {"before_s": spread(before), "now_s": spread(now), "times_the_rate": spread(ratios)}
    return {"prompt": TRAINED[0], "response": TRAINED[1], "prompts": PROMPTS, **result}


def main() -> None:
    """Count, and time if asked to."""
    options = parser(__doc__ or "")
    options.add_argument("--train", action="store_true", help="also time train calls")
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    pairs = [pair(*lengths, bound) for bound in BOUNDS for lengths in PAIRS]
    print(table([*pairs[0]], [[*one.values()] for one in pairs]))
    result: dict[str, Any] = {"samples": SAMPLES, "prompts": PROMPTS, "pairs": pairs}
    if args.train:
        result["train"] = trained(args.repeats)
        rows = [[name, *(f"{x:.2f}" for x in one.values())]
                for name, one in result["train"].items() if isinstance(one, dict)]  # fmt: skip
        print(table(["", "median", "quartile 1", "quartile 3"], rows))
    report(result, args.json)


if __name__ == "__main__":
    main()
