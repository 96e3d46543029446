"""Metrics: how the parts of a call are put together."""

from __future__ import annotations

import pytest
from penstock.dataflow.graph.role import Metric


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ([Metric.mean(6.0, 2.0), Metric.mean(1.0, 1.0)], 7 / 3),
        ([Metric.mean(6.0, 2.0), Metric.mean(0.0, 0.0)], 3.0),
        ([Metric.sum(6.0), Metric.sum(1.0), Metric.sum(0.5)], 7.5),
        ([Metric(6.0, 1.0, "max"), Metric(1.0, 1.0, "max")], 6.0),
        ([Metric(6.0, 1.0, "min"), Metric(1.0, 1.0, "min")], 1.0),
    ],
)
def test_parts_add_up(parts: list[Metric], value: float) -> None:
    forwards, backwards = parts[0], parts[-1]
    for part in parts[1:]:
        forwards = forwards + part
    for part in reversed(parts[:-1]):
        backwards = backwards + part
    assert forwards == backwards
    assert forwards.value == pytest.approx(value)


def test_a_mean_over_nothing_is_nan() -> None:
    assert Metric.mean(0.0, 0.0).value != Metric.mean(0.0, 0.0).value


def test_kinds_do_not_mix() -> None:
    with pytest.raises(ValueError, match="cannot merge a sum metric with a mean metric"):
        Metric.sum(1.0) + Metric.mean(1.0, 1.0)  # pyright: ignore[reportUnusedExpression]
