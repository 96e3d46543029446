"""Sampling until a batch is full: which groups are kept, what is asked next, and the bound."""

from __future__ import annotations

import pytest
import torch
from penstock.algorithms.dapo import (
    DAPO,
    DynamicSampling,
    ScoredRollout,
    dapo_step,
    filled_batch,
    is_mixed,
    joined,
    kept_groups,
    prompts_to_ask,
)
from penstock.algorithms.options import learned_rows
from penstock.algorithms.roles import Policy, Prompts, Reward, Rollout, Sampling, TrainMetrics
from torch import Tensor

ACCURACY = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1]).float()
PROMPT_ID = torch.tensor([5, 6, 7, 8]).repeat_interleave(4)


def prompts(num: int) -> Prompts:
    return Prompts(prompt=torch.ones(num, 2).long(), prompt_id=torch.arange(num) + 10)


def rollout(*ids: int, width: int = 3, score: float = 1.0) -> ScoredRollout:
    rows = len(ids)
    return ScoredRollout(
        prompt_id=torch.tensor(ids, dtype=torch.int64),
        tokens=torch.ones(rows, width).long(),
        mask=(torch.arange(width) > 0).expand(rows, -1),
        behavior_logprob=torch.zeros(rows, width),
        finished=torch.arange(rows) % 2 == 0,
        score=torch.full((rows,), score),
    )


def test_groups_that_are_all_right_or_all_wrong_are_dropped() -> None:
    """Correct: 0, 1, 4 and 3 of 4."""
    mixed = is_mixed(ACCURACY, PROMPT_ID, correct_score=1.0)
    assert mixed.tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    roll = rollout(*PROMPT_ID.tolist())
    kept = kept_groups(roll, score=ACCURACY, mixed=mixed)
    assert kept.prompt_id.unique().tolist() == [6, 8]
    assert kept.score.tolist() == [1, 0, 0, 0, 1, 1, 0, 1]


def test_scores_may_differ_where_correctness_does_not() -> None:
    score, ids = torch.tensor([0.1, 0.2, 0, 0]), torch.tensor([1, 2, 1, 2])
    assert is_mixed(score, ids).tolist() == [1, 1, 1, 1]
    assert is_mixed(score, ids, correct_score=1.0).tolist() == [0, 0, 0, 0]


def test_later_rounds_ask_for_what_is_missing() -> None:
    every = prompts(12)  # 3 rounds of 4
    assert prompts_to_ask(every, round_index=0, max_rounds=3).prompt_id.tolist() == [10, 11, 12, 13]
    three = rollout(10, 10, 11, 11, 12, 12)
    assert prompts_to_ask(every, three, round_index=1, max_rounds=3).prompt_id.tolist() == [14, 15]
    once = prompts_to_ask(every, three, round_index=2, oversample=1, max_rounds=3)
    assert once.prompt_id.tolist() == [18]
    full = rollout(10, 10, 11, 11, 12, 12, 13, 13)
    nothing = prompts_to_ask(every, full, round_index=1, max_rounds=3)
    assert (len(nothing.prompt), len(nothing.prompt_id)) == (0, 0)


def test_prompts_must_be_shared_out_evenly() -> None:
    with pytest.raises(ValueError, match="a step reads 7 prompts, which 3 rounds do not share"):
        prompts_to_ask(prompts(7), round_index=0, max_rounds=3)


def test_joining_pads_to_the_wider_rollout() -> None:
    both = joined(rollout(1, 1, width=3), rollout(2, 2, width=5, score=0.5))
    assert both.prompt_id.tolist() == [1, 1, 2, 2]
    assert both.tokens[:2].tolist() == [[1, 1, 1, -1, -1]] * 2
    assert not both.mask[:2, 3:].any()
    assert both.score.tolist() == [1, 1, 0.5, 0.5]
    empty = rollout(width=0)
    assert joined(both, empty).tokens.equal(both.tokens)


def test_a_batch_takes_the_first_groups_and_says_when_there_are_too_few() -> None:
    every = prompts(6)
    kept = rollout(10, 10, 12, 12, 13, 13)
    assert filled_batch(kept, every, max_rounds=3).prompt_id.tolist() == [10, 10, 12, 12]
    short = rollout(10, 10)
    assert filled_batch(short, every, max_rounds=3).prompt_id.tolist() == [10, 10]
    message = (
        "after 3 rounds 1 of 2 groups have responses that differ, and the others teach nothing"
    )
    with pytest.raises(ValueError, match=message):
        filled_batch(short, every, max_rounds=3, when_short="error")
    with pytest.raises(ValueError, match="after 3 rounds 0 of 2 groups"):
        filled_batch(rollout(), every, max_rounds=3)


def test_responses_that_were_cut_off_can_be_left_out_of_the_loss() -> None:
    got = learned_rows(rollout(10, 10), DAPO(finished_only=True))
    assert got.mask.any(dim=1).tolist() == [True, False]


class CountingPolicy(Policy):
    """Answers each prompt with its number; keeps how many prompts each call had."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.rows: list[int] = []

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> Rollout:
        self.asked.append(len(prompt))
        return rollout(*prompt_id.repeat_interleave(sampling.num_samples).tolist())

    def train(self, loss: object, batch: object, **options: object) -> TrainMetrics:
        self.rows.append(len(batch.tokens))  # pyright: ignore - a PolicyBatch
        return TrainMetrics({})


class EvenIsMixed(Reward):
    """Even prompts have one correct response, odd ones none."""

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        first = torch.cat([torch.ones(1).bool(), prompt_id[1:] != prompt_id[:-1]])[: len(prompt_id)]
        return (first & (prompt_id % 2 == 0)).float()


def test_dapo_samples_until_its_batch_is_full() -> None:
    actor = CountingPolicy()
    cfg = DAPO(
        sampling=Sampling(num_samples=4, max_new_tokens=8),
        filling=DynamicSampling(max_rounds=3, oversample=2),
        overlong_cache=2,
        num_minibatches=1,
    )
    _, mixed = dapo_step(prompts(12), actor, EvenIsMixed(), cfg)
    # 2 of 4 groups are mixed; 2 are missing, so 4 are asked; then the batch is full.
    assert actor.asked == [4, 4, 0]
    assert actor.rows == [4 * 4]
    assert mixed.mean().item() == 0.5


def test_a_zone_longer_than_the_longest_response_is_refused() -> None:
    with pytest.raises(ValueError, match="overlong_cache is 9; expected at least 1 and at most 8"):
        DAPO(sampling=Sampling(num_samples=2, max_new_tokens=8), overlong_cache=9)


def test_groups_of_a_full_batch_may_be_interleaved() -> None:
    got = filled_batch(rollout(10, 11, 10, 11, 12, 12), prompts(3), max_rounds=1)
    assert got.prompt_id.tolist() == [10, 11, 10, 11, 12, 12]
    two = filled_batch(rollout(12, 11, 12, 11, 10, 10), prompts(2), max_rounds=1)
    assert two.prompt_id.tolist() == [12, 11, 12, 11]
