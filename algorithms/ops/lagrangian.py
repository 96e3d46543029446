"""Lagrange multipliers: how one follows a constraint, and how it mixes reward and cost.

Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback", 2023, section 3.3.
"""

from __future__ import annotations

import math

from torch import Tensor


def next_log_multiplier(
    log_multiplier: float,
    *,
    mean_cost: float,
    threshold: float = 0.0,
    lr: float = 0.1,
    highest: float = 5.0,
) -> float:
    """The logarithm of a multiplier after one step up the constraint's excess.

    `min(log m + lr * m * (mean_cost - threshold), log highest)`: a gradient step on
    `-(mean_cost - threshold) * exp(log m)`.

    Args:
        log_multiplier: log m.
        mean_cost: Mean cost of recent responses, before any KL term.
        threshold: Mean cost that is allowed.
        lr: Step size.
        highest: Bound on the multiplier.

    Raises:
        ValueError: If `highest` is not positive.
    """
    if highest <= 0:
        raise ValueError(f"highest is {highest}; a multiplier is positive")
    step = lr * math.exp(log_multiplier) * (mean_cost - threshold)
    return min(log_multiplier + step, math.log(highest))


def lagrangian_advantage(
    reward_advantage: Tensor, cost_advantage: Tensor, multiplier: Tensor | float
) -> Tensor:
    """`(A_r - m A_c) / (1 + m)`: reward and cost as one advantage.

    Args:
        reward_advantage: f32[...].
        cost_advantage: f32[...], of the same shape.
        multiplier: m, one number or a tensor that broadcasts.
    """
    return (reward_advantage - multiplier * cost_advantage) / (1 + multiplier)
