"""CISPO: group advantages, and a bounded weight in place of a clip, so that no token is left out.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025. Only
the upper bound is meant to act. `loss.weight_cap` is the bound on the ratio itself; code that has
`eps_high` for it means `1 + eps_high`.
"""

from __future__ import annotations

from ..dataflow.options import option_class
from .grpo import GRPO, grpo_step
from .losses.tokens import CappedWeightLoss
from .roles import Policy, Prompts, Reward, TrainMetrics


@option_class
class CISPO(GRPO):
    """Options of CISPO."""

    loss: CappedWeightLoss = CappedWeightLoss(report_entropy=True)  # pyright: ignore[reportIncompatibleVariableOverride] - both are losses of policy batches
    """The bounds of the weight; the mean is over tokens."""


def cispo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: CISPO) -> TrainMetrics:
    """`grpo_step`, whose loss has a bounded weight in place of the clip."""
    return grpo_step(prompts, actor, reward, cfg)
