"""The training loop every trainable worker of a language model shares.

It knows losses and batches, no model and no algorithm. What it guarantees: the minibatches of a
call depend on (seed, role, step, ordinal, epoch) alone; the loss and its gradient do not depend on
the size of micro-batches or the number of ranks beyond rounding; on several ranks every rank takes
part in every collective, whether or not it holds rows of the minibatch.

A batch may come in pieces, each in a call of its own: gradient, loss and totals of their rows add
up apart, and are divided once the last piece is there. Every rank gets the same number of pieces,
with rows or without; ranks add up over each other in the last one only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ...algorithms.roles.language_tables import TrainMetrics
from ...dataflow.errors import ConfigError, StateError, nearest
from ...dataflow.graph.role import Loss, Metric
from ...dataflow.runtime.call_context import CallKey, Piece, call_staleness
from ..rollout.sampling import stream_generator
from .checkpoint_files import pieces_on, stored_view
from .data_parallel import RankGroup, rank_group
from .logprob_mismatch import Mismatch, MismatchLimits, check_mismatch
from .microbatch import Minibatches, columns, micro_batches, on_device, row_sizes, take_rows
from .network import MicroBatches, Network
from .optimizer import OptimizerSpec
from .weight_checks import not_finite, some, stopped, unusable


@dataclass
class Sums:
    """Additive results of a train call: name -> (sum, weight), still on the device."""

    entries: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict[str, tuple[Tensor, Tensor]]
    )

    def add(self, name: str, total: Tensor, weight: Tensor) -> None:
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


@dataclass
class Pieces:
    """The sums of a batch that comes in pieces, the loss still undivided."""

    role: str  # What is trained
    key: CallKey  # The call that all of them are of
    grad: Tensor  # From `Network.start_gradient`, f32[size]; not yet added up over processes
    rows: list[object] = field(default_factory=list[object])  # This rank's part of each piece
    sums: Sums = field(default_factory=Sums)  # As those of any train call
    _counts: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, rows: object, totals: Tensor, key: CallKey) -> None:
        """Count a piece; `totals` f64[K] are the loss's over its rows."""
        if key != self.key:
            raise self.unfinished(f"it was given one of call {key.ordinal} of step {key.step}")
        self.rows.append(rows)
        # Rows ride along with the totals: one reduction then tells whether any rank had a row.
        count = totals.new_tensor([float(num_rows(rows))])
        self._counts = [sum(self._counts, torch.cat([totals, count]))]

    def totals(self, ranks: RankGroup) -> Tensor:
        """f64[K]: the loss's totals over all pieces of all ranks; all of them must ask."""
        counts = ranks.sum_(self._counts[0].clone())
        # Only now: this rank may have no row while others have some.
        if not counts[-1]:
            raise ValueError(
                f"'{self.role}' has nothing to train on: none of the {len(self.rows)} piece(s) of "
                "the batch has a row; an optimizer step needs at least one"
            )
        return counts[:-1]

    def unfinished(self, what: str) -> StateError:
        return StateError(
            f"'{self.role}' has {len(self.rows)} piece(s) of the batch of call {self.key.ordinal} "
            f"of step {self.key.step} and waits for the last one, but {what}"
        )


def divisor(loss: Loss[Any, Any], totals: Tensor, role: str) -> Tensor:
    found = loss.divisor(totals)
    if found is None:
        raise ConfigError(
            f"role '{role}' is given its batch in pieces, but {type(loss).__name__} has no "
            "divisor: it needs totals of the whole batch from the start, as normalized advantages "
            "do\n    have the step wait for the whole batch, or give the loss options without them"
        )
    return found


_LISTED = 6  # Names in a message


def num_rows(batch: object) -> int:
    return len(next(iter(columns(batch).values())))


def frozen_names(network: Network, patterns: Sequence[str], role: str) -> frozenset[str]:
    """The parameters of a model that patterns name, by the names that checkpoints have."""
    names = [param.name for param in network.layout.params]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            more = f", ... ({len(names)} in all)" if len(names) > _LISTED else ""
            raise ConfigError(
                f"'{role}' is to keep '{pattern}' frozen, which names none of its parameters"
                f"{nearest(pattern, names)}\n    it has: {', '.join(names[:_LISTED])}{more}"
            )
    found = frozenset(name for name in names if any(fnmatchcase(name, p) for p in patterns))
    if len(found) == len(names):
        raise ConfigError(
            f"'{role}' is to keep all of its {len(names)} parameters frozen, so there is nothing "
            "to train\n    leave some out, or do not train the role"
        )
    return found


def frozen_spans(network: Network, names: frozenset[str]) -> list[tuple[int, int]]:
    """Places of those parameters in a process's gradient, f32[size]: begin and end, in order.

    Uses the network's gradient buffer: what was in it is gone.
    """
    mark = network.start_gradient()
    tensors = network.tensors(mark)
    for piece in pieces_on(network.rank_layout, network.context.process):
        if piece.name in names:
            stored_view(tensors, piece).fill_(1.0)
    marked = mark != 0
    ends = marked.new_zeros(1)
    edges = torch.diff(torch.cat([ends, marked, ends]).to(torch.int8)).nonzero()[:, 0].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]

Forward = Callable[[Any, bool], O]
"""A batch's rows on the model's device, and whether entropies are wanted, to the model output."""


class Trainer(Generic[O]):
    """Optimizer steps on one model, or on a process's part of one.

    All processes of a data-parallel rank are given the same rows and cut them alike; the network
    says which of them computes what.
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
        self._pieces: Pieces | None = None
        self._frozen = frozen_names(network, spec.frozen, network.context.role)
        self.optimizer = network.make_optimizer(spec)
        self.calls = 0  # Train calls served, which drives the learning-rate schedule

    def train(
        self,
        forward: Forward[O],
        loss: Loss[B, O],
        batch: B,
        *,
        epochs: int,
        num_minibatches: int,
        key: CallKey,
        limits: MismatchLimits,
        piece: Piece,
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` steps on this rank's part of a batch.

        Given a piece of it, add its gradient to those before, and with the last one take the step:
        the same as on the whole batch beyond rounding. All but the last return no metrics.

        A gradient, a loss or new weights that are not finite raise in all processes. If another
        model must have sampled the batch (`MismatchError`), nothing has been changed.
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; expected at least 1")
        if piece != "whole":
            if (epochs, num_minibatches) != (1, 1):
                raise ConfigError(
                    f"role '{self._context.role}' is given its batch in pieces, which make one "
                    f"optimizer step together, but trains with epochs={epochs} and "
                    f"num_minibatches={num_minibatches}\n    set both to 1, or have the step wait "
                    "for the whole batch"
                )
            if piece == "first":
                self.discard_pieces()
            pieces = self._add_piece(forward, loss, batch, key, limits)
            if piece == "last":
                return self._end_pieces(loss, pieces, limits)
            self._pieces = pieces
            return TrainMetrics({})
        self.refuse_pieces("it was given a whole batch")
        cut = Minibatches(batch, loss.unit, num_minibatches, self._network.replicas)
        self._begin(key, limits)
        sums = Sums()
        norms: list[float] = []
        agreed: dict[str, Metric] = {}
        for epoch in range(epochs):
            random = stream_generator(
                self._context.seed, self._context.role, "minibatches", key, epoch
            )
            for rows in cut.epoch(random):
                local = take_rows(batch, rows)
                # Before the gradient, as each row is divided by the totals over all ranks.
                totals = self._network.replicas.sum_(self._totals(loss, local))
                grad = self._network.start_gradient()
                self._add_gradient(forward, loss, local, totals, sums)
                grad = self._network.finish_gradient(grad)
                agreed |= self._end_comparing(key, limits)  # the next see other weights
                norms.append(self._step(grad, [local], sums, key))
        return self._end(sums, norms, agreed, epochs, key)

    @property
    def has_pieces(self) -> bool:
        """Return whether pieces of a batch wait for its last one: then their gradient is needed."""
        return self._pieces is not None

    def refuse_pieces(self, what: str) -> None:
        if self._pieces is not None:
            raise self._pieces.unfinished(what)

    def discard_pieces(self) -> None:
        """Forget pieces of a batch that wait for its last one: the weights are others now."""
        if self._pieces is not None:
            self._pieces = self._mismatch = None

    def _begin(self, key: CallKey, limits: MismatchLimits) -> None:
        if self._spec.restart_every_call:
            self.optimizer.restart()
        if self._frozen:  # not when it is made: a copy that only generates has no gradient
            self.optimizer.freeze(frozen_spans(self._network, self._frozen))
            self._frozen = frozenset[str]()
        if not self._compared or key.step % limits.every == 0:
            self._mismatch = Mismatch(self._context, self._device)

    def _end(
        self,
        sums: Sums,
        norms: list[float],
        agreed: Mapping[str, Metric],
        epochs: int,
        key: CallKey,
    ) -> TrainMetrics:
        """Finish a call after its last step, and return its metrics."""
        lr = self._spec.lr_at(self.calls)
        self.calls += 1
        metrics = sums.merged(self._group) | dict(agreed)
        # Before weights that are not finite are handed out; all processes take part.
        bad = self._weights_found()
        if "loss" in metrics and not math.isfinite(metrics["loss"].total):
            bad.append("the loss")
        # One process alone may have found something, and all must raise: else the others wait for
        # it.
        worst = torch.tensor([float(bool(bad))], device=self._device)
        if bool(self._everyone.max_(worst)):
            what = "its weights or its loss have run away"
            raise stopped(self._context.role, key.step, what, self._everyone.union(bad))
        steps = float(len(norms))
        has_loss = "loss" in metrics  # else it is a stage of a pipeline before the last
        total = metrics["loss"].total if has_loss else 0.0
        metrics["loss"] = Metric.mean(total, steps if has_loss else 0.0)
        metrics["grad_norm"] = Metric.mean(sum(norms), steps)
        metrics["lr"] = Metric.mean(lr, 1.0)
        metrics["tokens"] = Metric.mean(metrics["tokens"].total, float(epochs))
        return TrainMetrics(metrics)

    def _add_piece(
        self, forward: Forward[O], loss: Loss[B, O], batch: B, key: CallKey, limits: MismatchLimits
    ) -> Pieces:
        """Add a piece to those before; they are forgotten if this one fails."""
        # Taken out while it is worked on: a failure leaves no part of a gradient behind.
        pieces, self._pieces = self._pieces, None
        rows = take_rows(batch, torch.arange(num_rows(batch)))
        totals = self._totals(loss, rows)
        ones = torch.ones_like(totals)
        # With the first piece: with the last, the whole batch would have been sampled in vain.
        divisor(loss, ones, self._context.role)
        if pieces is None:
            self._begin(key, limits)
            pieces = Pieces(self._context.role, key, self._network.start_gradient())
        pieces.add(rows, totals, key)
        self._add_gradient(forward, loss, rows, ones, pieces.sums)
        return pieces

    def _end_pieces(
        self, loss: Loss[Any, O], pieces: Pieces, limits: MismatchLimits
    ) -> TrainMetrics:
        """Divide what has been added up by what the loss divides by, and take the step."""
        totals = pieces.totals(self._network.replicas)
        ones, role = torch.ones_like(totals), self._context.role
        # Pieces were divided by the divisor of ones, as nothing was known of the rest.
        share = float(divisor(loss, ones, role) / divisor(loss, totals, role))
        grad = self._network.finish_gradient(pieces.grad).mul_(share)
        if "loss" in pieces.sums.entries:
            total, weight = pieces.sums.entries["loss"]
            pieces.sums.entries["loss"] = total * share, weight
        agreed = self._end_comparing(pieces.key, limits)
        norm = self._step(grad, pieces.rows, pieces.sums, pieces.key)
        return self._end(pieces.sums, [norm], agreed, 1, pieces.key)

    def _totals(self, loss: Loss[B, O], rows: B) -> Tensor:
        """f64[K], on the device: the loss's totals of this rank's rows."""
        return loss.totals(rows).double().to(self._device)

    def skip(self) -> TrainMetrics:
        """Serve a train call that has nothing to learn from: only the schedule goes on."""
        metrics = {name: Metric.mean(0.0, 0.0) for name in ("loss", "grad_norm")}
        metrics["lr"] = Metric.mean(self._spec.lr_at(self.calls), 1.0)
        metrics["tokens"] = Metric.mean(0.0, 1.0)
        self.calls += 1
        return TrainMetrics(metrics)

    def _step(self, grad: Tensor, rows: Sequence[object], sums: Sums, key: CallKey) -> float:
        try:
            return self.optimizer.step(grad, self._spec.lr_at(self.calls))
        except FloatingPointError as error:
            names = {name for part in rows for name in not_finite(columns(part))}
            bad = [f"column '{name}' of its batch" for name in names]
            if "loss" in sums.entries and not bool(sums.entries["loss"][0].isfinite()):
                bad.append("the loss")
            bad += self._weights_found()
            bad += [f"gradients of {some(n)}" for n in [unusable(self._network.tensors(grad))] if n]
            found = self._everyone.union(bad)
            raise stopped(self._context.role, key.step, str(error), found) from None

    def _weights_found(self) -> list[str]:
        names = unusable(self._network.tensors())
        return [f"weights {some(names)}"] if names else []

    def _end_comparing(self, key: CallKey, limits: MismatchLimits) -> dict[str, Metric]:
        """Compare the minibatch just looked at with its sampler; refuse one that disagrees."""
        if self._mismatch is None:
            return {}
        found = self._mismatch.metrics()
        self._mismatch = None
        self._compared = True
        check_mismatch(found, limits, self._context.role, key.step, call_staleness())
        return found

    def _add_gradient(
        self, forward: Forward[O], loss: Loss[B, O], rows: B, totals: Tensor, sums: Sums
    ) -> None:
        """Add the gradient of this rank's rows to the network's, and what is reported to `sums`."""
        network, device = self._network, self._device
        limit = network.micro_batch_limit(self._micro_batch_tokens, int(row_sizes(rows).sum()))
        every = torch.arange(num_rows(rows))
        parts = micro_batches(
            rows,
            every,
            loss.unit,
            limit,
            sort_by_length=network.sort_by_length,
            shares_prompts=network.shares_prompts,
        )
        one = torch.ones((), device=device)
        sums.add("tokens", torch.zeros_like(one), one)  # for a process without any

        def load(part: Tensor) -> B:
            # One micro-batch has been taken already.
            return on_device(rows, device) if part is every else take_rows(rows, part, device)

        def compute(micro: B) -> Tensor:
            mask = columns(micro).get("mask")
            trained = torch.zeros(()) if mask is None else mask.sum()
            sums.add("tokens", trained.to(device), one)
            output = forward(micro, loss.needs_entropy)
            if self._mismatch is not None:
                self._mismatch.add(output, micro)
            result = loss.checked(output, micro, totals)
            # torch's own error in the backward pass would name neither the loss nor the role.
            if not result.total.requires_grad:
                raise ValueError(
                    f"{type(loss).__name__} gave '{self._context.role}' a total without a "
                    "gradient; compute it from the model's output in every case, be it a sum over "
                    "no tokens"
                )
            sums.add("loss", result.total, one)
            for name, (total, weight) in result.metrics.items():
                sums.add(name, total, weight)
            return result.total

        network.run(MicroBatches(list(parts), load, compute), backward=True)
