"""Critic-free methods: the worked numbers of each, to six digits."""

from __future__ import annotations

import math

import pytest
import torch
from penstock.algorithms.losses import (
    CappedWeightLoss,
    ClippedPolicyLoss,
    probability_ratio,
    rebel_loss,
    sequence_sum,
)
from penstock.algorithms.ops.advantages import (
    batch_std_advantage,
    broadcast_over_tokens,
    group_advantage,
    log_partition_advantage,
    paired_baseline,
    remax_advantage,
    whiten,
)
from penstock.algorithms.ops.kl import kl_shaped_reward
from penstock.algorithms.ops.reductions import Variance, aggregate
from penstock.algorithms.ops.returns import return_to_go
from penstock.algorithms.ops.rewards import (
    is_correct,
    kl_penalized_score,
    length_reward,
    overlong_penalty,
    signed_score,
    weighted_score,
)
from penstock.algorithms.papers.a_lol import a_lol_kl_loss, a_lol_loss, priority, systematic_rows
from penstock.algorithms.papers.kimi import mirror_descent_loss
from penstock.algorithms.papers.p3o import p3o_loss
from torch import Tensor

from .samples import number_of
from .tensors import assert_close, f64


def mask_of(*lengths: int) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


# --- ReMax ----------------------------------------------------------------------------------------


def test_remax_takes_the_greedy_score_off_every_token() -> None:
    mask = mask_of(3, 2)
    greedy = paired_baseline(
        torch.tensor([7, 3]), baseline=f64([0.4, 0.7]), baseline_prompt_id=torch.tensor([3, 7])
    )
    score = f64([1.2, -0.3])
    assert_close(
        remax_advantage(score, mask, greedy_score=greedy), [[0.5, 0.5, 0.5], [-0.7, -0.7, 0]]
    )
    kl = f64([[0.2, -0.1, 0], [0, 0, 0]])
    weight = remax_advantage(score, mask, greedy_score=greedy, kl=kl, kl_coef=0.1)
    assert_close(weight[0], [0.48, 0.51, 0.5])


def test_remax_with_the_kl_of_all_later_tokens() -> None:
    mask, baseline = mask_of(3, 2), f64([0.7, 0.4])
    expected = [[0.49, 0.51, 0.5], [-0.7, -0.7, 0]]
    reward = f64([[-0.02, 0.01, 1.2], [0, -0.3, 0]])
    assert_close(torch.where(mask, return_to_go(reward, mask) - baseline[:, None], 0), expected)
    penalty = f64([[0.02, -0.01, 0], [0, 0, 0]])
    kl = penalty / 0.1
    assert_close(
        remax_advantage(
            f64([1.2, -0.3]),
            mask,
            greedy_score=baseline,
            kl=kl,
            kl_coef=0.1,
            kl_placement="return_to_go",
        ),
        expected,
    )


def test_remax_discounts_from_the_end_and_bounds_differences() -> None:
    got = remax_advantage(
        f64([9.0]), mask_of(3), greedy_score=f64([1.0]), difference_clip=5, discount=0.5
    )
    assert_close(got, [[5 / 8, 5 / 4, 5 / 2]])


def test_a_prompt_without_a_baseline_is_named() -> None:
    with pytest.raises(ValueError, match="prompt 7 has 0 baselines; it needs exactly one"):
        paired_baseline(
            torch.tensor([3, 7]), baseline=f64([1.0]), baseline_prompt_id=torch.tensor([3])
        )


# --- RLOO and its relatives -----------------------------------------------------------------------


def test_the_kl_is_part_of_a_response_s_score() -> None:
    assert_close(kl_penalized_score(f64([1, 0]), kl=f64([0.4, -0.2]), kl_coef=0.05), [0.98, 0.01])


# --- REINFORCE++ ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variance", "first", "second"),
    [
        ("unbiased", [0.718231, 0.727254, 0.7453], -1.095393),
        ("biased", [0.803007, 0.813095, 0.833271], -1.224687),
    ],
)
def test_reinforce_pp_normalizes_returns_to_go(
    variance: Variance, first: list[float], second: float
) -> None:
    mask = mask_of(3, 2)
    kl = f64([[0.1, 0.2, -0.1], [0, 0.3, 0]])
    reward = kl_shaped_reward(
        f64([1, -1]), mask, logprob=kl, ref_logprob=torch.zeros_like(kl), kl_coef=0.1
    )
    to_go = return_to_go(reward, mask)
    assert_close(to_go, [[0.98, 0.99, 1.01], [-1.03, -1.03, 0]])
    assert_close(whiten(to_go, mask, variance=variance), [first, [second, second, 0]])


def test_reinforce_pp_baseline_normalizes_over_tokens() -> None:
    mask = mask_of(2, 3, 1, 3)
    centered = group_advantage(f64([1, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), divide_by_std=False)
    assert_close(centered, [0.5, -0.5, 0, 0])
    per_token = broadcast_over_tokens(centered, mask)
    assert_close(
        whiten(per_token, mask),
        [
            [1.421338, 1.421338, 0],
            [-1.13707, -1.13707, -1.13707],
            [0.142134, 0, 0],
            [0.142134, 0.142134, 0.142134],
        ],
    )


# --- GRPO -----------------------------------------------------------------------------------------


def test_missing_scores_are_left_out() -> None:
    total = f64([2, 1, math.nan, 0])
    ids = torch.zeros(4).long()
    got = group_advantage(total, ids, eps=0)
    assert_close(got, [1, 0, 0, -1])


# --- DAPO -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "form", "expected"),
    [
        ([80, 81, 90, 100, 101], "piecewise", [0, -0.05, -0.5, -1, -1]),
        ([70, 85, 100, 110], "piecewise", [0, -0.25, -1, -1]),
        ([70, 85, 100, 110], "linear", [0, -0.25, -1, -1.5]),
    ],
)
def test_overlong_penalty(lengths: list[int], form: str, expected: list[float]) -> None:
    for length in (torch.tensor(lengths), f64(lengths)):
        got = overlong_penalty(
            length,
            max_length=100,
            cache=20,
            form=form,  # pyright: ignore[reportArgumentType] - one of its choices
        )
        assert_close(got, expected)


@pytest.mark.parametrize("cache", [0, 101])
def test_overlong_penalty_needs_a_zone(cache: int) -> None:
    with pytest.raises(ValueError, match=f"^cache is {cache}, but the soft zone must have between"):
        overlong_penalty(f64([1]), max_length=100, cache=cache)


@pytest.mark.parametrize(("eps_high", "expected"), [(0.2, 0.14), (0.28, 0.114)])
def test_clip_higher(eps_high: float, expected: float) -> None:
    ratio = f64([[1.25, 1.35, 1], [0.75, 1.3, 1]])
    loss = ClippedPolicyLoss(eps_high=eps_high)
    columns = (ratio.log(), torch.zeros_like(ratio), f64([1, -1]), mask_of(2, 3))
    assert_close(number_of(loss, *columns), expected)


def test_correct_responses_are_paid_one_and_others_minus_one() -> None:
    assert_close(signed_score(is_correct(f64([1, 0.1, 0, 1.5]))), [1, -1, -1, 1])


# --- GSPO and CISPO -------------------------------------------------------------------------------

GSPO_RATIO = f64([[0.004, 0.002, 0, 0], [-0.001, 0.001, 0.001, -0.003]])
GSPO_MASK = mask_of(2, 4)


def gspo(eps_low: float, eps_high: float, level: str = "sequence_mean") -> tuple[Tensor, Tensor]:
    logprob = (GSPO_RATIO - 1).requires_grad_()
    loss = ClippedPolicyLoss(
        eps_low=eps_low,
        eps_high=eps_high,
        ratio_level=level,  # pyright: ignore[reportArgumentType] - one of its choices
        aggregation="seq-mean-token-mean",
    )
    before = torch.full_like(GSPO_RATIO, -1)
    number = number_of(loss, logprob, before, f64([1, -1]), GSPO_MASK)
    return number, gradient(number, logprob)


def test_gspo_clips_whole_responses() -> None:
    ratio = probability_ratio(
        logprob=GSPO_RATIO,
        behavior_logprob=torch.zeros_like(GSPO_RATIO),
        level="sequence_mean",
        mask=GSPO_MASK,
    )
    assert_close(ratio[:, 0], [1.003005, 0.9995])
    loss, slope = gspo(3e-4, 4e-4)
    assert_close(loss, -0.00035)
    assert not slope.any()


def test_gspo_token_has_the_very_value_of_gspo() -> None:
    """Log-probabilities of -12 round away a log-ratio of 1e-4 that is added to them first."""
    random = torch.Generator().manual_seed(0)
    logprob = -12 * torch.rand(64, 9, generator=random)
    behavior = logprob - 1e-4 * torch.rand(64, 9, generator=random)
    of_rows, of_tokens = (
        probability_ratio(
            logprob=logprob,
            behavior_logprob=behavior,
            level=level,  # pyright: ignore[reportArgumentType] - one of its choices
            mask=torch.ones(64, 9, dtype=torch.bool),
        )
        for level in ("sequence_mean", "sequence_mean_token")
    )
    assert torch.equal(of_tokens, of_rows)


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_mean_token"])
def test_gspo_gives_every_token_of_a_response_the_same_gradient(level: str) -> None:
    _, slope = gspo(0.2, 0.2, level)
    assert_close(slope, [[-0.250751, -0.250751, 0, 0], [0.124938] * 4])


@pytest.mark.parametrize(
    ("floor", "cap", "expected", "slope"),
    [
        (0.0, 5.0, -1.520022, [[-0.41218, -1.25], [0.151633, 0.276293]]),
        (0.8, 1.28, -0.708663, [[-0.32, -0.32], [0.2, 0.276293]]),
    ],
)
def test_cispo(floor: float, cap: float, expected: float, slope: list[list[float]]) -> None:
    log_ratio = f64([[0.5, 2], [-0.5, 0.1]])
    logprob = (log_ratio - 1).requires_grad_()
    loss = CappedWeightLoss(weight_floor=floor, weight_cap=cap)
    columns = (torch.full_like(log_ratio, -1), f64([1, -1]), mask_of(2, 2))
    number = number_of(loss, logprob, *columns)
    assert_close(number, expected)
    assert_close(gradient(number, logprob), slope)


# --- Lite PPO, Kimi -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("std_of", "eps", "expected"),
    [
        ("raw", 1e-4, [0.965905, -0.965905, -0.965905, 0.965905] + [0.482953] * 3 + [-1.448858]),
        (
            "centered",
            1e-6,
            [0.999998, -0.999998, -0.999998, 0.999998] + [0.499999] * 3 + [-1.499997],
        ),
    ],
)
def test_lite_ppo_divides_by_the_batch_s_deviation(
    std_of: str, eps: float, expected: list[float]
) -> None:
    got = batch_std_advantage(
        f64([1, 0, 0, 1, 1, 1, 1, 0]),
        torch.tensor([9, 9, 9, 9, 2, 2, 2, 2]),
        std_of=std_of,  # pyright: ignore[reportArgumentType] - one of its choices
        eps=eps,
    )
    assert_close(got, expected)


def test_brevity_is_rewarded_within_a_group() -> None:
    got = length_reward(
        torch.tensor([100, 300, 200, 300]),
        torch.tensor([1, 1, 1, 1]),
        correct=torch.tensor([1, 1, 0, 0]),
    )
    assert_close(got, [0.5, -0.5, 0, -0.5])
    same = length_reward(f64([7, 7]), torch.tensor([1, 1]), correct=torch.tensor([True, False]))
    assert_close(same, [0, 0])
    assert_close(weighted_score(f64([1, 0]), other=f64([0.5, -0.5]), other_weight=0.2), [1.1, -0.1])


def test_mirror_descent_around_the_policy_that_sampled() -> None:
    logprob = f64([-10, -12, -9, -11]).requires_grad_()
    score, ids = f64([1, 1, 0, 0]), torch.tensor([3, 3, 3, 3])
    advantage = group_advantage(score, ids, divide_by_std=False)
    before = f64([-10.5, -12, -8, -11.2])
    loss = mirror_descent_loss(
        sequence_logprob=logprob, behavior_sequence_logprob=before, advantage=advantage, tau=0.1
    ).mean()
    assert_close(loss, 0.266125)
    slope = gradient(loss, logprob)
    assert_close(slope, [-0.1125, -0.125, 0.1, 0.13])
    squared = mirror_descent_loss(
        sequence_logprob=logprob,
        behavior_sequence_logprob=before,
        advantage=advantage,
        tau=0.1,
        form="squared",
    ).mean()
    assert_close(squared, 0.220725)
    torch.testing.assert_close(gradient(squared, logprob), 2 * 0.1 * slope)


def test_the_exact_soft_baseline() -> None:
    ids = torch.tensor([3, 3, 3, 3])
    assert_close(
        log_partition_advantage(f64([1, 1, 0, 0]), ids, tau=0.1),
        [0.06931, 0.06931, -0.93069, -0.93069],
    )


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip", "expected", "slope"),
    [("separate", 0.032703, [[-0.409365, 0]]), ("joint", -0.491238, [[0.0, 0.0]])],
)
def test_p3o_clips(clip: str, expected: float, slope: list[list[float]]) -> None:
    logprob = f64([[-2.9, -4.3]]).requires_grad_()
    loss = p3o_loss(
        sequence_logprob=logprob,
        behavior_sequence_logprob=f64([[-3, -4]]),
        score=f64([[1.5, 0.5]]),
        clip=clip,  # pyright: ignore[reportArgumentType] - one of its choices
    ).sum()
    assert_close(loss, expected)
    assert_close(gradient(loss, logprob), slope)


@pytest.mark.parametrize(
    ("eta", "form", "expected"), [(1.0, "paper", 0.09), (0.5, "paper", 1.44), (0.5, "scaled", 0.36)]
)
def test_rebel(eta: float, form: str, expected: float) -> None:
    loss = rebel_loss(
        sequence_logprob=f64([[-19.5, -25.4]]),
        behavior_sequence_logprob=f64([[-20, -25]]),
        score=f64([[0.8, 0.2]]),
        eta=eta,
        form=form,  # pyright: ignore[reportArgumentType] - one of its choices
    )
    assert_close(loss, [expected])


# --- A-LoL ----------------------------------------------------------------------------------------

LOGPROB, REF_LOGPROB = f64([-4, -6, -5]), f64([-4.5, -5, -5.2])
A_LOL_ADVANTAGE = (f64([0.9, 0.4, 0.2]) - f64([0.5, 0.6, 0.1])).clamp(min=0)


def test_a_lol_and_its_variants() -> None:
    assert_close(A_LOL_ADVANTAGE, [0.4, 0, 0.1])
    loss = a_lol_loss(logprob=LOGPROB, ref_logprob=REF_LOGPROB, advantage=A_LOL_ADVANTAGE)
    assert_close(loss.mean(), 1.082885)
    free = a_lol_loss(
        logprob=LOGPROB, ref_logprob=REF_LOGPROB, advantage=A_LOL_ADVANTAGE, ratio_clip=None
    )
    assert_close(free.mean(), 0.7)
    kl = a_lol_kl_loss(
        sequence_logprob=LOGPROB, ref_sequence_logprob=REF_LOGPROB, advantage=A_LOL_ADVANTAGE
    )
    assert_close(kl.mean(), 0.69)
    assert_close(priority(A_LOL_ADVANTAGE), [0.8, 0, 0.2])


def test_rows_are_taken_as_often_as_their_share_comes_to() -> None:
    assert systematic_rows(f64([0.8, 0, 0.2]), 10).tolist() == [0] * 8 + [2] * 2
    assert systematic_rows(f64([0.5, 0.5]), 3).bincount().tolist() in ([1, 2], [2, 1])
    assert len(systematic_rows(f64([]), 0)) == 0
    assert_close(priority(f64([-1, 0])), [0.5, 0.5])


# --- sums over responses --------------------------------------------------------------------------


def test_what_is_masked_out_is_no_part_of_a_response() -> None:
    column = f64([[1, 2, math.nan], [math.inf, 4, 5]])
    mask = torch.tensor([[True, True, False], [False, True, True]])
    assert_close(sequence_sum(column, mask), [3, 9])
    loss = torch.where(mask, column, 0)
    assert_close(aggregate(loss, mask, mode="seq-mean-token-sum"), 6)
