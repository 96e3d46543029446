"""Advantages: from rewards to one number per sampled token.

Pure functions of columns. Token columns are `[rows, T]` over whole sequences; `mask` says which
positions the policy sampled. Every function returns zeros where the mask is False and never reads
what stands there. Sums run in double precision and results come back in the input's dtype, so they
do not depend on padding or on how rows were grouped.

Those that look backwards through a critic's values are in `returns`, and can be imported from here.
Reductions over masked tokens are in `reductions`, KL terms and the KL-shaped reward in `kl`.
"""

from __future__ import annotations

from typing import Literal

import torch

from ...dataflow.graph.tracer import op
from ..roles.language_tables import PerSample, PerStep, PerToken, PromptId, StepMask, TokenMask
from .groups import Groups, floating, sum_rows
from .reductions import (
    Variance,
    WeightedBy,
    check_token_columns,
    mean_and_variance,
    unknown,
    variance_correction,
    zero_where_masked_out,
)
from .returns import return_to_go

StdScores = Literal["raw", "centered"]
"""Scores whose deviation a batch's advantages are divided by: as they came, or less their group's
mean. They differ where groups have different means."""

KLPlacement = Literal["own_token", "return_to_go"]
"""KL that is subtracted from a token's advantage: its own, or its own and that of all after it."""


@op(scope="batch")
def whiten(
    value: PerStep,
    mask: StepMask,
    *,
    variance: Variance = "unbiased",
    eps: float = 1e-8,
    weighted_by: WeightedBy = "token",
    shift_mean: bool = True,
) -> PerStep:
    """Scale to variance 1 and, unless `shift_mean` is False, shift to mean 0 over the whole batch.

    `(x - mean) / sqrt(variance + eps)`, with statistics over all sampled tokens of the batch.
    Without the shift the mean is added back, as is done for rewards. Published recipes differ in
    the variance, in `eps`, and in what weighs alike.

    Args:
        value: f32[rows, T].
        mask: bool[rows, T].
        variance: "unbiased" divides by n - 1, "biased" by n.
        eps: Added to the variance.
        weighted_by: Whether every token weighs the same, so that long rows count more, or every
            row.
        shift_mean: Whether the mean becomes 0.

    Returns:
        f32[rows, T]; values that are all equal become 0, or stay as they are without the shift.
        All 0 if no row has a score and so no token counts.

    Raises:
        ValueError: If shapes differ, there is one token and no variance of it, or a choice is
            unknown.
    """
    check_token_columns(mask, value=value)
    if not bool(mask.any()):
        return torch.zeros_like(value)
    mean, spread = mean_and_variance(value, mask, variance=variance, weighted_by=weighted_by)
    scale = torch.rsqrt(spread + eps)
    # Only values that are all equal have no deviation, and each of them is the mean.
    whitened = (value.double() - mean) * scale.masked_fill(scale.isinf(), 0.0)
    if not shift_mean:
        whitened = whitened + mean
    return zero_where_masked_out(whitened, mask).to(value)


@op(scope="row")
def broadcast_over_tokens(value: PerSample, mask: TokenMask) -> PerToken:
    """Give every sampled token of a row the row's value.

    Args:
        value: f32[rows].
        mask: bool[rows, T].

    Returns:
        f32[rows, T].

    Raises:
        ValueError: If `value` does not have one entry per row, or the mask is not boolean.
    """
    check_token_columns(mask)
    if value.shape != mask.shape[:1]:
        raise ValueError(
            f"value must have one entry per row of the mask, [{len(mask)}], got {list(value.shape)}"
        )
    return zero_where_masked_out(value[:, None].expand(mask.shape), mask)


@op(scope="group")
def group_advantage(
    score: PerSample,
    prompt_id: PromptId,
    *,
    divide_by_std: bool = True,
    variance: Variance = "unbiased",
    eps: float = 1e-6,
) -> PerSample:
    """Advantage of a sample over its group: `(score - mean) / (std + eps)`.

    Shao et al., "DeepSeekMath", 2024, section 4.1. Without the division: Liu et al.,
    "Understanding R1-Zero-Like Training", 2025, section 3.

    Args:
        score: f32[rows].
        prompt_id: i64[rows], the group of each row; groups may be interleaved and of any size.
        divide_by_std: Whether to divide by the group's standard deviation.
        variance: Estimator of that deviation: "unbiased" divides by n - 1, "biased" by n.
        eps: Added to the standard deviation.

    Returns:
        f32[rows]; exactly 0 for every row of a group whose scores are all equal, and for a row
        without a score; not finite for every row of a group with an infinite score.

    Raises:
        ValueError: If shapes differ, `variance` is unknown, or a group has one row.
    """
    groups = Groups(score, prompt_id)
    centered = groups.centered()
    degrees = groups.sizes - variance_correction(variance)
    advantage = centered
    if divide_by_std:
        std = (sum_rows(centered.square()) / degrees.clamp(min=1)).sqrt()
        # A group of equal scores has centered == 0: keep 0 / (0 + eps) from being 0 / 0.
        advantage = centered / torch.where(std > 0, std + eps, torch.ones_like(std))[:, None]
    return groups.per_row(advantage)


@op(scope="group")
def leave_one_out(score: PerSample, prompt_id: PromptId) -> PerSample:
    """Score minus the mean of the *other* scores of the group.

    Equal to `n / (n - 1)` times the group-centered score. Kool et al., "Buy 4 REINFORCE Samples,
    Get a Baseline for Free!", 2019; Ahmadian et al., "Back to Basics", 2024.

    Args:
        score: f32[rows].
        prompt_id: i64[rows], the group of each row; groups may be interleaved and of any size.

    Returns:
        f32[rows]; 0 for a row without a score, and not finite for every row of a group with an
        infinite one.

    Raises:
        ValueError: If shapes differ or a group has one row.
    """
    groups = Groups(score, prompt_id)
    weight = groups.sizes.double() / (groups.sizes - 1).clamp(min=1)
    return groups.per_row(groups.centered() * weight[:, None])


@op(scope="batch")
def batch_centered(score: PerSample) -> PerSample:
    """Score minus the mean of the whole batch, 0 for a row without a score: f32[rows]."""
    score = floating(score)
    centered = score.double() - score.double().nanmean()
    return torch.where(score.isnan(), 0.0, centered).to(score)


@op(scope="batch")
def batch_std_advantage(
    score: PerSample,
    prompt_id: PromptId,
    *,
    std_of: StdScores = "raw",
    variance: Variance = "unbiased",
    eps: float = 1e-4,
) -> PerSample:
    """Score minus its group's mean, over the standard deviation of the whole *batch* plus `eps`.

    Liu et al., "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", 2025.

    Args:
        score: f32[rows].
        prompt_id: i64[rows], the group of each row; groups may be interleaved and of any size.
        std_of: Whose deviation. Published code differs here.
        variance: Estimator of that deviation: "unbiased" divides by n - 1, "biased" by n.
        eps: Added to the standard deviation.

    Returns:
        f32[rows]; 0 for every row of a group whose scores are all equal, and for a row without a
        score.

    Raises:
        ValueError: If shapes differ, a choice is unknown, or a group has one row.
    """
    if std_of not in ("raw", "centered"):
        raise unknown("std_of", std_of, StdScores)
    score = floating(score)
    groups = Groups(score, prompt_id)
    centered = groups.per_row(groups.centered()).double()
    spread = (score.double() if std_of == "raw" else centered)[~score.isnan()]
    correction = variance_correction(variance)
    std = spread.std(correction=correction) if len(spread) > 1 else spread.new_zeros(())
    return (centered / torch.where(std == 0, 1.0, std + eps)).to(score)


@op(scope="group")
def log_partition_advantage(score: PerSample, prompt_id: PromptId, *, tau: float) -> PerSample:
    """Score minus `tau * log(mean(exp(score / tau)))` of its group: the exact soft baseline.

    It tends to the group's mean as tau grows. Kimi Team, "Kimi k1.5", 2025, section 2.3.2.

    Args:
        score: f32[rows].
        prompt_id: i64[rows], the group of each row; groups may be interleaved and of any size.
        tau: Weight of the KL penalty; positive.

    Returns:
        f32[rows]; 0 for a row without a score.

    Raises:
        ValueError: If `tau` is not positive.
    """
    if not tau > 0:
        raise ValueError(f"tau is {tau}; expected the weight of a KL penalty, above 0")
    score = floating(score)
    groups = Groups(score, prompt_id)
    advantage = score.double() - groups.per_group_row(groups.log_mean_exp(tau))
    return torch.where(score.isnan(), 0.0, advantage).to(score)


@op(scope="group")
def paired_baseline(
    prompt_id: PromptId, *, baseline: PerSample, baseline_prompt_id: PromptId
) -> PerSample:
    """The baseline of each sample's prompt, from rows of another rollout.

    Args:
        prompt_id: i64[rows].
        baseline: f32[others], one number per prompt, such as a greedy response's score.
        baseline_prompt_id: i64[others], the prompts those belong to, each once, in any order.

    Returns:
        f32[rows].

    Raises:
        ValueError: If a prompt has no baseline or several.
    """
    same = prompt_id[:, None] == baseline_prompt_id[None, :]
    found = same.sum(dim=1)
    if bool((found != 1).any()):
        row = int((found != 1).nonzero()[0])
        raise ValueError(
            f"prompt {int(prompt_id[row])} has {int(found[row])} baselines; it needs exactly one: "
            "sample one response per prompt for the baseline, of the same prompts"
        )
    return baseline[same.long().argmax(dim=1)] if len(prompt_id) else baseline[:0]


@op(scope="row")
def remax_advantage(
    score: PerSample,
    mask: TokenMask,
    *,
    greedy_score: PerSample,
    kl: PerToken | None = None,
    kl_coef: float = 0.0,
    kl_placement: KLPlacement = "own_token",
    difference_clip: float | None = None,
    discount: float = 1.0,
) -> PerToken:
    """Advantage of a sample over the greedy response, less the KL to a reference.

    `own_token`: `discount^(L - t) * (score - greedy_score) - kl_coef * kl_t`, for token t of L,
    counted from 0. `return_to_go`: the discounted sum of all rewards from t on, minus the greedy
    score. Li et al., "ReMax", 2023, algorithm 1.

    Args:
        score: f32[rows].
        mask: bool[rows, T].
        greedy_score: f32[rows], of the greedy response to the same prompt; see `paired_baseline`.
        kl: f32[rows, T] of `kl_estimate`; none by default.
        kl_coef: Reward taken per nat.
        kl_placement: Which KL is subtracted from a token's advantage.
        difference_clip: Bound on the size of `score - greedy_score`, for "own_token".
        discount: gamma, per token.

    Returns:
        f32[rows, T]; 0 where one of the two responses has no score.

    Raises:
        ValueError: If shapes differ or `kl_placement` is unknown.
    """
    score, greedy_score = floating(score), floating(greedy_score)
    mask = mask & ~(score - greedy_score).isnan()[:, None]
    penalty = torch.zeros(mask.shape, dtype=score.dtype) if kl is None else -kl_coef * kl.detach()
    penalty = penalty.to(score)
    check_token_columns(mask, kl=penalty)
    to_end = mask.long().flip(1).cumsum(dim=1).flip(1)  # tokens from t to the last, both counted
    if kl_placement == "own_token":
        difference = score - greedy_score
        if difference_clip is not None:
            difference = difference.clamp(-difference_clip, difference_clip)
        return zero_where_masked_out(difference[:, None] * discount**to_end + penalty, mask)
    if kl_placement != "return_to_go":
        raise unknown("kl_placement", kl_placement, KLPlacement)
    discounted = score[:, None] * discount ** (to_end - 1).clamp(min=0)
    kl_to_go = return_to_go(penalty, mask, discount=discount)
    return zero_where_masked_out(discounted + kl_to_go - greedy_score[:, None], mask)
