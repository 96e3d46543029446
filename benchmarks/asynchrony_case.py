"""What `asynchrony.py` runs: given lengths, prompts, a reward, and a model for each engine.

The lengths of responses are the point of that benchmark, and those of a small model with random
weights mean nothing. So each response is given its length, and everything else is what a run does:
a real engine samples every token from the weights that were published. It is told by how much it
may lengthen each response in this call, as if others had been begun before, and the end-of-sequence
token is barred. A response that has its length counts as finished.

A length depends on the number of the prompt and that of the sample, and no prompt comes twice in a
round. So all schedules have the same lengths, in whatever order they sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import torch
from penstock.algorithms.grpo import GRPO
from penstock.algorithms.roles import Prompts, Reward, Sampling
from penstock.dataflow.runtime.call_context import CallKey
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec, TorchPolicySpec
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generation_engine import BegunRows, EndedRows
from penstock.workers.rollout.generator_policy import GeneratorPolicy, SplitPolicySpec
from penstock.workers.rollout.sampling import SampleStreams, row_uniforms, stream_key
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

__all__ = ["CASES", "NUM_PROMPTS", "NUM_SAMPLES", "Case", "NumberedPrompts"]

NUM_PROMPTS, NUM_SAMPLES = 32, 4
SIGMA = 0.994
"""Of the normal distribution of a length's logarithm. The longest of 128 is expected 2.59 standard
deviations above the middle: exp(2.59 sigma - sigma^2 / 2) = 8 times the mean."""
LONGEST = 16
"""Times the mean; a length above it, one of 1,800, is cut to it."""
VOCABULARY, EOS = 512, 0


@dataclass(frozen=True)
class Case:
    """What is trained, and what it samples.

    Attributes:
        engine: Which one samples: "torch" or "vllm".
        prompt_tokens: Length of every prompt.
        mean_tokens: Mean length of a response.
        hidden: Width of the model.
        layers: Its layers.
    """

    engine: str
    prompt_tokens: int
    mean_tokens: int
    hidden: int
    layers: int

    @property
    def grpo(self) -> GRPO:
        """One update per step, on all of its responses."""
        longest = LONGEST * self.mean_tokens
        return GRPO(sampling=Sampling(num_samples=NUM_SAMPLES, max_new_tokens=longest))

    @property
    def model(self) -> ModelSpec:
        """A Llama with random weights."""
        return ModelSpec(
            architecture={
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "hidden_size": self.hidden,
                "intermediate_size": 3 * self.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.hidden // 32,
                "num_key_value_heads": self.hidden // 64,
                "max_position_embeddings": self.prompt_tokens + LONGEST * self.mean_tokens,
                "tie_word_embeddings": True,
            }
        )

    @property
    def workers(self) -> dict[str, WorkerSpec]:
        """The policy, which one engine trains and one samples from, and the reward."""
        model = self.model
        trained = TorchPolicySpec(model=model, end_ids=(EOS,), optimizer=OptimizerSpec(lr=1e-5))
        sampled: WorkerSpec = TorchGeneratorSpec(model=model, end_ids=(EOS,))
        if self.engine == "vllm":
            sampled = VllmPolicySpec(model=model, end_ids=(EOS,), max_decode_rows=256)
        given = GivenLengths(sampled, self.mean_tokens)
        return {
            "actor": SplitPolicySpec(train=trained, rollout=given),
            "reward": TokenRewardSpec(),
        }


CASES = {
    "torch": Case("torch", prompt_tokens=192, mean_tokens=48, hidden=128, layers=4),
    "vllm": Case("vllm", prompt_tokens=16, mean_tokens=48, hidden=256, layers=4),
}


def lengths(prompt_id: Tensor, num_samples: int, mean: int) -> Tensor:
    """Heavy-tailed: i64[P * num_samples], the samples of a prompt adjacent; from i64[P]."""
    prompt = prompt_id.repeat_interleave(num_samples).numpy()
    sample = torch.arange(num_samples).repeat(len(prompt_id)).numpy()
    key = stream_key(0, "benchmark", "lengths", CallKey(0, 0))
    uniform, normal = row_uniforms(key, prompt, sample, 1)[:, 0].tolist(), NormalDist()
    z = torch.tensor([normal.inv_cdf(u) for u in uniform])
    return (mean * torch.exp(SIGMA * z - SIGMA**2 / 2)).round().clamp(1, LONGEST * mean).long()


@dataclass(frozen=True)
class GivenLengths:
    """Recipe for a policy whose responses are as long as they are told to be.

    Attributes:
        spec: The policy's own recipe.
        mean: Mean length.
    """

    spec: WorkerSpec
    mean: int

    def build(self, context: WorkerContext) -> GeneratorPolicy:
        """The policy, with its engine told."""
        policy: Any = self.spec.build(context)
        stream = policy.engine.stream

        def told(
            prompt: Tensor,
            streams: SampleStreams,
            sampling: Sampling,
            begun: BegunRows | None = None,
        ) -> Iterator[EndedRows]:
            length = lengths(streams.prompt_id, streams.num_samples, self.mean)
            barred = replace(sampling, min_new_tokens=sampling.max_new_tokens)
            for ended in stream(prompt, streams, barred, _to(length, sampling, begun)):
                finished = ended.responses.length >= length[ended.rows]
                yield replace(ended, responses=replace(ended.responses, finished=finished))

        policy.engine.stream = told
        return policy


def _to(length: Tensor, sampling: Sampling, begun: BegunRows | None) -> BegunRows:
    """That a call may go on to a length, i64[rows], and no further."""
    if begun is None:
        token = torch.full((len(length), sampling.max_new_tokens), -1)
        ended = torch.zeros(len(length), dtype=torch.bool)
        return BegunRows(token, torch.zeros(token.shape), ended, length)
    rest = length - (begun.token >= 0).sum(1).cpu()
    return replace(begun, most_new=torch.minimum(rest, torch.as_tensor(begun.most_new)))


class TokenReward(Reward):
    """Half of the vocabulary is better than the other half."""

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        """See `Reward.score`: the share of the response that is of the better half."""
        good = (tokens >= VOCABULARY // 2) & mask
        return good.sum(1) / mask.sum(1)


@dataclass(frozen=True)
class TokenRewardSpec:
    """Recipe for a `TokenReward`."""

    def build(self, context: WorkerContext) -> TokenReward:
        """A new one."""
        del context
        return TokenReward()


@dataclass(frozen=True)
class NumberedPrompts:
    """Random prompts, numbered through all steps of a round and all rounds.

    Attributes:
        num_tokens: Length of each.
        first_step: Steps in the rounds before.
    """

    num_tokens: int
    first_step: int

    def batch(self, step: int) -> Prompts:
        """See `Source.batch`."""
        number = self.first_step + step
        random = torch.Generator().manual_seed(number)
        prompt = torch.randint(1, VOCABULARY, (NUM_PROMPTS, self.num_tokens), generator=random)
        prompt_id = number * NUM_PROMPTS + torch.arange(NUM_PROMPTS)
        return Prompts(prompt=prompt, prompt_id=prompt_id)
