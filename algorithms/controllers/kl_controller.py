"""A coefficient of the KL to a reference that follows the KL: raised above a target, lowered below.

Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2. What it has
come to is state that training changes, as weights are: a role, with checkpoints and a version per
step. Its metrics:

- `kl_coef`: the coefficient after this step.
- `observed_kl`: mean over rows of the KL in nats, summed over each response.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Gt, Lt

from ...dataflow.graph.role import Role, call
from ...dataflow.options import FiniteFloat, PositiveFloat, PositiveInt, option_class
from ..ops.kl import adaptive_kl_coef
from ..roles.language import PerSample, TrainMetrics


@option_class
class KLTarget:
    """Where the KL should settle, and how fast the coefficient follows it."""

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

    default_worker: ClassVar[str | None] = (
        "penstock.workers.training.kl_controller:KLControllerSpec"
    )

    @call("train")
    def follow(self, kl: PerSample, first: float, target: KLTarget) -> TrainMetrics:
        """Take in the KL of some responses, each summed over its tokens, and move once."""
        raise NotImplementedError

    @call("forward")
    def coefficient(self, kl: PerSample, first: float) -> PerSample:
        """The coefficient, once per row of `kl`; `first` is that of the first step."""
        raise NotImplementedError
