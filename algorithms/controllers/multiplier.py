"""A Lagrange multiplier: the price of breaking a constraint, raised while it is broken.

Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback", 2023, section 3.3. The
constraint is on the mean cost of responses. The multiplier is state that training changes, as
weights are: a role, with checkpoints and a version per step. Its metrics:

- `multiplier`: the price per unit of cost after this step.
- `recent_cost`: mean cost of the responses in the window.
"""

from __future__ import annotations

from typing import ClassVar

from ...dataflow.graph.role import Role, call
from ...dataflow.options import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    option_class,
)
from ..ops.lagrangian import next_log_multiplier
from ..roles.language import PerSample, TrainMetrics


@option_class
class Ascent:
    """How a multiplier follows the costs."""

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
        """The multiplier's logarithm after a step; see `next_log_multiplier`."""
        return next_log_multiplier(
            log_multiplier,
            mean_cost=mean_cost,
            threshold=self.threshold,
            lr=self.lr,
            highest=self.highest,
        )


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
