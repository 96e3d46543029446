"""A rollout engine as somebody else would add one: a file with an engine and a spec.

It computes the whole sequence anew for every token, one response at a time, by the Hugging Face
forward. So it is right by inspection, and slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generator_policy import GeneratorPolicy
from penstock.workers.rollout.responses import Responses
from penstock.workers.rollout.sampling import SampleStreams, sample_token
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SlowPolicySpec:
    """Recipe for a policy that generates with a `SlowEngine`."""

    model: ModelSpec
    eos_token_id: int

    def build(self, context: WorkerContext) -> GeneratorPolicy:
        return GeneratorPolicy(context, SlowEngine(self.model, self.eos_token_id))


class SlowEngine:
    """A `GenerationEngine`."""

    name = "the slow engine"

    def __init__(self, model: ModelSpec, eos_token_id: int) -> None:
        self._module: Any = model.causal_lm("cpu")
        self._eos_token_id = eos_token_id
        self.dtype = model.dtype
        self.vocab_size: int = self._module.config.vocab_size
        self.num_positions = model.num_positions
        self.shapes = {name: tensor.shape for name, tensor in self._module.named_parameters()}

    def check(self, sampling: Sampling) -> None:
        """It samples as it is asked to."""

    def generate(self, prompt: Tensor, streams: SampleStreams, sampling: Sampling) -> Responses:
        uniform = streams.uniforms(sampling.max_new_tokens)
        rows = [row[row >= 0] for row in prompt for _ in range(sampling.num_samples)]
        token = torch.full(uniform.shape, -1)
        logprob = torch.zeros(uniform.shape)
        for at, ids in enumerate(rows):
            for place in range(sampling.max_new_tokens):
                with torch.no_grad():
                    logits = self._module(input_ids=ids[None], use_cache=False).logits[:, -1]
                sampled, its = sample_token(logits, uniform[at, place][None], sampling.temperature)
                token[at, place], logprob[at, place] = sampled[0], its[0]
                ids = torch.cat([ids, sampled])
                if int(sampled) == self._eos_token_id:
                    break
        finished = (token == self._eos_token_id).any(1)
        return Responses(token, logprob, (token >= 0).sum(1), finished)

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(tensors[name])

    def sleep(self) -> int:
        return 0

    def wake(self) -> None:
        """It never sleeps."""

    def close(self) -> None:
        """It holds nothing but memory."""
