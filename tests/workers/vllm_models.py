"""A tiny model in vLLM and the same model in Hugging Face's own code."""

from __future__ import annotations

from typing import Any

import torch
from penstock.algorithms.roles import Policy, Rollout, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.vllm_engine.generator import VllmPolicy, VllmPolicySpec
from penstock.workers.engines.vllm_engine.requests import Request, Sampled
from penstock.workers.models.spec import ModelSpec
from torch import Tensor
from torch_models import EOS, VOCAB, architecture

CONTEXT = WorkerContext("actor", seed=7)

Responses = dict[tuple[int, int], tuple[list[int], list[float]]]
"""(prompt id, sample) -> tokens and their log-probabilities."""


def model_spec(name: str) -> ModelSpec:
    """With heads of 32 dimensions, the fewest that vLLM has on CPUs."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return ModelSpec(architecture={**architecture(name), **sizes})


def start(name: str, *, context: WorkerContext = CONTEXT, **options: Any) -> VllmPolicy:
    spec = VllmPolicySpec(model=model_spec(name), end_ids=(EOS,), **options)
    return spec.build(context)


def random_weights(module: Any, seed: int) -> dict[str, Tensor]:
    """Large enough to make choices."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.15
        for name, tensor in module.named_parameters()
    }


def set_weights(module: Any, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.copy_(weights[name])


def hugging_face_logprob(module: Any, roll: Rollout, temperature: float = 1.0) -> Tensor:
    """f32[rows, T] of the masked tokens, 0 elsewhere."""
    with torch.no_grad():
        logits = module(input_ids=roll.tokens.clamp(min=0)).logits[:, :-1].float()
    every = torch.log_softmax(logits / temperature, dim=-1)
    taken = every.gather(2, roll.tokens[:, 1:].clamp(min=0)[:, :, None])[:, :, 0]
    return torch.nn.functional.pad(taken, (1, 0)) * roll.mask


def generate(
    policy: Policy, prompt: Tensor, prompt_id: Tensor, sampling: Sampling, *, step: int = 0
) -> Rollout:
    with call_scope(step, 0):
        return policy.generate(prompt, prompt_id, sampling)


def sample_seeds(
    policy: VllmPolicy, ids: list[int], seeds: range, sampling: Sampling
) -> list[Sampled]:
    """A response to a prompt for each seed, by vLLM's engine itself."""
    requests = {
        n: Request(ids, seed, sampling.longest_response(len(ids))) for n, seed in enumerate(seeds)
    }
    ended: dict[int, Sampled] = {}
    for step in policy.vllm.begin(requests, sampling, end_ids=(EOS,)).steps():
        ended |= step.ended
    return [ended[number] for number in sorted(ended)]


def by_sample(roll: Rollout, num_samples: int) -> Responses:
    found: Responses = {}
    for row, prompt_id in enumerate(roll.prompt_id.tolist()):
        mask = roll.mask[row]
        sampled = (roll.tokens[row][mask].tolist(), roll.behavior_logprob[row][mask].tolist())
        found[prompt_id, row % num_samples] = sampled
    return found


def long_prompts(num: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB, (num, length), generator=generator), torch.arange(num) * 3
