"""New weights for a real vLLM engine, started once, with a cache too small for its batches."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.engines.vllm_engine.generator import VllmPolicy
from penstock.workers.training.checkpoint_files import open_state, read_state_json, read_whole
from torch import Tensor
from torch_models import EOS, make_prompts
from vllm_models import (
    by_sample,
    generate,
    hugging_face_logprob,
    long_prompts,
    model_spec,
    random_weights,
    sample_seeds,
    set_weights,
    start,
)

pytestmark = pytest.mark.slow

SAMPLING = Sampling(num_samples=2, max_new_tokens=20)


@pytest.fixture(scope="module")
def module() -> Any:
    return model_spec("llama").causal_lm("cpu")


@pytest.fixture(scope="module")
def policy() -> Generator[VllmPolicy]:
    """Keys and values of 1 KiB per token: 640 tokens."""
    made = start("llama", kv_cache_bytes=640 << 10)
    yield made
    made.close()


def difference(policy: VllmPolicy, module: Any) -> float:
    """Largest difference to Hugging Face over some samples."""
    prompt, prompt_id = make_prompts(6)
    roll = generate(policy, prompt, prompt_id, SAMPLING)
    return float((roll.behavior_logprob - hugging_face_logprob(module, roll)).abs().max())


VERSIONS = count(1001)
"""Versions that the engine has not seen."""


def deliver(policy: VllmPolicy, weights: dict[str, Tensor]) -> int:
    version = next(VERSIONS)
    policy.receive(weights, version)
    return version


def test_logprobs_are_hugging_faces_after_0_1_2_and_50_updates(policy: VllmPolicy, module: Any):
    assert difference(policy, module) < 1e-5
    for update in range(1, 51):
        weights = random_weights(module, update)
        policy.load_weights(weights)
        if update in (1, 2, 50):
            set_weights(module, weights)
            assert difference(policy, module) < 1e-5


def test_the_prefix_cache_is_void_after_an_update(policy: VllmPolicy, module: Any):
    prompt, prompt_id = long_prompts(2, 70)
    ids, two = prompt[0].tolist(), Sampling(max_new_tokens=2)
    deliver(policy, random_weights(module, 60))
    sample_seeds(policy, ids, range(1), two)
    (again,) = sample_seeds(policy, ids, range(1), two)
    assert again.cached_tokens == 64
    old = generate(policy, prompt, prompt_id, SAMPLING)
    weights = random_weights(module, 61)
    deliver(policy, weights)
    (fresh,) = sample_seeds(policy, ids, range(1), two)
    assert fresh.cached_tokens == 0
    set_weights(module, weights)
    new = generate(policy, prompt, prompt_id, SAMPLING)
    expected = hugging_face_logprob(module, new)
    torch.testing.assert_close(new.behavior_logprob, expected, atol=1e-5, rtol=0)
    assert new.tokens.tolist() != old.tokens.tolist()


# --- the rest of what a copy of weights is asked for


def test_what_the_training_engine_saved_fits(policy: VllmPolicy, module: Any, tmp_path: Path):
    spec = TorchPolicySpec(model=model_spec("llama"), end_ids=(EOS,))
    trainer = spec.build(WorkerContext("actor"))
    weights = random_weights(module, 82)
    trainer.load_weights(weights)
    trainer.save_state(tmp_path)
    saved = open_state(tmp_path, read_state_json(tmp_path), "weights")
    policy.load_weights(read_whole(saved))
    set_weights(module, weights)
    assert difference(policy, module) < 1e-5


def test_a_cache_too_small_for_the_batch_changes_no_sample(policy: VllmPolicy, module: Any):
    weights = random_weights(module, 83)
    deliver(policy, weights)
    set_weights(module, weights)
    prompt, prompt_id = long_prompts(12, 40)
    sampling = Sampling(num_samples=4, max_new_tokens=60)
    roll = generate(policy, prompt, prompt_id, sampling)  # preempts and computes again
    expected = hugging_face_logprob(module, roll)
    torch.testing.assert_close(roll.behavior_logprob, expected, atol=1e-5, rtol=0)
    whole = by_sample(roll, 4)
    for row in range(3):
        one = generate(policy, prompt[row : row + 1], prompt_id[row : row + 1], sampling)
        for key, (tokens, _) in by_sample(one, 4).items():
            assert whole[key][0] == tokens
