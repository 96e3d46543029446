"""SmolLM2's own samples: our generator, vLLM and transformers agree on log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from penstock.algorithms.roles import Policy, Rollout, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec
from penstock.workers.models.hub import packaged_folder
from penstock.workers.models.spec import ModelSpec
from smollm2_models import EOS, NAME
from torch import Tensor

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

CONTEXT = WorkerContext("actor", seed=7)
SAMPLING = Sampling(num_samples=4, max_new_tokens=40, temperature=0.8)
BOUNDS: dict[Literal["float32", "bfloat16"], tuple[float, float]] = {
    "float32": (2e-4, 2e-5),
    "bfloat16": (1.0, 0.075),
}
"""Largest and mean difference of a token's log-probability. Of 400 tokens at a temperature of 0.8,
4e-5 and 6e-6 were measured in float32, 0.6 and 0.05 in bfloat16, of either engine."""


def prompts(folder: str) -> Tensor:
    """Three requests under the model's chat template, right padded with -1."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    asked = ["Name a river.", "Write two sentences about rain.", "What is a stock? Answer briefly."]
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in asked
    ]
    longest = max(map(len, rows))
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


def transformers_logprob(model: ModelSpec, roll: Rollout) -> Tensor:
    module: Any = model.causal_lm("cpu")
    with torch.no_grad():
        logits = module(input_ids=roll.tokens.clamp(min=0)).logits[:, :-1].float()
    every = torch.log_softmax(logits / SAMPLING.temperature, dim=-1)
    taken = every.gather(2, roll.tokens[:, 1:].clamp(min=0)[:, :, None])[:, :, 0]
    return torch.nn.functional.pad(taken, (1, 0))


def torch_policy(model: ModelSpec) -> Policy:
    return TorchPolicySpec(model=model, end_ids=(EOS,)).build(CONTEXT)


def vllm_policy(model: ModelSpec) -> Policy:
    spec = VllmPolicySpec(model=model, end_ids=(EOS,), longest_sequence=128, max_decode_rows=12)
    return spec.build(CONTEXT)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("build", [torch_policy, vllm_policy])
def test_samples_have_the_log_probabilities_of_transformers(
    build: Callable[[ModelSpec], Any], dtype: Literal["float32", "bfloat16"]
) -> None:
    model = ModelSpec(folder=str(packaged_folder(NAME, print)), dtype=dtype)
    policy = build(model)
    try:
        prompt = prompts(str(model.folder))
        with call_scope(0, 0):
            roll = policy.generate(prompt, torch.arange(len(prompt)), SAMPLING)
    finally:
        if build is vllm_policy:
            policy.close()
    mask = roll.mask
    assert int(mask.sum()) > 100
    apart = (roll.behavior_logprob - transformers_logprob(model, roll))[mask].abs()
    most, mean = BOUNDS[dtype]
    assert float(apart.max()) < most
    assert float(apart.mean()) < mean
    if build is torch_policy:  # what is trained says the same of them
        with call_scope(0, 0):
            again = policy.logprob(roll.tokens, mask, temperature=SAMPLING.temperature)
        apart = (roll.behavior_logprob - again)[mask].abs()
        assert float(apart.max()) < most
        assert float(apart.mean()) < mean
