"""Figures of a few runs with what is known of their noise: interquartile mean and bootstrap.

After Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice":
sections 4.2 (bootstrap intervals) and 4.3 (interquartile mean, probability of improvement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEW = 5
"""Below so many runs a bootstrap's interval is narrower than it says, and that is said with it."""

_RESAMPLES, _CURVE_RESAMPLES = 10_000, 2_000
_PERCENTILES = (2.5, 97.5)
_SEED = 0
"""The same runs have the same interval whenever they are asked for."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A figure and the 95 % interval around it, which is NaN to NaN for a single run."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.value:.4g} (one run)"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """Mean of what is left without a quarter of the values, rounded down, at each end.

    Args:
        values: At least one along the axis.
        axis: Along which the mean is taken.
    """
    ordered: Values = np.sort(np.asarray(values, dtype=np.float64), axis=axis)
    num = ordered.shape[axis]
    kept = np.take(ordered, range(num // 4, num - num // 4), axis=axis)
    return kept.mean(axis=axis)


def summarized(values: Sequence[float]) -> Figure:
    """The interquartile mean of some runs, with its interval.

    Args:
        values: One of each run.
    """
    drawn = _resampled(np.random.default_rng(_SEED), np.asarray(values), _RESAMPLES)
    return _figure(float(interquartile_mean(values)), interquartile_mean(drawn), values)


def difference(one: Sequence[float], other: Sequence[float]) -> Figure:
    """How much higher the second runs' interquartile mean is; both are drawn anew, apart."""
    rng = np.random.default_rng(_SEED)
    drawn = [
        interquartile_mean(_resampled(rng, np.asarray(values), _RESAMPLES))
        for values in (one, other)
    ]
    value = float(interquartile_mean(other)) - float(interquartile_mean(one))
    return _figure(value, drawn[1] - drawn[0], one, other)


def probability_of_improvement(one: Sequence[float], other: Sequence[float]) -> Figure:
    """How likely a run of the second is above one of the first; a tie counts a half."""
    rng = np.random.default_rng(_SEED)
    lower, higher = (_resampled(rng, np.asarray(v), _CURVE_RESAMPLES) for v in (one, other))
    value = _share_above(np.asarray(one)[None], np.asarray(other)[None])[0]
    return _figure(float(value), _share_above(lower, higher), one, other)


def mean_curve(curves: Any) -> tuple[Values, Values, Values]:
    """The interquartile mean of several runs at each point, with its interval.

    Args:
        curves: Runs, points.

    Returns:
        Mean, low and high: each of points.
    """
    values: Values = np.asarray(curves, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    chosen = rng.integers(len(values), size=(_CURVE_RESAMPLES, len(values)))
    means: Values = interquartile_mean(values, axis=0)
    low, high = np.empty_like(means), np.empty_like(means)
    for at in range(values.shape[1]):  # point by point: all at once would take gigabytes
        drawn = interquartile_mean(values[:, at][chosen])
        low[at], high[at] = np.percentile(drawn, _PERCENTILES)
    return means, low, high


def _resampled(rng: np.random.Generator, values: Values, num: int) -> Values:
    return values[rng.integers(len(values), size=(num, len(values)))]


def _share_above(lower: Values, higher: Values) -> Values:
    pairs = higher[:, :, None] - lower[:, None, :]
    return ((pairs > 0) + 0.5 * (pairs == 0)).mean(axis=(1, 2))


def _figure(value: float, drawn: Values, *sets: Sequence[float]) -> Figure:
    # Draws of a single run are all that run: an interval of width zero would look like certainty.
    if min(map(len, sets)) < 2:
        return Figure(value, float("nan"), float("nan"))
    low, high = np.percentile(drawn, _PERCENTILES)
    return Figure(value, float(low), float(high))
