"""Metrics: how the parts of a call are put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.dataflow.graph.role import LossSum, Metric


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


def test_metrics_of_a_loss_may_be_numbers() -> None:
    one = torch.ones((), requires_grad=True)
    made = LossSum(one, {"bare": 3, "pair": (1.5, 2), "tensor": one, "both": (one, 4.0)}).metrics
    assert {name: (float(a), float(b)) for name, (a, b) in made.items()} == {
        "bare": (3, 1),
        "pair": (1.5, 2),
        "tensor": (1, 1),
        "both": (1, 4),
    }
    assert not any(part.requires_grad for pair in made.values() for part in pair)
    assert LossSum(one).metrics == {}


@pytest.mark.parametrize(
    ("metric", "what"),
    [
        ("0.5", "str"),
        (None, "NoneType"),
        ([1.0, 2.0], "list"),
        ((1.0,), "tuple of 1"),
        ((1.0, 2.0, 3.0), "tuple of 3"),
        (torch.zeros(3), r"tensor of shape \[3\]"),
        ((1.0, torch.zeros(1)), r"tuple with tensor of shape \[1\]"),
        ((1.0, None), "tuple with NoneType"),
    ],
)
def test_what_is_no_metric_is_named(metric: Any, what: str) -> None:
    message = (
        rf"metric 'margin' of a loss is a {what}; expected \(sum, weight\), each a number or a "
        "scalar tensor, or one such number, which is averaged over micro-batches"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        LossSum(torch.zeros(()), {"margin": metric})


def test_a_total_that_is_no_scalar_is_named() -> None:
    with pytest.raises(ValueError, match=r"^the total of a loss is a tensor of shape \[2\]; expec"):
        LossSum(torch.zeros(2))
    with pytest.raises(ValueError, match="^the total of a loss is a float; expected a scalar ten"):
        LossSum(0.5)  # pyright: ignore[reportArgumentType]
