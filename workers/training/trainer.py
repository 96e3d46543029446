"""The training loop every trainable worker of a language model shares.

It knows losses and batches, no model and no algorithm. What it guarantees: the minibatches of a
call depend on (seed, role, step, ordinal, epoch) alone; the loss and its gradient do not depend on
the size of micro-batches or the number of ranks beyond rounding; on several ranks every rank takes
part in every collective, whether or not it holds rows of the minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...algorithms.roles.language import TrainMetrics
from ...dataflow.graph.role import Loss, LossSum, Metric
from ...dataflow.runtime.call_context import CallKey, call_staleness
from ..rollout.sampling import stream_generator
from .data_parallel import RankGroup, rank_group
from .frozen import frozen_names, frozen_spans
from .logprob_mismatch import Mismatch, MismatchLimits, check_mismatch
from .microbatch import Minibatches, columns, micro_batches, on_device, row_sizes, take_rows
from .network import Network
from .optimizer import OptimizerSpec
from .weight_checks import not_finite, some, stopped, unusable

__all__ = ["Forward", "Sums", "Trainer", "num_masked"]

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


class Trainer(Generic[O]):
    """Optimizer steps on one model, or on a process's part of one.

    All processes of a data-parallel rank are given the same rows and cut them alike; the network
    says which of them computes what.

    Args:
        network: The part.
        spec: Optimizer and schedule.
        micro_batch_tokens: Tokens a process computes at once, as a bound on memory; padding is not
            counted.

    Attributes:
        calls: Train calls served, which drives the learning-rate schedule.
    """

    def __init__(self, network: Network, spec: OptimizerSpec, micro_batch_tokens: int) -> None:
        self._network = network
        self._context = network.context
        self._spec = spec
        self._micro_batch_tokens = micro_batch_tokens
        self._device = network.device
        self._group = rank_group(network.context, network.device)
        place = network.context
        self._everyone = RankGroup(place.process, place.num_processes, network.device)
        self._mismatch: Mismatch | None = None
        self._compared = False
        self._frozen = frozen_names(network, spec.frozen, network.context.role)
        self.optimizer = network.make_optimizer(spec)
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
        limits: MismatchLimits | None = None,
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` steps on this rank's part of a batch.

        Raises:
            ValueError: If the batch cannot be cut as asked.
            MismatchError: If another model must have sampled it; nothing has been changed.
            WorkerError: If a gradient, the loss or the new weights are not finite; on all
                processes.
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; expected at least 1")
        cut = Minibatches(batch, loss.unit, num_minibatches, self._network.replicas)
        lr = self._spec.lr_at(self.calls)
        if self._spec.restart_every_call:
            self.optimizer.restart()
        if self._frozen:  # not when it is made: a copy that only generates has no gradient
            self.optimizer.freeze(frozen_spans(self._network, self._frozen))
            self._frozen = frozenset[str]()
        sums = Sums()
        norms: list[float] = []
        limits = limits or MismatchLimits()
        if not self._compared or key.step % limits.every == 0:
            self._mismatch = Mismatch(self._context, self._device)
        agreed: dict[str, Metric] = {}
        for epoch in range(epochs):
            random = stream_generator(
                self._context.seed, self._context.role, "minibatches", key, epoch
            )
            for rows in cut.epoch(random):
                grad = self._gradient(forward, loss, batch, rows, sums)
                agreed |= self._end_comparing(key, limits)  # the next see other weights
                norms.append(self._step(grad, lr, take_rows(batch, rows), sums, key))
        self.calls += 1
        metrics = sums.merged(self._group) | agreed
        self._check_result(metrics, key)
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

    def _step(self, grad: Tensor, lr: float, rows: object, sums: Sums, key: CallKey) -> float:
        """One optimizer step, and the gradient's norm.

        Raises:
            WorkerError: If that is not finite, on all processes.
        """
        try:
            return self.optimizer.step(grad, lr)
        except FloatingPointError as error:
            bad = [f"column '{name}' of its batch" for name in not_finite(columns(rows))]
            if "loss" in sums.entries and not bool(sums.entries["loss"][0].isfinite()):
                bad.append("the loss")
            bad += self._weights_found()
            bad += [f"gradients of {some(n)}" for n in [unusable(self._network.tensors(grad))] if n]
            found = self._everyone.union(bad)
            raise stopped(self._context.role, key.step, str(error), found) from None

    def _check_result(self, metrics: Mapping[str, Metric], key: CallKey) -> None:
        """Nobody is to get weights that nothing can be computed with; all processes must ask."""
        bad = self._weights_found()
        if "loss" in metrics and not math.isfinite(metrics["loss"].total):
            bad.append("the loss")
        worst = torch.tensor([float(bool(bad))], device=self._device)
        if bool(self._everyone.max_(worst)):
            what = "its weights or its loss have run away"
            raise stopped(self._context.role, key.step, what, self._everyone.union(bad))

    def _weights_found(self) -> list[str]:
        names = unusable(self._network.tensors())
        return [f"weights {some(names)}"] if names else []

    def _end_comparing(self, key: CallKey, limits: MismatchLimits) -> dict[str, Metric]:
        """What the minibatch just looked at says of its sampler; refuses one that disagrees."""
        if self._mismatch is None:
            return {}
        found = self._mismatch.metrics()
        self._mismatch = None
        self._compared = True
        check_mismatch(found, limits, self._context.role, key.step, call_staleness())
        return found

    def _gradient(
        self, forward: Forward[O], loss: Loss[B, O], batch: B, rows: Tensor, sums: Sums
    ) -> Tensor:
        """The minibatch's gradient, f32[size], from this rank's `rows`; adds to `sums`."""
        network, device = self._network, self._device
        local = take_rows(batch, rows)
        totals = network.replicas.sum_(loss.totals(local).double().to(device))
        limit = network.micro_batch_limit(self._micro_batch_tokens, int(row_sizes(local).sum()))
        parts = micro_batches(batch, rows, loss.unit, limit, sort_by_length=network.sort_by_length)
        one = torch.ones((), device=device)
        sums.add("tokens", torch.zeros_like(one), one)  # for a process without any

        def load(part: Tensor) -> B:
            whole = part is rows  # one micro-batch: its rows have been taken already
            return on_device(local, device) if whole else take_rows(batch, part, device)

        def compute(micro: B) -> Tensor:
            sums.add("tokens", num_masked(micro).to(device), one)
            return self._loss(forward, loss, micro, totals, sums)

        grad = network.start_gradient()
        network.run(list(parts), load, compute, backward=True)
        return network.finish_gradient(grad)

    def _loss(
        self, forward: Forward[O], loss: Loss[B, O], micro: B, totals: Tensor, sums: Sums
    ) -> Tensor:
        """What some rows contribute to the minibatch's loss; adds its numbers to `sums`.

        Raises:
            ValueError: If the loss has no gradient.
        """
        output = forward(micro, loss.needs_entropy)
        if self._mismatch is not None:
            self._mismatch.add(output, micro)
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


def num_masked(batch: object) -> Tensor:
    """Trained tokens of a batch; 0 if it has no mask."""
    mask = columns(batch).get("mask")
    return torch.zeros(()) if mask is None else mask.sum()
