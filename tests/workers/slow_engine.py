"""A rollout engine as somebody else would add one: a file with an engine and a spec.

It computes the whole sequence anew for every token, one response at a time, by the Hugging Face
forward. So it is right by inspection, and slow. A text that it has computed with the same weights
it does not compute again: thousands of first tokens of one prompt take one forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rollout.generation_engine import (
    BegunRows,
    EndedRows,
    GenerationEngine,
    check_stop,
)
from penstock.workers.rollout.generator_policy import GeneratorPolicy
from penstock.workers.rollout.response_sampler import ResponseSampler
from penstock.workers.rollout.sampling import SampleStreams
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SlowPolicySpec:
    """Recipe for a policy that generates with a `SlowEngine`."""

    model: ModelSpec
    end_ids: tuple[int, ...]
    tokenizer: TokenizerSpec | None = None

    def build(self, context: WorkerContext) -> GeneratorPolicy:
        return GeneratorPolicy(context, SlowEngine(self))


class SlowEngine(GenerationEngine):
    """A `GenerationEngine`."""

    name = "the slow engine"
    takes_weights = False

    def __init__(self, spec: SlowPolicySpec) -> None:
        model = spec.model
        self._module: Any = model.causal_lm("cpu")
        self._end_ids = spec.end_ids
        self._tokenizer = spec.tokenizer
        self.dtype = model.dtype
        self.vocab_size: int = self._module.config.vocab_size
        self.num_positions = model.num_positions
        self.shapes = {name: tensor.shape for name, tensor in self._module.named_parameters()}
        self._computed: dict[tuple[int, ...], Tensor] = {}

    def check(self, sampling: Sampling) -> None:
        check_stop(sampling, has_tokenizer=self._tokenizer is not None)

    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: BegunRows | None = None,
    ) -> Iterator[EndedRows]:
        """Sample one response after another, computing its whole text anew for each token."""
        uniform = streams.uniforms(sampling.max_new_tokens)
        sampler = ResponseSampler(
            prompt,
            uniform,
            sampling,
            end_ids=self._end_ids,
            vocab_size=self.vocab_size,
            tokenizer=self._tokenizer,
            begun=begun,
        )
        for row in torch.arange(len(uniform))[:, None]:
            live = sampler.open[row]
            while bool(live):
                logits = self._logits(sampler.texts(row)[0])
                live = sampler.sample(logits, row, live)[1]
            yield sampler.end(row)

    def _logits(self, ids: Tensor) -> Tensor:
        text = tuple(ids[0].tolist())
        if text not in self._computed:
            with torch.no_grad():
                found = self._module(input_ids=ids, use_cache=False).logits[:, -1]
            self._computed[text] = found
        return self._computed[text].clone()

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._computed.clear()
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(tensors[name])

    def sleep(self) -> int:
        return 0

    def wake(self) -> None:
        """It never sleeps."""

    def close(self) -> None:
        """It holds nothing but memory."""
