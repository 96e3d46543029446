"""Responses without a model: random numbers are tokens, and say how many there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import torch
from penstock.algorithms.roles import Sampling
from penstock.workers.rollout.generation_engine import (
    BegunRows,
    EndedRows,
    GenerationEngine,
    Responses,
)
from penstock.workers.rollout.sampling import SampleStreams
from torch import Tensor
from torch_models import VOCAB


class DiceEngine(GenerationEngine):
    """Samples without a model: random numbers are tokens, and say how many there are.

    A token says as well which weights have sampled it: it is the random number's plus `VOCAB` for
    each time that weights were loaded.
    """

    name = "the dice engine"
    dtype = "float32"
    vocab_size = VOCAB
    num_positions = 256
    takes_weights = True
    shapes: Mapping[str, torch.Size] = {"dice": torch.Size([1])}

    def __init__(self, seed: int = 0, broken: str = "") -> None:
        self.dice = random.Random(seed)
        self.broken = broken
        self.closed = False
        self.num_loaded = 0

    def check(self, sampling: Sampling) -> None:
        if sampling.top_k:
            raise ValueError("dice know no top_k")

    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: BegunRows | None = None,
    ) -> Iterator[EndedRows]:
        every = self._every(prompt, streams, sampling, begun)
        dice = self.dice
        left = list(range(len(every.length)))
        dice.shuffle(left)
        try:
            while len(left) > (self.broken == "stops"):
                num = min(dice.randint(0, 3), len(left) - (self.broken == "stops"))
                rows, left = torch.tensor(sorted(left[:num]), dtype=torch.int64), left[num:]
                shortest = int(every.length[left].min()) if left else 0
                some = (every.token, every.logprob, every.length, every.finished)
                responses = Responses(*(column[rows] for column in some))
                yield EndedRows(rows, responses, dice.randint(0, shortest))
        finally:
            self.closed = True

    def _every(
        self, prompt: Tensor, streams: SampleStreams, sampling: Sampling, begun: BegunRows | None
    ) -> Responses:
        uniform = streams.uniforms(sampling.max_new_tokens)
        limits = [sampling.longest_response(n) for n in (prompt >= 0).sum(1).tolist()]
        limit = torch.tensor(limits, dtype=torch.int64).repeat_interleave(sampling.num_samples)
        natural = 1 + (uniform[:, 0] * 1.2 * sampling.max_new_tokens).long()
        length = torch.minimum(natural, limit)
        token = (uniform * VOCAB).long() + self.num_loaded * VOCAB
        logprob = uniform.log().float()
        if self.broken == "not finite":
            logprob[-1, 0] = torch.nan
        if begun is not None:
            had = begun.token >= 0
            token, logprob = begun.token.where(had, token), begun.logprob.where(had, logprob)
            before = had.sum(1)
            length = torch.minimum(length, before + begun.most_new).where(~begun.ended, before)
        sampled = torch.arange(sampling.max_new_tokens) < length[:, None]
        return Responses(
            token.where(sampled, -1), logprob * sampled, length, (length == natural) & (length > 0)
        )

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self.num_loaded += 1

    def sleep(self) -> int:
        return 0

    def wake(self) -> None:
        """It never sleeps."""

    def close(self) -> None:
        """It holds nothing."""
