"""Newer weights between two tokens: which tokens are theirs, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_flight_streams import alone, check_parted, check_versions, streamed
from penstock.algorithms.roles import Rollout, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from torch_models import make_policy, make_prompts

SAMPLING = Sampling(num_samples=3, max_new_tokens=30)
AFTER = 5


def nothing() -> None:
    """The same weights stay."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-tied", "gpt2"])
def test_tokens_after_are_of_the_new_weights(name: str) -> None:
    policy: Any = make_policy(name)
    prompts = make_prompts(6)
    first = {n: t.clone() for n, t in policy.export_weights().items()}
    second = {n: t + 0.05 * torch.randn_like(t) for n, t in first.items()}
    before = alone(policy, prompts, SAMPLING)
    roll = streamed(policy, prompts, SAMPLING, AFTER, lambda: policy.load_weights(second))
    check_parted(roll, before)
    if name == "qwen2-tied":  # all rows begin together
        check_versions(roll, torch.full((18,), AFTER))
    policy.load_weights(first)
    # With the same weights before and after nothing but versions tells that any have come.
    again = streamed(policy, prompts, SAMPLING, AFTER, lambda: policy.load_weights(first))
    assert torch.equal(again.tokens, before.tokens)
    assert torch.equal(again.behavior_logprob, before.behavior_logprob)
    assert {7, 8} <= set(again.version[again.mask].tolist())
    assert set(before.version[before.mask].tolist()) == {7}


@pytest.mark.slow
def test_rows_that_enter_later_begin_with_the_new_weights() -> None:
    """There is room for one response at a time."""
    policy: Any = make_policy(max_decode_rows=1)
    weights = {n: t.clone() for n, t in policy.export_weights().items()}
    prompts = make_prompts(3)
    before = alone(policy, prompts, SAMPLING)
    roll = streamed(policy, prompts, SAMPLING, AFTER, lambda: policy.load_weights(weights))
    assert torch.equal(roll.tokens, before.tokens)
    num_old = torch.zeros(9, dtype=torch.int64)
    lengths, left = roll.mask.sum(1).tolist(), AFTER
    for row, length in enumerate(lengths):
        num_old[row] = min(length, left)
        left -= int(num_old[row])
    check_versions(roll, num_old)
    assert roll.version[8][roll.mask[8]].unique().tolist() == [8]


def test_segments_keep_the_version_of_every_token() -> None:
    policy: Any = make_policy()
    prompt, prompt_id = make_prompts(4)
    call = {"prompt": prompt, "prompt_id": prompt_id, "sampling": SAMPLING}
    begun, none = None, {"prompt": prompt[:0], "prompt_id": prompt_id[:0], "sampling": SAMPLING}
    rolls: list[Rollout] = []
    for step in range(5):
        steps: Any = policy.stream_segment("generate", [none if step else call], [begun], 8)
        found, num_paused = None, 0
        while found is None:
            version = 2 * step + (num_paused >= 3)
            with call_scope(step, 0, version=version, in_flight=True):
                found = next(steps)
            num_paused += 1
        rolls.append(found.returned)
        begun = found.unfinished
    versions = {
        int(length): roll.version[row][roll.mask[row]].tolist()
        for roll in rolls
        for row, length in enumerate(roll.mask.sum(1))
    }
    assert max(versions) > 24
    for length, found_versions in versions.items():
        assert found_versions == sorted(found_versions)
        assert [version // 2 for version in found_versions] == [t // 8 for t in range(length)]
        for segment in range(length // 8):  # in each that is whole both have sampled
            assert {2 * segment, 2 * segment + 1} <= set(found_versions)
