"""The formulas of losses, one number per token or per pair.

Pure functions of tensors of one shape, which is up to the caller; they know neither masks nor
means. `losses` turns them into what a worker trains with.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "bradley_terry_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "cross_entropy",
    "probability_ratio",
]


def probability_ratio(
    *, logprob: Tensor, behavior_logprob: Tensor, log_ratio_clamp: float | None = 20.0
) -> Tensor:
    """`exp(logprob - behavior_logprob)`, the difference clamped to keep the exponential finite.

    Args:
        logprob: f32[...], differentiable.
        behavior_logprob: f32[...].
        log_ratio_clamp: Bound on the difference; no gradient passes where it bites. None: no bound.
    """
    log_ratio = logprob - behavior_logprob
    if log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    return log_ratio.exp()


def clipped_policy_loss(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
) -> Tensor:
    """Clipped surrogate per token: `max(-A ratio, -A clip(ratio, 1 - eps_low, 1 + eps_high))`.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7. With `dual_clip`,
    tokens of negative advantage are bounded by `-dual_clip * A` (Ye et al., "Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning", 2020, equation 5).

    Args:
        logprob: f32[...], differentiable.
        behavior_logprob: f32[...], of the same shape: under the policy that sampled the tokens.
        advantage: f32[...], of the same shape.
        eps_low: How far the ratio may fall below 1.
        eps_high: How far it may rise above 1.
        dual_clip: Above 1, or None for no such bound.
        log_ratio_clamp: See `probability_ratio`.

    Returns:
        f32[...], to be minimised.
    """
    ratio = probability_ratio(
        logprob=logprob, behavior_logprob=behavior_logprob, log_ratio_clamp=log_ratio_clamp
    )
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - eps_low, 1 + eps_high))
    if dual_clip is not None:
        bounded = torch.minimum(loss, -dual_clip * advantage)
        loss = torch.where(advantage < 0, bounded, loss)
    return loss


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
        f32[...], to be minimised.
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
        f32[pairs], to be minimised.
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
