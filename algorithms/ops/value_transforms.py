"""Critics and advantages that do not depend on the scale of rewards.

Hafner et al., "Mastering Diverse Domains through World Models" (DreamerV3), 2023; on PPO: Sullivan
et al., "Reward Scale Robustness for Proximal Policy Optimization via DreamerV3 Tricks", 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language_tables import PerStep, StepMask
from .reductions import check_token_columns, zero_where_masked_out
from .returns import GaeTargets


def symlog(x: Tensor) -> Tensor:
    """`sign(x) ln(1 + |x|)`: keeps signs, squeezes large numbers."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`: `sign(x) (exp(|x|) - 1)`."""
    return x.sign() * x.abs().expm1()


def value_bins(count: int = 255, bound: float = 20.0) -> Tensor:
    """f32[count]: evenly spaced bins of a critic, from `-bound` to `bound` in symlog space."""
    return torch.linspace(-bound, bound, count)


def two_hot(x: Tensor, bins: Tensor) -> Tensor:
    """Weights on the two bins next to each number, whose mean is the number.

    Args:
        x: f32[...]; what lies outside the bins counts as the nearest one.
        bins: f32[bins], ascending.

    Returns:
        f32[..., bins], adding up to 1.

    Raises:
        ValueError: If there are fewer than two bins.
    """
    if len(bins) < 2:
        raise ValueError(f"expected at least 2 bins, got {len(bins)}")
    inside = x.clamp(bins[0], bins[-1])
    above = torch.searchsorted(bins, inside.contiguous()).clamp(1, len(bins) - 1)
    low, high = bins[above - 1], bins[above]
    share = ((inside - low) / (high - low))[..., None]
    weights = torch.zeros(*x.shape, len(bins), dtype=x.dtype, device=x.device)
    weights.scatter_(-1, (above - 1)[..., None], 1 - share)
    return weights.scatter_add_(-1, above[..., None], share)


def two_hot_loss(logits: Tensor, value_target: Tensor, bins: Tensor) -> Tensor:
    """Cross-entropy of a critic over bins against the two-hot code of `symlog(value_target)`.

    Args:
        logits: f32[..., bins], differentiable.
        value_target: f32[...], in the rewards' scale.
        bins: f32[bins], in symlog space.

    Returns:
        f32[...], to be minimized.
    """
    code = two_hot(symlog(value_target), bins)
    return -(code * logits.log_softmax(dim=-1)).sum(dim=-1)


def two_hot_value(logits: Tensor, bins: Tensor) -> Tensor:
    """The value that a critic over bins predicts: `symexp` of the mean bin, as rewards are."""
    return symexp((logits.softmax(dim=-1) * bins).sum(dim=-1))


def _percentile(ordered: Tensor, percent: float) -> float:
    """Return a percentile of f64[n], ascending, n at least 1; interpolated between two numbers."""
    if bool(ordered[-1].isnan()):  # they come last
        return math.nan
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    first, second = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return float(torch.lerp(first, second, place - below))


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
        Advantages and value targets, f32[rows, T] each; 0 where the mask is False.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, advantage=advantage, value_target=value_target)
    # `Tensor.quantile` takes 2^24 numbers at most.
    returns = value_target[mask].detach().double().sort().values
    scale = _percentile(returns, 95.0) - _percentile(returns, 5.0) if len(returns) else 0.0
    return GaeTargets(
        # In this order a scale of nan stays nan.
        advantage=zero_where_masked_out(advantage / max(scale, 1.0), mask),
        value_target=zero_where_masked_out(value_target, mask),
    )
