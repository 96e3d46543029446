"""Advantages whose size does not depend on the scale of rewards, as an op."""

from __future__ import annotations

from ...dataflow.graph.tracer import op
from ..roles.language import PerStep, StepMask
from .reductions import check_token_columns
from .returns import GaeTargets
from .value_transforms import percentile_scale, scaled_advantage

__all__ = ["percentile_scaled"]


@op(scope="batch")
def percentile_scaled(mask: StepMask, *, advantage: PerStep, value_target: PerStep) -> GaeTargets:
    """Advantages over `max(1, P95 - P5)` of the value targets of the whole batch.

    Hafner et al., "Mastering Diverse Domains through World Models", 2023; there the distance is a
    running mean over updates, here it is the batch's own.

    Args:
        mask: bool[rows, T].
        advantage: f32[rows, T].
        value_target: f32[rows, T], the returns; they stay as they are.

    Returns:
        Advantages and value targets, f32[rows, T] each.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, advantage=advantage, value_target=value_target)
    returns = value_target[mask]
    scale = percentile_scale(returns, decay=0.0) if len(returns) else 0.0
    return GaeTargets(advantage=scaled_advantage(advantage, scale), value_target=value_target)
