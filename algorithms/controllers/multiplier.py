"""A Lagrange multiplier: the price of breaking a constraint, raised while it is broken.

Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback", 2023, section 3.3. The
constraint is on the mean cost of responses. The multiplier is state that training changes, as
weights are: a role, with checkpoints and a version per step. Its metrics:

- `multiplier`: the price per unit of cost after this step.
- `recent_cost`: mean cost of the responses in the window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...dataflow.graph.role import Role, call
from ...dataflow.graph.tracer import op
from ...dataflow.option_checks import check_range
from ..ops.reductions import check_token_columns
from ..roles.language import PerSample, PerToken, TokenMask, TrainMetrics

__all__ = ["Ascent", "Multiplier", "lagrangian_advantage", "mixed_advantage", "next_log_multiplier"]


@dataclass(frozen=True, kw_only=True)
class Ascent:
    """How a multiplier follows the costs."""

    lr: float = 0.1
    """Step size, of the multiplier's logarithm."""
    threshold: float = 0.0
    """Mean cost that is allowed."""
    highest: float = 5.0
    """Bound on the multiplier."""
    window: int = 128
    """Responses, the most recent ones, over which the cost is averaged."""
    delay_steps: int = 0
    """Steps before the multiplier first moves."""

    def __post_init__(self) -> None:
        check_range(self, "lr", "delay_steps", at_least=0)
        check_range(self, "highest", above=0)
        check_range(self, "window", at_least=1)
        check_range(self, "threshold")


class Multiplier(Role):
    """A price per unit of cost, and the recent costs it is set by."""

    default_worker: ClassVar[str | None] = "penstock.workers.training.multiplier:MultiplierSpec"

    @call("train")
    def update(self, cost: PerSample, ascent: Ascent) -> TrainMetrics:
        """Take in the costs of some responses and move once."""
        raise NotImplementedError

    @call("forward")
    def price(self, cost: PerSample) -> PerSample:
        """The multiplier, once per row of `cost`."""
        raise NotImplementedError


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
        mean_cost: Of recent responses, before any KL term.
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


@op(scope="row")
def mixed_advantage(
    mask: TokenMask, *, reward: PerToken, cost: PerToken, multiplier: PerSample
) -> PerToken:
    """`lagrangian_advantage` of token columns and the multiplier of each row: f32[rows, T]."""
    check_token_columns(mask, reward=reward, cost=cost)
    return lagrangian_advantage(reward, cost, multiplier[:, None])
