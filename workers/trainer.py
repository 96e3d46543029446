"""The training loop every trainable worker of a language model shares.

It knows losses and batches, no model and no algorithm. What it guarantees: the minibatches of a
call depend on (seed, role, step, ordinal, epoch) alone; the loss and its gradient do not depend on
the size of micro-batches or the number of ranks beyond rounding; on several ranks every rank takes
part in every collective, whether or not it holds rows of the minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..algorithms.roles import TrainMetrics
from ..dataflow.context import CallKey, call_behind
from ..dataflow.role import Loss, LossSum, Metric
from ..dataflow.worker import WorkerContext
from .agreement import Agreement, AgreementLimits, check_agreement
from .data_parallel import RankGroup, rank_group
from .microbatch import Minibatches, columns, micro_batches, on_device, take_rows
from .optimizer import AdamW, OptimizerSpec
from .sampling import stream_generator
from .weights import FlatParameters

__all__ = ["Forward", "Sums", "TrainLoop", "Trainer", "num_masked"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]

Forward = Callable[[Any, bool], O]
"""A batch's rows on the model's device, and whether entropies are wanted, to the model output."""


@dataclass
class Sums:
    """Additive results of a train call: name -> (sum, weight), still on the device."""

    entries: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict[str, tuple[Tensor, Tensor]]
    )

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
        """Add scalars to what is there under `name`."""
        total, weight = total.detach().double(), weight.detach().double()
        if name in self.entries:
            before = self.entries[name]
            total, weight = before[0] + total, before[1] + weight
        self.entries[name] = (total, weight)

    def merged(self, group: RankGroup) -> dict[str, Metric]:
        """Added up over ranks; every rank gets the same."""
        names = group.union(list(self.entries))
        table = torch.zeros(len(names), 2, dtype=torch.float64, device=group.device)
        for row, name in enumerate(names):
            if name in self.entries:
                table[row] = torch.stack([part.to(table.device) for part in self.entries[name]])
        values: list[list[float]] = group.sum_(table).tolist()
        return {name: Metric.mean(*pair) for name, pair in zip(names, values, strict=True)}


class TrainLoop(Generic[O]):
    """What a train call is, for an engine that says how a gradient is computed and applied.

    Args:
        context: Where the worker lives.
        spec: The learning rate's schedule.
        device: The model's.

    Attributes:
        calls: Train calls served, which drives the learning-rate schedule.
    """

    def __init__(self, context: WorkerContext, spec: OptimizerSpec, device: torch.device) -> None:
        self._context = context
        self._spec = spec
        self._device = device
        self._group = rank_group(context, device)
        self._holders = self._group  # whose parts of a batch, put together, are the batch
        self._agreement: Agreement | None = None
        self._compared = False
        self.calls = 0

    def train(
        self,
        forward: Forward[O],
        loss: Loss[B, O],
        batch: B,
        *,
        epochs: int,
        num_minibatches: int,
        key: CallKey,
        limits: AgreementLimits | None = None,
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` steps on this rank's part of a batch.

        Raises:
            ValueError: If the batch cannot be cut as asked.
            DisagreementError: If another model must have sampled it; nothing has been changed.
            FloatingPointError: If a gradient is not finite.
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; expected at least 1")
        cut = Minibatches(batch, loss.unit, num_minibatches, self._holders)
        lr = self._spec.lr_at(self.calls)
        if self._spec.restart_every_call:
            self._restart()
        sums = Sums()
        norms: list[float] = []
        limits = limits or AgreementLimits()
        if not self._compared or key.step % limits.every == 0:
            self._agreement = Agreement(self._context, self._device)
        agreed: dict[str, Metric] = {}
        for epoch in range(epochs):
            random = stream_generator(
                self._context.seed, self._context.role, "minibatches", key, epoch
            )
            for rows in cut.epoch(random):
                grad = self._gradient(forward, loss, batch, rows, sums)
                agreed |= self._end_comparing(key, limits)  # the next see other weights
                norms.append(self._step(grad, lr))
        self.calls += 1
        metrics = sums.merged(self._group) | agreed
        steps = float(len(norms))
        metrics["loss"] = (
            Metric.mean(metrics["loss"].total, steps)
            if "loss" in metrics
            else Metric.mean(0.0, 0.0)
        )
        metrics["grad_norm"] = Metric.mean(sum(norms), steps)
        metrics["lr"] = Metric.mean(lr, 1.0)
        metrics["tokens"] = Metric.mean(metrics["tokens"].total, float(epochs))
        return TrainMetrics(metrics)

    def skip(self) -> TrainMetrics:
        """Serve a train call that has nothing to learn from: only the schedule goes on."""
        lr = self._spec.lr_at(self.calls)
        self.calls += 1
        nothing = Metric.mean(0.0, 0.0)
        return TrainMetrics(
            {
                "loss": nothing,
                "grad_norm": nothing,
                "lr": Metric.mean(lr, 1.0),
                "tokens": Metric.mean(0.0, 1.0),
            }
        )

    def _end_comparing(self, key: CallKey, limits: AgreementLimits) -> dict[str, Metric]:
        """What the minibatch just looked at says of its sampler; refuses one that disagrees."""
        if self._agreement is None:
            return {}
        found = self._agreement.metrics()
        self._agreement = None
        self._compared = True
        check_agreement(found, limits, self._context.role, key.step, call_behind())
        return found

    def _gradient(
        self, forward: Forward[O], loss: Loss[B, O], batch: B, rows: Tensor, sums: Sums
    ) -> Tensor:
        """The minibatch's gradient, f32[size], from this rank's `rows`; adds to `sums`."""
        raise NotImplementedError

    def _loss(
        self, forward: Forward[O], loss: Loss[B, O], micro: B, totals: Tensor, sums: Sums
    ) -> Tensor:
        """What some rows contribute to the minibatch's loss; adds its numbers to `sums`.

        Raises:
            ValueError: If the loss has no gradient.
        """
        output = forward(micro, loss.needs_entropy)
        if self._agreement is not None:
            self._agreement.add(output, micro)
        result: LossSum = loss(output, micro, totals)
        if not result.total.requires_grad:
            raise ValueError(
                f"{type(loss).__name__} gave '{self._context.role}' a total without a gradient; "
                "compute it from the model's output in every case, be it a sum over no tokens"
            )
        sums.add("loss", result.total, torch.ones((), device=self._device))
        for name, (total, weight) in result.metrics.items():
            sums.add(name, total, weight)
        return result.total

    def _restart(self) -> None:
        """Have the optimizer forget the steps it has taken."""
        raise NotImplementedError

    def _step(self, grad: Tensor, lr: float) -> float:
        """Clip the gradient, take an optimizer step, return the norm before clipping."""
        raise NotImplementedError


class Trainer(TrainLoop[O]):
    """Optimizer steps on one model.

    Args:
        context: Where the worker lives.
        flat: The model's weights.
        spec: Optimizer and schedule.
        micro_batch_tokens: Tokens computed at once, as a bound on memory.
        sort_by_length: Whether micro-batches should bring rows of similar length together.
    """

    def __init__(
        self,
        context: WorkerContext,
        flat: FlatParameters,
        spec: OptimizerSpec,
        *,
        micro_batch_tokens: int,
        sort_by_length: bool,
    ) -> None:
        super().__init__(context, spec, flat.data.device)
        self._flat = flat
        self._micro_batch_tokens = micro_batch_tokens
        self._sort_by_length = sort_by_length
        self.optimizer = AdamW(flat, spec)

    def _restart(self) -> None:
        self.optimizer.restart()

    def _step(self, grad: Tensor, lr: float) -> float:
        return self.optimizer.step(grad, lr)

    def _gradient(
        self, forward: Forward[O], loss: Loss[B, O], batch: B, rows: Tensor, sums: Sums
    ) -> Tensor:
        """The minibatch's gradient summed over micro-batches and ranks, f32[size]."""
        local = take_rows(batch, rows)
        totals = self._group.sum_(loss.totals(local).double().to(self._device))
        grad = self._flat.enable_gradients()
        exact = grad if grad.dtype == torch.float32 else torch.zeros_like(grad, dtype=torch.float32)
        parts = micro_batches(
            batch,
            rows,
            loss.unit,
            self._micro_batch_tokens,
            sort_by_length=self._sort_by_length,
        )
        one = torch.ones((), device=self._device)
        for part in parts:
            whole = part is rows  # one micro-batch: its rows have been taken already
            micro = (
                on_device(local, self._device) if whole else take_rows(batch, part, self._device)
            )
            self._loss(forward, loss, micro, totals, sums).backward()
            if exact is not grad:
                # bfloat16 gradients of micro-batches are added up in float32.
                exact += grad
                grad.zero_()
        sums.add("tokens", num_masked(local).to(self._device), one)
        return self._group.sum_(exact)


def num_masked(batch: object) -> Tensor:
    """Trained tokens of a batch; 0 if it has no mask."""
    mask = columns(batch).get("mask")
    return torch.zeros(()) if mask is None else mask.sum()
