"""Adapters for a real vLLM engine: they alone are received, and it samples with them merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock.algorithms.roles import Sampling
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.lora import LoraSpec
from torch_models import EOS, make_prompts
from vllm_models import CONTEXT, generate, hugging_face_logprob, model_spec, start

LORA = LoraSpec(rank=4, alpha=8.0)


def changed() -> PolicyWorker:
    """A policy whose adapters are far from nothing."""
    policy = TorchPolicySpec(model=model_spec("llama"), end_ids=(EOS,), lora=LORA).build(CONTEXT)
    random = torch.Generator().manual_seed(5)
    for tensor in policy.local_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.3)
    return policy


@pytest.mark.slow
def test_an_engine_receives_adapters_alone_and_samples_with_them(tmp_path: Path) -> None:
    trained = changed()
    trained.save_pretrained(tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    before, after = model_spec("llama").causal_lm("cpu"), auto.from_pretrained(tmp_path)
    policy = start("llama", kv_cache_bytes=640 << 10, lora=LORA)
    try:
        weights = trained.export_weights()
        sizes = [tensor.numel() * 4 for tensor in weights.values()]
        assert policy.weights_layout().bytes_on[0] == sum(sizes)
        prompt, prompt_id = make_prompts(6)
        for module in (before, after):
            roll = generate(policy, prompt, prompt_id, Sampling(num_samples=2, max_new_tokens=20))
            expected = hugging_face_logprob(module, roll)
            torch.testing.assert_close(roll.behavior_logprob, expected, atol=5e-5, rtol=0)
            if module is before:
                assert float((hugging_face_logprob(after, roll) - expected).abs().max()) > 0.1
                policy.receive(weights, 1)
    finally:
        policy.close()


@pytest.mark.slow
def test_an_engine_starts_with_the_adapter_of_a_folder(tmp_path: Path) -> None:
    trained = changed()
    trained.save_pretrained(tmp_path)
    lora = LoraSpec(rank=4, alpha=8.0, folder=str(tmp_path / "adapter"))
    policy = start("llama", kv_cache_bytes=640 << 10, lora=lora)
    try:
        prompt, prompt_id = make_prompts(4)
        roll = generate(policy, prompt, prompt_id, Sampling(num_samples=2, max_new_tokens=20))
        auto: Any = transformers.AutoModelForCausalLM
        expected = hugging_face_logprob(auto.from_pretrained(tmp_path), roll)
        torch.testing.assert_close(roll.behavior_logprob, expected, atol=5e-5, rtol=0)
    finally:
        policy.close()
