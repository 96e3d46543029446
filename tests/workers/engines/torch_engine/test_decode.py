"""Generation: independent of the batch bit for bit, and consistent with evaluation.

What it has in common with other engines is in `rollout/test_generation_engines.py`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from penstock.algorithms.roles import Rollout, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine import generator
from torch import Tensor
from torch_models import FAMILIES, PLAIN, make_policy, make_prompts, module_of

SAMPLING = Sampling(num_samples=3, max_new_tokens=24)


def generate(
    policy: PolicyWorker, prompt: Tensor, prompt_id: Tensor, sampling: Sampling = SAMPLING
) -> Rollout:
    with call_scope(step=4, ordinal=1):
        return policy.generate(prompt, prompt_id, sampling)


def responses(roll: Rollout) -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """(prompt id, sample) -> response tokens and log-probabilities, exactly."""
    found: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    count: dict[int, int] = {}
    for row, prompt in enumerate(roll.prompt_id.tolist()):
        sample = count.get(prompt, 0)
        count[prompt] = sample + 1
        mask = roll.mask[row]
        found[prompt, sample] = (
            roll.tokens[row][mask].tolist(),
            roll.behavior_logprob[row][mask].tolist(),
        )
    return found


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama-all-heads", "qwen2-tied")),
    ],
)
def test_a_sample_does_not_depend_on_its_batch(name: str, dtype: str, threads: int):
    policy = make_policy(name, dtype=dtype)
    prompt, prompt_id = make_prompts(33)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = responses(generate(policy, prompt, prompt_id))
        order = torch.randperm(33, generator=torch.Generator().manual_seed(0))
        parts = [order] + [torch.arange(n) for n in (1, 2, 5, 11, 16, 17, 31)]
        parts += [torch.tensor([k]) for k in (0, 7, 32)]
        for part in parts:
            some = responses(generate(policy, prompt[part], prompt_id[part]))
            for key, sampled in some.items():
                assert sampled == whole[key], key
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", [*PLAIN, "mixtral"])
def test_nor_through_the_hugging_face_forward(name: str, threads: int):
    """With prompts of so few lengths that several share one; mistral and gemma2 look 8 back."""
    policy, sampling = make_policy(name), Sampling(num_samples=3, max_new_tokens=9)
    prompt, prompt_id = make_prompts(9, longest=4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = responses(generate(policy, prompt, prompt_id, sampling))
        for part in (torch.arange(9).flip(0), torch.arange(4), torch.tensor([7])):
            some = responses(generate(policy, prompt[part], prompt_id[part], sampling))
            for key, sampled in some.items():
                assert sampled == whole[key], key
    finally:
        torch.set_num_threads(before)
    expected = "eager" if name == "gemma2" else "sdpa"  # it caps scores
    assert module_of(policy).config._attn_implementation == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLAIN, "mixtral"])
def test_a_device_samples_prompts_of_all_lengths_in_one_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded on the left: the same tokens, in as many forward calls as the longest response has."""
    policy, sampling = make_policy(name), Sampling(num_samples=2, max_new_tokens=12)
    ragged, prompt_id = make_prompts(12, longest=14)
    assert len((ragged >= 0).sum(1).unique()) > 5
    alike = ragged[(ragged >= 0).sum(1).argmax()].flip(0).expand(12, -1)  # nothing is masked
    alone = [generate(policy, prompt, prompt_id, sampling) for prompt in (ragged, alike)]
    calls: list[int] = []
    module_of(policy).register_forward_pre_hook(lambda *given: calls.append(1))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(generator, "decode_plain", partial(generator.decode_plain, padded=True))
    for prompt, expected in zip((ragged, alike), alone, strict=True):
        calls.clear()
        found = generate(policy, prompt, prompt_id, sampling)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(
            found.behavior_logprob, expected.behavior_logprob, atol=1e-5, rtol=0
        )
        assert len(calls) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *PLAIN])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_behavior_logprobs_equal_evaluation(name: str, temperature: float):
    policy = make_policy(name)
    prompt, prompt_id = make_prompts(7)
    sampling = Sampling(num_samples=3, max_new_tokens=16, temperature=temperature)
    roll = generate(policy, prompt, prompt_id, sampling)
    again = policy.logprob(roll.tokens, roll.mask, temperature=temperature)
    torch.testing.assert_close(roll.behavior_logprob, again, atol=1e-5, rtol=0)
    assert bool((roll.behavior_logprob[roll.mask] < 0).all())


def test_what_is_reported_does_not_depend_on_the_chunks():
    whole, chunked = make_policy(), make_policy()
    prompt, prompt_id = make_prompts(6)
    generate(whole, prompt, prompt_id)
    for chunk in (slice(0, 1), slice(1, 6)):
        generate(chunked, prompt[chunk], prompt_id[chunk])
    assert chunked.metrics == whole.metrics
