"""The formulas of losses, one number per token or per pair.

Pure functions of tensors of one shape, which is up to the caller; they know neither masks nor
means. `losses` turns them into what a worker trains with.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

RatioLevel = Literal["token", "sequence_mean", "sequence_product", "sequence_mean_token"]
"""Of what the probability ratio is taken.

`token`: of each token. `sequence_mean`: of the whole response, the geometric mean over its tokens
(GSPO). `sequence_product`: of the whole response, the product over its tokens (RLOO).
`sequence_mean_token`: the value of `sequence_mean`, with each token's own gradient (GSPO-token).
"""


def probability_ratio(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    log_ratio_clamp: float | None = 20.0,
    level: RatioLevel = "token",
    mask: Tensor | None = None,
) -> Tensor:
    """`exp(logprob - behavior_logprob)`, the difference clamped to keep the exponential finite.

    Args:
        logprob: f32[...], differentiable; f32[rows, T] unless the level is "token".
        behavior_logprob: f32[...], of the same shape.
        log_ratio_clamp: Bound on the difference; no gradient passes where it bites. None: no bound.
        level: What the ratio is taken of; see `RatioLevel`. A row's tokens get the row's ratio.
        mask: bool[rows, T], needed unless the level is "token"; both columns must be 0 where it is
            False.

    Returns:
        f32[...], of the shape of `logprob`.

    Raises:
        ValueError: If the level is unknown, or needs a mask and gets none.
    """
    log_ratio = logprob - behavior_logprob
    if level != "token":
        log_ratio = _sequence_log_ratio(logprob, log_ratio, level, mask)
    if log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    return log_ratio.exp()


def _sequence_log_ratio(
    logprob: Tensor, log_ratio: Tensor, level: RatioLevel, mask: Tensor | None
) -> Tensor:
    if level not in ("sequence_mean", "sequence_product", "sequence_mean_token"):
        raise ValueError(
            f"ratio level {level!r} is unknown; choose 'token', 'sequence_mean', "
            "'sequence_product' or 'sequence_mean_token'"
        )
    if mask is None:
        raise ValueError(f"ratio level {level!r} is about whole responses; pass mask=bool[rows, T]")
    whole = torch.where(mask, log_ratio, 0.0).sum(dim=1, keepdim=True)
    if level != "sequence_product":
        whole = whole / mask.sum(dim=1, keepdim=True).clamp(min=1)
    if level == "sequence_mean_token":
        return whole.detach() + (logprob - logprob.detach())  # plus a zero: the value is exact
    return whole.expand_as(log_ratio)


def clipped_policy_loss(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    ratio_level: RatioLevel = "token",
    mask: Tensor | None = None,
) -> Tensor:
    """Clipped surrogate per token: `max(-A ratio, -A clip(ratio, 1 - eps_low, 1 + eps_high))`.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7. With `dual_clip`,
    tokens of negative advantage are bounded by `-dual_clip * A` (Ye et al., "Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning", 2020, equation 5). The ratio of whole
    responses: Zheng et al., "Group Sequence Policy Optimization", 2025, equations 5 and 7.

    Args:
        logprob: f32[...], differentiable.
        behavior_logprob: f32[...], of the same shape: under the policy that sampled the tokens.
        advantage: f32[...], of the same shape.
        eps_low: How far the ratio may fall below 1.
        eps_high: How far it may rise above 1.
        dual_clip: Above 1, or None for no such bound.
        log_ratio_clamp: See `probability_ratio`.
        ratio_level: See `RatioLevel`.
        mask: See `probability_ratio`.

    Returns:
        f32[...], to be minimized. With a ratio of whole responses each token has its row's loss, so
        that "seq-mean-token-mean" is the mean over responses.
    """
    ratio = probability_ratio(
        logprob=logprob,
        behavior_logprob=behavior_logprob,
        log_ratio_clamp=log_ratio_clamp,
        level=ratio_level,
        mask=mask,
    )
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - eps_low, 1 + eps_high))
    if dual_clip is not None:
        bounded = torch.minimum(loss, -dual_clip * advantage)
        loss = torch.where(advantage < 0, bounded, loss)
    return loss


def capped_weight_loss(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    weight_cap: float = 5.0,
    weight_floor: float = 0.0,
    log_ratio_clamp: float | None = 20.0,
) -> Tensor:
    """`-weight A logprob` per token; the weight is the ratio between bounds, without gradient.

    Unlike a clipped surrogate it gives every token a gradient. MiniMax, "MiniMax-M1", 2025,
    equation 4 (CISPO).

    Args:
        logprob: f32[...], differentiable.
        behavior_logprob: f32[...], of the same shape: under the policy that sampled the tokens.
        advantage: f32[...], of the same shape.
        weight_cap: Largest weight, as a ratio: code that speaks of `eps_high` means
            `1 + eps_high`, other code the cap itself.
        weight_floor: Smallest weight.
        log_ratio_clamp: See `probability_ratio`.

    Returns:
        f32[...], to be minimized.
    """
    ratio = probability_ratio(
        logprob=logprob.detach(), behavior_logprob=behavior_logprob, log_ratio_clamp=log_ratio_clamp
    )
    return -ratio.clamp(weight_floor, weight_cap) * advantage * logprob


def reinforce_loss(*, logprob: Tensor, advantage: Tensor) -> Tensor:
    """`-A logprob` per token, of tokens that the present policy sampled.

    Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
    Learning", 1992.

    Args:
        logprob: f32[...], differentiable.
        advantage: f32[...], of the same shape; taken as it is, no gradient passes.

    Returns:
        f32[...], to be minimized.
    """
    return -advantage.detach() * logprob


def clipped_value_loss(
    *, value: Tensor, old_value: Tensor, value_target: Tensor, eps: float | None = 0.2
) -> Tensor:
    """Half the squared error per token, the larger of plain and clipped: `0.5 max(., .)`.

    The clipped prediction stays within `eps` of `old_value`. Form as in Huang et al., "The N+
    Implementation Details of RLHF with PPO", 2024.

    Args:
        value: f32[...], differentiable.
        old_value: f32[...], the critic's prediction before the update.
        value_target: f32[...].
        eps: None for the plain squared error.

    Returns:
        f32[...], to be minimized.
    """
    error = (value - value_target).square()
    if eps is not None:
        clipped = old_value + (value - old_value).clamp(-eps, eps)
        error = torch.maximum(error, (clipped - value_target).square())
    return 0.5 * error


def bradley_terry_loss(
    *,
    chosen_score: Tensor,
    rejected_score: Tensor,
    margin: Tensor | float = 0.0,
    centering_coef: float = 0.0,
) -> Tensor:
    """`-log sigmoid(chosen - rejected - margin) + centering_coef * (chosen + rejected)^2` per pair.

    Bradley and Terry, 1952, as used by Ouyang et al., "Training Language Models to Follow
    Instructions with Human Feedback", 2022, equation 1; the centering term keeps scores around 0
    (Eisenstein et al., "Helping or Herding?", 2023).

    Args:
        chosen_score: f32[pairs], differentiable.
        rejected_score: f32[pairs], differentiable.
        margin: By how much the chosen one should win, one number or f32[pairs].
        centering_coef: 0.01 is usual; 0 leaves the level of scores free.

    Returns:
        f32[pairs], to be minimized.
    """
    loss = -F.logsigmoid(chosen_score - rejected_score - margin)
    if centering_coef:
        loss = loss + centering_coef * (chosen_score + rejected_score).square()
    return loss


def cross_entropy(logprob: Tensor) -> Tensor:
    """Negative log-likelihood per token of the tokens to imitate: `-logprob`.

    Args:
        logprob: f32[...], differentiable.
    """
    return -logprob
