"""Roles that hold a number and adapt it while training goes on: a KL coefficient, a multiplier.

What the number has come to is state that training changes, as weights are: a role, with checkpoints
and a version per step.

The coefficient of the KL to a reference follows the KL: raised above a target, lowered below.
Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2. Metrics:

- `kl_coef`: the coefficient after this step.
- `observed_kl`: mean over rows of the KL in nats, summed over each response.

A Lagrange multiplier is the price of breaking a constraint on the mean cost of responses, raised
while it is broken. Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback", 2023,
section 3.3. Metrics:

- `multiplier`: the price per unit of cost after this step.
- `recent_cost`: mean cost of the responses in the window.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from annotated_types import Gt, Lt

from ..dataflow.graph.role import Role, call
from ..dataflow.options import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    option_class,
)
from .ops.kl import adaptive_kl_coef
from .roles.language_tables import PerSample, TrainMetrics


@option_class
class KLTarget:
    """Target of the KL, and the rate at which the coefficient follows it."""

    target_kl: PositiveFloat = 6.0
    """Nats per response, summed over its tokens; a mean per token needs another number."""
    horizon: PositiveInt = 10_000
    """Responses over which a full correction is spread; a step of more makes one."""
    max_change: Annotated[FiniteFloat, Gt(0), Lt(1)] = 0.2
    """Bound on the relative error that is corrected for; below 1."""

    def next_coef(self, kl_coef: float, *, observed_kl: float, num_sequences: int) -> float:
        """The coefficient after a step; see `adaptive_kl_coef`."""
        return adaptive_kl_coef(
            kl_coef,
            observed_kl=observed_kl,
            target_kl=self.target_kl,
            num_sequences=num_sequences,
            horizon=self.horizon,
            max_change=self.max_change,
        )


class KLController(Role):
    """The coefficient, of which only what training has made of it is kept: a factor."""

    default_worker: ClassVar[str | None] = "penstock.workers.training.controllers:KLControllerSpec"

    @call("train")
    def follow(self, kl: PerSample, first: float, target: KLTarget) -> TrainMetrics:
        """Take in the KL of some responses, each summed over its tokens, and move once."""
        raise NotImplementedError

    @call("forward")
    def coefficient(self, kl: PerSample, first: float) -> PerSample:
        """The coefficient, once per row of `kl`; `first` is that of the first step."""
        raise NotImplementedError


@option_class
class Ascent:
    """Update rule of a multiplier."""

    lr: NonNegativeFloat = 0.1
    """Step size, of the multiplier's logarithm."""
    threshold: FiniteFloat = 0.0
    """Mean cost that is allowed."""
    highest: PositiveFloat = 5.0
    """Bound on the multiplier."""
    window: PositiveInt = 128
    """Responses, the most recent ones, over which the cost is averaged."""
    delay_steps: NonNegativeInt = 0
    """Steps before the multiplier first moves."""

    def next_log(self, log_multiplier: float, *, mean_cost: float) -> float:
        """The logarithm of a multiplier m after one step up the constraint's excess.

        `min(log m + lr * m * (mean_cost - threshold), log highest)`: a gradient step on
        `-(mean_cost - threshold) * exp(log m)`.

        Args:
            log_multiplier: log m.
            mean_cost: Mean cost of recent responses, before any KL term.
        """
        step = self.lr * math.exp(log_multiplier) * (mean_cost - self.threshold)
        return min(log_multiplier + step, math.log(self.highest))


class Multiplier(Role):
    """A price per unit of cost, and the recent costs it is set by."""

    default_worker: ClassVar[str | None] = "penstock.workers.training.controllers:MultiplierSpec"

    @call("train")
    def update(self, cost: PerSample, ascent: Ascent) -> TrainMetrics:
        """Take in the costs of some responses and move once."""
        raise NotImplementedError

    @call("forward")
    def price(self, cost: PerSample) -> PerSample:
        """The multiplier, once per row of `cost`."""
        raise NotImplementedError
