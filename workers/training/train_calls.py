"""What all trained language models do with a call, whichever engine computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...algorithms.roles.language import PolicyOutput, TrainMetrics
from ...dataflow.graph.role import Loss, Metric, add_metrics
from ...dataflow.runtime.call_context import call_key
from ...dataflow.runtime.worker_protocol import WorkerContext
from .logprob_mismatch import MismatchLimits
from .trainer import Forward, TrainLoop

__all__ = [
    "check_columns",
    "check_temperature",
    "column_forward",
    "policy_forward",
    "report_scores",
    "train_call",
]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]


def check_columns(tokens: Tensor, mask: Tensor) -> None:
    """Require i64[rows, T] tokens and a bool mask of that shape that leaves column 0 alone.

    Raises:
        ValueError: Saying what came instead.
    """
    if (
        tokens.ndim != 2
        or tokens.dtype != torch.int64
        or mask.dtype != torch.bool
        or mask.shape != tokens.shape
    ):
        raise ValueError(
            f"expected tokens i64[rows, T] and mask bool of the same shape, got "
            f"{tokens.dtype}{list(tokens.shape)} and {mask.dtype}{list(mask.shape)}"
        )
    if mask.shape[1] and bool(mask[:, 0].any()):
        raise ValueError(
            "mask is True at a row's first token, which nothing precedes and so no model can "
            "predict; every row must begin with at least one prompt token"
        )


def column_forward(
    compute: Callable[[Tensor, Tensor], Tensor], output: Callable[[Tensor], O]
) -> Forward[O]:
    """The forward pass of a model that gives one column.

    Args:
        compute: Tokens and mask of some rows to the column.
        output: Makes of it what losses read.
    """

    def forward(rows: Any, needs_entropy: bool) -> O:
        del needs_entropy
        check_columns(rows.tokens, rows.mask)
        return output(compute(rows.tokens, rows.mask))

    return forward


def check_temperature(temperature: float) -> None:
    """Require a temperature above 0."""
    if temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}; log-probabilities need a positive one (greedy "
            "decoding has no distribution to evaluate)"
        )


def policy_forward(
    compute: Callable[..., PolicyOutput], temperature: float
) -> Forward[PolicyOutput]:
    """The forward pass of a policy at a temperature.

    Args:
        compute: Tokens and mask of some rows, the temperature and `needs_entropy=` to the output.
        temperature: Above 0.

    Raises:
        ValueError: If it is not.
    """
    check_temperature(temperature)

    def forward(rows: Any, needs_entropy: bool) -> PolicyOutput:
        check_columns(rows.tokens, rows.mask)
        return compute(rows.tokens, rows.mask, temperature, needs_entropy=needs_entropy)

    return forward


def report_scores(metrics: dict[str, Metric], score: Tensor) -> None:
    """Add the mean of scores, f32[rows], and of their squares to a worker's metrics."""
    sums = {
        "reward/mean": float(score.double().sum()),
        "reward/mean_square": float(score.double().square().sum()),
    }
    rows = float(len(score))
    add_metrics(metrics, {name: Metric.mean(sums[name], rows) for name in sums})


def train_call(
    trainer: TrainLoop[O] | None,
    context: WorkerContext,
    forward: Forward[O],
    loss: Loss[B, O],
    batch: B,
    epochs: int,
    num_minibatches: int,
    limits: MismatchLimits | None,
) -> TrainMetrics:
    """Train in the call being served.

    Raises:
        RuntimeError: If the worker is frozen.
    """
    if trainer is None:
        raise RuntimeError(
            f"'{context.role}' is frozen and cannot train; give its spec an optimizer= "
            "(OptimizerSpec)"
        )
    return trainer.train(
        forward,
        loss,
        batch,
        epochs=epochs,
        num_minibatches=num_minibatches,
        key=call_key(context.role, "train"),
        limits=limits,
    )
