"""Families of models in a real vLLM engine: first weights, and new ones."""

from __future__ import annotations

import pytest
from penstock.algorithms.roles import Sampling
from torch_models import make_prompts
from vllm_models import (
    generate,
    hugging_face_logprob,
    model_spec,
    random_weights,
    set_weights,
    start,
)

FAMILIES = ("mixtral", "qwen2_moe", "llama3", "smollm3", "gemma2", "gemma3", "olmo2", "phi4")
SAMPLING = Sampling(num_samples=2, max_new_tokens=20)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_hugging_faces_before_and_after_an_update(family: str):
    """Mixtures have experts of 80 or of 24: vLLM pads both to a multiple of 32."""
    module = model_spec(family).causal_lm("cpu")
    # vLLM asks for it, of classes that it takes for its own.
    vars(module.base_model)["do_not_compile"] = True
    policy = start(family)
    try:
        for update in range(3):
            if update:
                weights = random_weights(module, update)
                policy.load_weights(weights)
                set_weights(module, weights)
            prompt, prompt_id = make_prompts(6)
            roll = generate(policy, prompt, prompt_id, SAMPLING)
            expected = hugging_face_logprob(module, roll)
            assert float((roll.behavior_logprob - expected).abs().max()) < 1e-5, update
    finally:
        policy.close()
