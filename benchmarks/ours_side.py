"""One process of `vs_trl.py`: GRPO through the engine, in-process."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.roles import Prompts, Reward, Sampling
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from vs_trl_case import (
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    UPDATES,
    WARM_UP,
    prompts,
    score,
    write_side,
)


class TextReward(Reward):
    """`score` of each response's text; keeps the lengths it sees."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        """See `Reward.score`."""
        LENGTHS.extend(mask.sum(1).tolist())
        texts = self.tokenizer.decode_responses(tokens, mask)
        return torch.tensor([score(text) for text in texts])


LENGTHS: list[int] = []
"""Response lengths of all updates so far."""


@dataclass(frozen=True)
class TextRewardSpec:
    """Recipe for a `TextReward`."""

    tokenizer: TokenizerSpec

    def build(self, context: WorkerContext) -> TextReward:
        """Make the reward."""
        return TextReward(self.tokenizer.build())


class TextSource:
    """Encodes the prompts of an update when it is asked for them, as TRL does."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer) -> None:
        self.texts = texts
        self.tokenizer = tokenizer

    def batch(self, step: int) -> Prompts:
        """The prompts of an update."""
        rows = range(step * NUM_PROMPTS, (step + 1) * NUM_PROMPTS)
        encoded = self.tokenizer.encode_many([self.texts[row] for row in rows])
        return Prompts(prompt=torch.tensor(encoded), prompt_id=torch.tensor(rows))


def main() -> None:
    """Train for some updates and write the measurement."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", help="model and tokenizer")
    options.add_argument("case", choices=list(UPDATES))
    options.add_argument("out", type=Path)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--micro-batch-tokens", type=int, default=4096)
    options.add_argument("--updates", type=int)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    updates = args.updates or UPDATES[args.case]
    spec = TokenizerSpec(kind="folder", folder=args.folder)
    tokenizer = spec.build()
    sampling = Sampling(num_samples=NUM_SAMPLES, max_new_tokens=MAX_NEW_TOKENS[args.case])
    graph = build(grpo_step, cfg=GRPO(sampling=sampling))
    actor = TorchPolicySpec(
        model=ModelSpec(folder=args.folder),
        end_ids=tokenizer.end.ids,
        optimizer=OptimizerSpec(lr=LEARNING_RATE),
        micro_batch_tokens=args.micro_batch_tokens,
    )
    workers = {"actor": actor, "reward": TextRewardSpec(spec)}
    engine = Engine(graph, one_group(graph), workers=workers, executor=InProcess())
    ends: list[float] = []
    with engine:
        source = TextSource(prompts(updates), tokenizer)
        for _ in engine.run({"prompts": source}, updates):
            ends.append(time.perf_counter())
    skipped = WARM_UP * NUM_PROMPTS * NUM_SAMPLES
    write_side(args.out, ends[WARM_UP - 1 :], LENGTHS[skipped:], torch=torch.__version__)


if __name__ == "__main__":
    main()
