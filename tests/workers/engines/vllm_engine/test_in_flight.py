"""New weights for vLLM while it samples: between two of its steps, in a real engine."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_flight_streams import alone, check_parted, check_versions, streamed
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.engines.vllm_engine.generator import VllmPolicy
from penstock.workers.engines.vllm_engine.requests import Request, RequestBatch
from torch import Tensor
from vllm_models import long_prompts, model_spec, random_weights, start

SAMPLING = Sampling(num_samples=3, max_new_tokens=30)
AFTER = 5


@pytest.fixture(scope="module")
def module() -> Any:
    return model_spec("qwen2-tied").causal_lm("cpu")


@pytest.fixture(scope="module")
def policy() -> Generator[VllmPolicy]:
    made = start("qwen2-tied")
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights(module: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return random_weights(module, 1), random_weights(module, 2)


def load(policy: VllmPolicy, weights: dict[str, Tensor]) -> None:
    policy.load_weights(weights)


@pytest.mark.slow
def test_tokens_after_are_of_the_new_weights(
    policy: VllmPolicy, weights: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> None:
    first, second = weights
    prompts = long_prompts(4, 70)
    load(policy, first)
    before = alone(policy, prompts, SAMPLING)
    roll = streamed(policy, prompts, SAMPLING, AFTER, lambda: load(policy, second))
    check_parted(roll, before)
    check_versions(roll, torch.full((12,), AFTER))
    # Keys and values that the old weights made of these prompts are not found by who comes next.
    after = alone(policy, prompts, SAMPLING)
    load(policy, second)  # while nothing runs, which empties the cache
    expected = alone(policy, prompts, SAMPLING)
    assert torch.equal(after.tokens, expected.tokens)
    torch.testing.assert_close(after.behavior_logprob, expected.behavior_logprob)


@pytest.mark.slow
def test_the_same_weights_change_nothing(
    policy: VllmPolicy, weights: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> None:
    first, _ = weights
    prompts = long_prompts(3, 40)
    load(policy, first)
    before = alone(policy, prompts, SAMPLING)
    roll = streamed(policy, prompts, SAMPLING, AFTER, lambda: load(policy, first))
    assert torch.equal(roll.tokens, before.tokens)
    check_versions(roll, torch.full((9,), AFTER))


class ComputesAhead:
    """An `LLMEngine` that gives what a step computed with the next one, as vLLM does on GPUs."""

    def __init__(self) -> None:
        self.weights = 0
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=[]))
        self.names: list[str] = []

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.names.append(name)

    def abort_request(self, names: list[str]) -> None:
        """Nothing is asked of it afterwards."""

    def step(self) -> list[Any]:
        """Tokens say which weights have sampled them."""
        queue = self.engine_core.engine_core.batch_queue
        queue.append([self.weights])
        if len(queue) < 2:
            return []
        (token,) = queue.pop(0)
        entry = {token: SimpleNamespace(logprob=-1.0)}
        part = SimpleNamespace(token_ids=[token], logprobs=[entry], finish_reason=None)
        return [
            SimpleNamespace(request_id=name, outputs=[part], finished=False, num_cached_tokens=0)
            for name in self.names
        ]


@pytest.mark.slow
def test_a_step_that_was_computed_ahead_is_of_the_old_weights() -> None:
    engine = ComputesAhead()
    request = Request([5, 6], 1, 40)
    with call_scope(0, 0, version=0):
        batch = RequestBatch(engine, "1", "1", {0: request}, SAMPLING, [1])
    for version in (0, 0, 0, 1, 1, 1, 1, 2, 2, 2):
        engine.weights = version
        with call_scope(0, 0, version=version):
            batch.step()
    sampled = request.so_far
    assert sampled.tokens == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert sampled.versions == sampled.tokens
