"""What every function of a score per row must keep, whatever the scores: a sweep over all of them.

A function that makes something of scores has its row in `FUNCTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.dapo import is_mixed
from penstock.algorithms.ops.advantages import (
    batch_centered,
    batch_std_advantage,
    broadcast_over_tokens,
    group_advantage,
    leave_one_out,
    log_partition_advantage,
    remax_advantage,
)
from penstock.algorithms.ops.kl import finished_score, kl_shaped_reward
from penstock.algorithms.ops.pairs import best_and_worst, mismatched
from penstock.algorithms.ops.rewards import (
    calibrated_score,
    constrained_score,
    is_correct,
    kl_penalized_score,
    length_reward,
    overlong_penalty,
    signed_score,
    weighted_score,
    weighted_sum,
)
from penstock.algorithms.papers.a_lol import better_responses
from penstock.algorithms.papers.cgpo import (
    best_passing,
    constrained_reward,
    less_mean,
    passing_and_failing,
)
from penstock.algorithms.papers.ensemble_ppo import EnsembleRule, joined_score
from penstock.algorithms.papers.pf_ppo import filtered_batch, filtered_groups, selection_weights
from penstock.algorithms.papers.population import mean_return
from penstock.algorithms.roles import Rollout
from torch import Tensor


class Rows:
    """Columns beside the scores of some rows: two responses to every prompt, the second cut off."""

    def __init__(self, num_rows: int, width: int) -> None:
        index = torch.arange(num_rows)
        self.ids = index % max(num_rows // 2, 1)
        self.finished = index < num_rows // 2
        self.passed = self.finished.float()
        place = torch.arange(width)
        self.mask = (place >= 1) & (place <= 1 + index[:, None] % 3)
        self.logprob = -(1.0 + place).expand(num_rows, width) / 4
        self.ones = torch.ones(num_rows)
        self.roll = Rollout(
            prompt_id=self.ids,
            tokens=torch.arange(num_rows * width).view(num_rows, width),
            mask=self.mask,
            behavior_logprob=self.logprob,
            finished=self.finished,
        )

    def shaped(self, score: Tensor) -> Tensor:
        return kl_shaped_reward(
            score,
            self.mask,
            logprob=self.logprob,
            ref_logprob=2 * self.logprob,
            kl_coef=0.1,
            finished=self.finished,
            no_eos="replace",
            no_eos_score=-0.5,
        )

    def imitated(self, score: Tensor) -> Tensor:
        return best_passing(
            self.roll,
            self.roll,
            score=score,
            passed=self.passed,
            kl=self.ones,
            fallback_passed=self.passed,
        ).weight


FUNCTIONS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "batch_centered": lambda s, r: batch_centered(s),
    "batch_std_advantage": lambda s, r: batch_std_advantage(s, r.ids, eps=0),
    "best_and_worst": lambda s, r: best_and_worst(r.roll, s).score,
    "best_passing": lambda s, r: r.imitated(s),
    "better_responses": lambda s, r: (
        better_responses(r.roll.tokens, r.mask, score=s, value=r.ones / 2).advantage
    ),
    "broadcast_over_tokens": lambda s, r: broadcast_over_tokens(s, r.mask),
    "calibrated_score": lambda s, r: calibrated_score(s, baseline_score=r.ones),
    "constrained_reward": lambda s, r: constrained_reward(s, passed=r.passed, allowance=r.ones / 2),
    "constrained_score": lambda s, r: constrained_score(s, r.passed, violation_score=-0.5),
    "ensemble, mean": lambda s, r: joined_score(s, s // 2, rule=EnsembleRule(combination="mean")),
    "ensemble, worst": lambda s, r: joined_score(
        s, -s, rule=EnsembleRule(combination="worst_case")
    ),
    "ensemble, uncertain": lambda s, r: joined_score(s, -s, rule=EnsembleRule()),
    "filtered_batch": lambda s, r: filtered_batch(r.roll, s, count=1, strategy="power").score,
    "filtered_groups": lambda s, r: filtered_groups(r.roll, s, count=2, strategy="best").score,
    "finished_score, replace": lambda s, r: finished_score(
        s, r.finished, no_eos="replace", no_eos_score=-0.5
    ),
    "finished_score, subtract": lambda s, r: finished_score(
        s, r.finished, no_eos="subtract", no_eos_penalty=0.5
    ),
    "group_advantage": lambda s, r: group_advantage(s, r.ids, eps=0),
    "is_correct": lambda s, r: is_correct(s),
    "signed_score": lambda s, r: signed_score(is_correct(s)),
    "is_mixed": lambda s, r: is_mixed(s, r.ids),
    "kl_penalized_score": lambda s, r: kl_penalized_score(s, kl=r.ones, kl_coef=0.1),
    "kl_shaped_reward": lambda s, r: r.shaped(s),
    "leave_one_out": lambda s, r: leave_one_out(s, r.ids),
    "length_reward": lambda s, r: length_reward(s, r.ids, correct=r.finished),
    "less_mean, batch": lambda s, r: less_mean(s, r.ids, passed=r.passed),
    "less_mean, passing": lambda s, r: less_mean(s, r.ids, passed=r.passed, mean_over="passing"),
    "less_mean, prompt": lambda s, r: less_mean(s, r.ids, passed=r.passed, mean_over="prompt"),
    "log_partition_advantage": lambda s, r: log_partition_advantage(s, r.ids, tau=0.5),
    "mean_return": lambda s, r: mean_return(
        s[:, None].expand(r.mask.shape), r.mask, terminated=r.mask, truncated=r.mask
    ),
    "overlong_penalty": lambda s, r: overlong_penalty(s, max_length=3, cache=2),
    "passing_and_failing": lambda s, r: passing_and_failing(r.roll, s, passed=r.passed).score,
    "remax_advantage": lambda s, r: remax_advantage(s, r.mask, greedy_score=r.ones / 2),
    "selection_weights": lambda s, r: selection_weights(s, r.ids, strategy="power"),
    "weighted_score": lambda s, r: weighted_score(s, other=s, other_weight=0.5),
    "weighted_sum": lambda s, r: weighted_sum({"a": s, "b": s}, {"a": 0.5}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=10)
@given(score=st.lists(st.integers(-3, 4), min_size=4, max_size=4), width=st.integers(2, 4))
def test_whole_numbers_are_scores_like_any_other(name: str, score: list[int], width: int) -> None:
    """Verdicts and counts come as integers; nothing made of them is rounded to one."""
    rows, column = Rows(4, width), torch.tensor(score)
    torch.testing.assert_close(
        FUNCTIONS[name](column, rows).float(), FUNCTIONS[name](column.float(), rows).float()
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [0, 3])
def test_no_rows_make_no_rows(name: str, width: int) -> None:
    """A rollout of no prompts, as a round of dynamic sampling asks for, has columns [0, 0]."""
    made = FUNCTIONS[name](torch.zeros(0), Rows(0, width))
    assert len(made) == 0


def test_no_pairs_are_mismatched_to_none() -> None:
    rows = Rows(0, 3)
    made = mismatched(rows.roll.tokens, rows.mask, rows.ids)
    assert (made.tokens.shape, made.mask.shape) == ((0, 3), (0, 3))


@pytest.mark.parametrize("name", FUNCTIONS)
@given(score=st.floats(-100, 100, width=32))
@settings(max_examples=10)
def test_equal_scores_make_finite_numbers(name: str, score: float) -> None:
    """They have no deviation to divide by."""
    made = FUNCTIONS[name](torch.full((6,), score), Rows(6, 3))
    assert made.double().isfinite().all()


REFUSED = ("length_reward", "mean_return")
"""Read lengths and rewards of environments, which are never missing."""
CHOSEN = (
    "best_passing",
    "filtered_batch",
    "filtered_groups",
    "passing_and_failing",
    "selection_weights",
    "better_responses",
)
"""Functions that choose rows, or say how much each counts."""
ADVANTAGES = (
    "batch_centered",
    "batch_std_advantage",
    "group_advantage",
    "leave_one_out",
    "less_mean, batch",
    "less_mean, passing",
    "less_mean, prompt",
    "log_partition_advantage",
    "is_mixed",
    "remax_advantage",
)
ONE_MISSING = torch.tensor([torch.nan, 1.0, 0.5, 2.0, 3.0, 1.0])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in REFUSED])
@pytest.mark.parametrize("shift", [-5.0, -1.0, 0.0, 5.0])
def test_a_row_without_a_score_is_in_no_statistic(name: str, shift: float) -> None:
    """The other rows get what they get without it, whether scores are negative or positive."""
    score, rows = ONE_MISSING + shift, Rows(6, 3)
    made = FUNCTIONS[name](score, rows)
    if name in CHOSEN:
        assert not made.isnan().any()
        return
    if name == "best_and_worst":  # the first prompt has one score, and no pair
        assert made[2:].isfinite().all()
        assert not best_and_worst(rows.roll, score).mask[:2].any()
        return
    if name in ADVANTAGES:
        assert bool((made[0] == 0).all())
    else:
        assert made[0].isnan().any()
    others = Rows(6, 3)
    others.ids, others.passed = rows.ids[1:], rows.passed[1:]
    others.mask, others.logprob, others.ones = rows.mask[1:], rows.logprob[1:], rows.ones[1:]
    others.finished = rows.finished[1:]
    if name in ADVANTAGES:  # a second response of the first prompt is alone without the missing one
        return_ = made[torch.tensor([1, 2, 4, 5])]
        keep = torch.tensor([0, 1, 3, 4])
        for field in ("ids", "passed", "mask", "logprob", "ones", "finished"):
            setattr(others, field, getattr(others, field)[keep])
        if "batch" in name or "passing" in name:
            return  # see `test_batch_statistics_leave_out_missing_scores`
        torch.testing.assert_close(return_, FUNCTIONS[name](score[1:][keep], others))
    else:
        torch.testing.assert_close(made[1:], FUNCTIONS[name](score[1:], others))


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in REFUSED])
@pytest.mark.parametrize("left", [0, 1])
def test_a_group_may_have_one_score_or_none(name: str, left: int) -> None:
    """There is nothing to compare then, and nothing fails."""
    score = torch.full((6,), torch.nan)
    score[:left] = 3.0
    made = FUNCTIONS[name](score, Rows(6, 3))
    if name in ADVANTAGES:  # ReMax compares with a greedy response instead of the group
        assert (made[left if name == "remax_advantage" else 0 :] == 0).all()


def test_batch_statistics_leave_out_missing_scores() -> None:
    score, ids = torch.tensor([torch.nan, 1.0, 3.0, -1.0]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(batch_centered(score), torch.tensor([0.0, 0.0, 2.0, -2.0]))
    got = batch_std_advantage(score, ids, eps=0)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, 1.0, -1.0]))
    got = less_mean(score, ids, passed=torch.tensor([1.0, 1, 0, 1]), mean_over="passing")
    torch.testing.assert_close(got, torch.tensor([0.0, 1.0, 3.0, -1.0]))


def test_nan_is_refused_where_values_are_never_missing() -> None:
    with pytest.raises(FloatingPointError, match="of row 0 is nan"):
        FUNCTIONS["length_reward"](torch.tensor([torch.nan, 1.0, 0.5, 2.0]), Rows(4, 3))
