"""Generation: independent of the batch bit for bit, and consistent with evaluation."""

from __future__ import annotations

import pytest
import torch
from penstock.algorithms.roles import Rollout, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.engines.roles import PolicyWorker
from torch import Tensor
from torch_models import EOS, FAMILIES, PLAIN, make_policy, make_prompts, module_of

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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-all-heads", "qwen2-tied", "qwen3"])
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
    assert module_of(policy).config._attn_implementation == "sdpa"


def test_the_lengths_of_neighbors_and_who_waits_do_not_matter():
    policy = make_policy()
    prompt, prompt_id = make_prompts(12, longest=100, seed=1)
    short = (prompt >= 0).sum(1) < 20
    assert 0 < int(short.sum()) < 12
    whole = responses(generate(policy, prompt, prompt_id))
    only_short = responses(generate(policy, prompt[short][:, :20], prompt_id[short]))
    few = responses(generate(make_policy(max_decode_rows=6), prompt, prompt_id))
    assert only_short.items() <= whole.items()
    assert few == whole


def test_more_samples_extend_fewer_and_a_longer_limit_extends_a_shorter():
    policy = make_policy()
    prompt, prompt_id = make_prompts(5)
    few = responses(generate(policy, prompt, prompt_id))
    many = responses(
        generate(policy, prompt, prompt_id, Sampling(num_samples=6, max_new_tokens=40))
    )
    for key, (tokens, logprob) in few.items():
        assert many[key][0][: len(tokens)] == tokens
        assert many[key][1][: len(tokens)] == logprob


def test_seed_step_ordinal_and_role_all_change_the_sample():
    policy = make_policy()
    prompt, prompt_id = make_prompts(4)
    sampled: list[object] = []
    for step, ordinal in ((0, 0), (1, 0), (0, 1)):
        with call_scope(step, ordinal):
            sampled.append(policy.generate(prompt, prompt_id, SAMPLING).tokens.tolist())
    with call_scope(0, 0):
        assert policy.generate(prompt, prompt_id, SAMPLING).tokens.tolist() == sampled[0]
    assert sampled[0] != sampled[1]
    assert sampled[0] != sampled[2]
    assert sampled[1] != sampled[2]


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


@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_the_rollout_is_laid_out_as_the_table_says(name: str):
    policy = make_policy(name)
    prompt, prompt_id = make_prompts(6)
    roll = generate(policy, prompt, prompt_id)
    assert roll.prompt_id.tolist() == prompt_id.repeat_interleave(3).tolist()
    for row in range(len(roll.tokens)):
        start = int((prompt[row // 3] >= 0).sum())
        response = roll.tokens[row][roll.mask[row]].tolist()
        end = start + len(response)
        assert roll.tokens[row, :start].tolist() == prompt[row // 3, :start].tolist()
        assert torch.nonzero(roll.mask[row])[:, 0].tolist() == list(range(start, end))
        assert bool((roll.tokens[row, end:] == -1).all())
        assert bool((roll.behavior_logprob[row][~roll.mask[row]] == 0).all())
        assert EOS not in response[:-1]
        assert bool(roll.finished[row]) == (response[-1] == EOS)
        assert roll.finished[row] or len(response) == SAMPLING.max_new_tokens
    assert 0 < int(roll.finished.sum()) < len(roll.finished)


def test_greedy_takes_the_most_likely_token_of_hugging_face():
    policy = make_policy("qwen3")
    prompt, prompt_id = make_prompts(3)
    sampling = Sampling(max_new_tokens=10, temperature=0)
    roll = generate(policy, prompt, prompt_id, sampling)
    for row in range(3):
        start = int((prompt[row] >= 0).sum())
        tokens = roll.tokens[row][roll.tokens[row] >= 0]
        logits = module_of(policy)(input_ids=tokens[None]).logits[0]
        assert tokens[start:].tolist() == logits[start - 1 : -1].argmax(-1).tolist()
    assert not roll.behavior_logprob.any()


def test_lengths_are_reported():
    policy = make_policy()
    prompt, prompt_id = make_prompts(6)
    roll = generate(policy, prompt, prompt_id)
    lengths = roll.mask.sum(1)
    values = {name: metric.value for name, metric in policy.metrics.items()}
    assert values == {
        "response_length": pytest.approx(float(lengths.float().mean())),
        "response_length_min": float(lengths.min()),
        "response_length_max": float(lengths.max()),
        "truncated": pytest.approx(1 - float(roll.finished.float().mean())),
        "new_tokens": float(lengths.sum()),
        "token_lag": 0.0,
        "token_lag_max": 0.0,
    }


def test_what_is_reported_does_not_depend_on_the_chunks():
    whole, chunked = make_policy(), make_policy()
    prompt, prompt_id = make_prompts(6)
    generate(whole, prompt, prompt_id)
    for chunk in (slice(0, 1), slice(1, 6)):
        generate(chunked, prompt[chunk], prompt_id[chunk])
    assert chunked.metrics == whole.metrics


def test_no_prompts_make_no_rows():
    policy = make_policy()
    empty = torch.zeros(0, 5, dtype=torch.int64)
    roll = policy.generate(empty, torch.zeros(0, dtype=torch.int64), SAMPLING)
    assert roll.tokens.shape == (0, 0)
    assert roll.finished.shape == (0,)


def test_prompts_that_cannot_be_answered_are_refused():
    policy = make_policy()
    prompt, prompt_id = make_prompts(3)
    prompt[1] = -1
    with pytest.raises(ValueError, match=r"prompt row 1 is empty"):
        policy.generate(prompt, prompt_id, SAMPLING)
    prompt, prompt_id = make_prompts(3)
    with pytest.raises(ValueError, match=r"exceeds the model's 256 positions"):
        policy.generate(prompt, prompt_id, Sampling(max_new_tokens=250))
