"""Interquartile means and bootstrap intervals, beside those of rliable and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.launch.runs.comparison import (
    difference,
    interquartile_mean,
    mean_curve,
    probability_of_improvement,
    summarized,
)

# rliable 1.2.0: metrics.aggregate_iqm of each, and probability_of_improvement of the second.
# SciPy 1.17: bootstrap of trim_mean(0.25) of the first, percentiles, 200,000 resamples.
CASES = [
    ([2.041, -2.556, 0.418], [-0.068, 0.047, 0.284],
     (-0.032333333333333325, 0.08766666666666666, 0.3333333333333333), (-2.556, 2.041)),
    ([-2.02, -0.232, -0.865, 3.323, 0.226],
     [0.147, 0.219, -0.168, -0.555, 0.109, 0.982, 0.261, 1.458],
     (-0.29033333333333333, 0.184, 0.65), (-1.635, 2.2906666666666666)),
    ([-0.2, 0.024, 1.546, 0.545, -0.505, -0.183, 0.541, 1.935, -0.27, -0.244],
     [1.502, -0.386, 0.208, 1.383, 1.08, 0.592, 1.17],
     (0.08050000000000002, 0.8865999999999999, 0.6714285714285714), (-0.234, 0.8641666666666667)),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "figures", "interval"), CASES)
def test_figures_are_those_of_rliable(
    one: list[float],
    other: list[float],
    figures: tuple[float, float, float],
    interval: tuple[float, float],
) -> None:
    first, second, improvement = figures
    found = summarized(one)
    assert found.value == pytest.approx(first)
    assert summarized(other).value == pytest.approx(second)
    assert difference(one, other).value == pytest.approx(second - first)
    assert probability_of_improvement(one, other).value == pytest.approx(improvement)
    # The bootstrap's own noise: a percentile of 10,000 draws.
    assert (found.low, found.high) == pytest.approx(interval, abs=0.12)


VALUES = st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=12)


@given(VALUES)
def test_an_interval_is_within_the_values_and_a_mean_in_the_middle(values: list[float]) -> None:
    found = summarized(values)
    assert min(values) - 1e-9 <= found.low <= found.high <= max(values) + 1e-9
    ordered = sorted(values)
    inner = ordered[len(values) // 4 : len(values) - len(values) // 4]
    assert interquartile_mean(values) == pytest.approx(np.mean(inner), abs=1e-9)


@given(VALUES, VALUES)
def test_the_sets_change_places(one: list[float], other: list[float]) -> None:
    assert difference(one, other).value == pytest.approx(-difference(other, one).value, abs=1e-9)
    there, back = (probability_of_improvement(*two) for two in ((one, other), (other, one)))
    assert there.value + back.value == pytest.approx(1.0)
    assert 0.0 <= there.low <= there.high <= 1.0


def test_a_curve_is_a_figure_at_each_point() -> None:
    values = np.random.default_rng(0).normal(size=(6, 3))
    means, lows, highs = mean_curve(values)
    for at in range(3):
        found = summarized(values[:, at].tolist())
        assert means[at] == pytest.approx(found.value)
        # Other resamples of six runs: a percentile may fall on the next of few values.
        assert (lows[at], highs[at]) == pytest.approx((found.low, found.high), abs=0.25)


def test_the_same_runs_have_the_same_interval() -> None:
    assert summarized([1.0, 2.0, 4.0]) == summarized([1.0, 2.0, 4.0])
    assert str(summarized([1.0, 1.0])) == "1 [1, 1]"
