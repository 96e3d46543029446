"""Advantages: from rewards to one number per sampled token.

Pure functions of columns. Token columns are `[rows, T]` over whole sequences; `mask` says which
positions the policy sampled. Every function returns zeros where the mask is False and never reads
what stands there. Sums run in double precision and results come back in the input's dtype, so they
do not depend on padding or on how rows were grouped.

Reductions over masked tokens are in `reductions`, KL terms and the KL-shaped reward in `kl`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..dataflow.record import op
from .reductions import (
    Variance,
    check_token_columns,
    masked_mean,
    masked_variance,
    variance_correction,
    zero_where_masked_out,
)
from .roles import PerSample, PerToken, PromptId, TokenMask

__all__ = [
    "GaeTargets",
    "Masking",
    "SingletonGroup",
    "broadcast_over_tokens",
    "gae",
    "group_advantage",
    "leave_one_out",
    "return_to_go",
    "whiten",
]

Masking = Literal["transparent", "zeroed"]
"""What a masked-out position between sampled tokens does to a backward recursion.

`transparent`: nothing, as if the position were deleted, so no discount is applied across it.
`zeroed`: it counts as a step with reward 0 and value 0.
"""

SingletonGroup = Literal["error", "score", "zero"]
"""Advantage of a sample alone in its group: refuse, the score itself, or 0."""


@op(scope="batch")
def whiten(
    value: PerToken,
    mask: TokenMask,
    *,
    variance: Variance = "unbiased",
    eps: float = 1e-8,
    shift_mean: bool = True,
) -> PerToken:
    """Scale to variance 1 and, unless `shift_mean` is False, shift to mean 0 over the whole batch.

    `(x - mean) / sqrt(variance + eps)`, with statistics over all sampled tokens of the batch: long
    rows weigh more. Without the shift the mean is added back, as is done for rewards.

    Args:
        value: f32[rows, T].
        mask: bool[rows, T].
        variance: "unbiased" divides by n - 1, "biased" by n. Published recipes differ here.
        eps: Added to the variance.
        shift_mean: Whether the mean becomes 0.

    Returns:
        f32[rows, T].

    Raises:
        ValueError: If shapes differ, there are too few tokens for a variance, or `variance` is
            unknown.
    """
    mean = masked_mean(value, mask)
    scale = torch.rsqrt(masked_variance(value, mask, variance=variance) + eps)
    whitened = (value.double() - mean) * scale
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
        ValueError: If `value` does not have one entry per row.
    """
    if value.shape != mask.shape[:1]:
        raise ValueError(
            f"value must have one entry per row of the mask, [{len(mask)}], got {list(value.shape)}"
        )
    return zero_where_masked_out(value[:, None].expand(mask.shape), mask)


@dataclass(frozen=True, kw_only=True)
class GaeTargets:
    """What generalised advantage estimation gives the two losses."""

    advantage: PerToken
    """Not whitened."""
    value_target: PerToken
    """Advantage plus value: what the critic should have said."""


@op(scope="row")
def gae(
    mask: TokenMask,
    *,
    reward: PerToken,
    value: PerToken,
    bootstrap_value: PerSample | None = None,
    discount: float = 1.0,
    lam: float = 0.95,
    masking: Masking = "transparent",
) -> GaeTargets:
    """Generalised advantage estimation over sampled tokens.

    `delta_t = reward_t + discount * value_tp1 - value_t` and
    `advantage_t = delta_t + discount * lam * advantage_tp1`, right to left; `value_target_t =
    advantage_t + value_t`. Schulman et al., "High-Dimensional Continuous Control Using Generalized
    Advantage Estimation", 2015, equations 11 to 16.

    Args:
        mask: bool[rows, T].
        reward: f32[rows, T].
        value: f32[rows, T], the critic at the state before each token.
        bootstrap_value: f32[rows], value of the state after a row's last sampled token: 0 where the
            response is finished, the critic's where it was cut off. Default: 0 everywhere.
        discount: gamma, applied per sampled token.
        lam: lambda; 0 trusts the critic fully, 1 not at all.
        masking: What positions between sampled tokens do; see `Masking`.

    Returns:
        Advantages and value targets, f32[rows, T] each.

    Raises:
        ValueError: If shapes differ or `masking` is unknown.
    """
    check_token_columns(mask, reward=reward, value=value)
    if bootstrap_value is not None and bootstrap_value.shape != mask.shape[:1]:
        raise ValueError(
            f"bootstrap_value must have one entry per row of the mask, [{len(mask)}], "
            f"got {list(bootstrap_value.shape)}"
        )
    reward_rt = zero_where_masked_out(reward, mask).double()
    value_rt = zero_where_masked_out(value, mask).double()
    last_value = (
        torch.zeros_like(value_rt[:, :1]).squeeze(1)
        if bootstrap_value is None
        else bootstrap_value.double()
    )
    advantage = _gae_recursion(
        _live_steps(mask, masking), reward_rt, value_rt, last_value, discount, lam
    )
    return GaeTargets(
        advantage=zero_where_masked_out(advantage, mask).to(value),
        value_target=zero_where_masked_out(advantage + value_rt, mask).to(value),
    )


def _live_steps(mask: Tensor, masking: Masking) -> Tensor:
    """bool[rows, T]: the positions that are steps of the recursion."""
    if masking == "transparent":
        return mask
    if masking == "zeroed":
        # Everything up to the last sampled token; the padding after it is no step either way.
        return mask.flip(1).cumsum(dim=1).flip(1) > 0
    raise ValueError(f"masking {masking!r} is unknown; choose 'transparent' or 'zeroed'")


def _gae_recursion(
    live: Tensor,
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    discount: float,
    lam: float,
) -> Tensor:
    """f64[rows, T]; a position that is not live leaves the running numbers untouched."""
    advantage = torch.zeros_like(reward)
    live_columns = live.any(dim=0).nonzero().flatten().tolist()
    advantage_tp1, value_tp1 = torch.zeros_like(last_value), last_value
    for t in reversed(live_columns):
        live_t, value_t = live[:, t], value[:, t]
        delta_t = reward[:, t] + discount * value_tp1 - value_t
        advantage_t = delta_t + discount * lam * advantage_tp1
        advantage_tp1 = torch.where(live_t, advantage_t, advantage_tp1)
        value_tp1 = torch.where(live_t, value_t, value_tp1)
        advantage[:, t] = advantage_tp1
    return advantage


@op(scope="row")
def return_to_go(
    reward: PerToken,
    mask: TokenMask,
    *,
    discount: float = 1.0,
    masking: Masking = "transparent",
) -> PerToken:
    """Discounted sum of the rewards from each sampled token to the end of its row.

    Args:
        reward: f32[rows, T].
        mask: bool[rows, T].
        discount: gamma, applied per step.
        masking: What positions between sampled tokens do; see `Masking`.

    Returns:
        f32[rows, T].

    Raises:
        ValueError: If shapes differ or `masking` is unknown.
    """
    targets = gae(
        mask,
        reward=reward,
        value=torch.zeros_like(reward),
        discount=discount,
        lam=1.0,
        masking=masking,
    )
    return targets.advantage


@op(scope="group")
def group_advantage(
    score: PerSample,
    prompt_id: PromptId,
    *,
    divide_by_std: bool = True,
    variance: Variance = "unbiased",
    eps: float = 1e-6,
    singleton_group: SingletonGroup = "error",
) -> PerSample:
    """How much better a sample is than its group: `(score - mean) / (std + eps)`.

    Shao et al., "DeepSeekMath", 2024, section 4.1. Without the division: Liu et al.,
    "Understanding R1-Zero-Like Training", 2025, section 3.

    Args:
        score: f32[rows].
        prompt_id: i64[rows], the group of each row; groups may be interleaved and of any size.
        divide_by_std: Whether to divide by the group's standard deviation.
        variance: Of that deviation: "unbiased" divides by n - 1, "biased" by n.
        eps: Added to the standard deviation.
        singleton_group: What a sample alone in its group gets.

    Returns:
        f32[rows]; exactly 0 for every row of a group whose scores are all equal, and not finite for
        every row of a group with a score that is not finite.

    Raises:
        ValueError: If shapes differ, a choice is unknown, or a group has one row and
            `singleton_group` is "error".
    """
    groups = _Groups(score, prompt_id)
    centred = groups.centred()
    degrees = groups.sizes - variance_correction(variance)
    advantage = centred
    if divide_by_std:
        std = (_sum_rows(centred.square()) / degrees.clamp(min=1)).sqrt()
        # A group of equal scores has centred == 0: keep 0 / (0 + eps) from being 0 / 0.
        advantage = centred / torch.where(std > 0, std + eps, torch.ones_like(std))[:, None]
    return groups.per_row(advantage, singleton_group)


@op(scope="group")
def leave_one_out(
    score: PerSample, prompt_id: PromptId, *, singleton_group: SingletonGroup = "error"
) -> PerSample:
    """Score minus the mean of the *other* scores of the group.

    Equal to `n / (n - 1)` times the group-centred score. Kool et al., "Buy 4 REINFORCE Samples, Get
    a Baseline for Free!", 2019; Ahmadian et al., "Back to Basics", 2024.

    Args:
        score: f32[rows].
        prompt_id: i64[rows], the group of each row; groups may be interleaved and of any size.
        singleton_group: What a sample alone in its group gets.

    Returns:
        f32[rows]; not finite for every row of a group with a score that is not finite.

    Raises:
        ValueError: If shapes differ, a choice is unknown, or a group has one row and
            `singleton_group` is "error".
    """
    groups = _Groups(score, prompt_id)
    weight = groups.sizes / (groups.sizes - 1).clamp(min=1)
    return groups.per_row(groups.centred() * weight[:, None], singleton_group)


def _sum_rows(table: Tensor) -> Tensor:
    """Sums along rows, left to right.

    `sum` picks its order by the table's shape, so a group's bits would depend on which other groups
    are computed with it, and atomic adds on the device's timing.
    """
    return table.cumsum(dim=1)[:, -1]


class _Groups:
    """Scores laid out as `[groups, widest group]`, whatever order the rows are in."""

    def __init__(self, score: Tensor, prompt_id: Tensor) -> None:
        if score.shape != prompt_id.shape or score.ndim != 1:
            raise ValueError(
                "score and prompt_id must both be [rows], got "
                f"{list(score.shape)} and {list(prompt_id.shape)}"
            )
        self._score = score
        self._prompt_id = prompt_id
        self._group = torch.unique(prompt_id, return_inverse=True)[1]
        self.sizes = torch.bincount(self._group)
        order = torch.argsort(self._group, stable=True)
        starts = (self.sizes.cumsum(0) - self.sizes)[self._group[order]]
        rank = torch.arange(len(score), device=score.device) - starts
        self._place = torch.empty_like(self._group).scatter_(0, order, rank)
        widest = int(self.sizes.max()) if len(score) else 1
        table = torch.zeros(len(self.sizes), widest, dtype=torch.float64, device=score.device)
        self._scores = table.index_put((self._group, self._place), score.double())
        self._present = torch.arange(widest, device=score.device) < self.sizes[:, None]

    def centred(self) -> Tensor:
        """f64[groups, widest]: scores minus their group's mean; 0 where there is no row.

        A score that is not finite leaves no finite number in its group.
        """
        mean = (_sum_rows(self._scores) / self.sizes)[:, None]
        # A rounded mean of equal scores may miss them by one bit, which a division by the standard
        # deviation would blow up to 1. The difference of scores that are not finite is nan, not 0,
        # so those go on to the optimizer, which refuses them.
        highest = self._scores.masked_fill(~self._present, -torch.inf).amax(dim=1, keepdim=True)
        lowest = self._scores.masked_fill(~self._present, torch.inf).amin(dim=1, keepdim=True)
        counts = self._present & (highest - lowest != 0)
        return torch.where(counts, self._scores - mean, torch.zeros_like(mean))

    def per_row(self, table: Tensor, singleton_group: SingletonGroup) -> Tensor:
        """Back to f32[rows], with the rule for groups of one row applied."""
        result = table[self._group, self._place].to(self._score)
        alone = self.sizes[self._group] == 1
        if singleton_group == "score":
            return torch.where(alone, self._score, result)
        if singleton_group == "zero":
            return result  # a score minus itself is 0 already
        if singleton_group != "error":
            raise ValueError(
                f"singleton_group {singleton_group!r} is unknown; choose 'error', 'score' or 'zero'"
            )
        if bool(alone.any()):
            raise ValueError(
                f"group {int(self._prompt_id[alone][0])} has a single sample, and a comparison "
                "within a group needs at least 2; set Sampling.num_samples to 2 or more, or say "
                "what such a row gets with singleton_group='zero' or 'score'"
            )
        return result
