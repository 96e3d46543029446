"""Sums of a train call: over micro-batches, over the pieces of a batch, and over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...dataflow.errors import ConfigError, StateError
from ...dataflow.graph.role import Loss, Metric
from ...dataflow.runtime.call_context import CallKey
from .data_parallel import RankGroup
from .microbatch import columns


@dataclass
class Sums:
    """Additive results of a train call: name -> (sum, weight), still on the device."""

    entries: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict[str, tuple[Tensor, Tensor]]
    )

    def scale(self, name: str, factor: float) -> None:
        """Multiply the sum under `name`, if there is one, and not its weight."""
        if name in self.entries:
            total, weight = self.entries[name]
            self.entries[name] = (total * factor, weight)

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


@dataclass
class Pieces:
    """The sums of a batch that comes in pieces, the loss still undivided.

    Attributes:
        role: What is trained.
        key: The call that all of them are of.
        grad: From `Network.start_gradient`, f32[size]; not yet added up over processes.
        rows: This rank's part of each piece.
        sums: As those of any train call.
    """

    role: str
    key: CallKey
    grad: Tensor
    rows: list[object] = field(default_factory=list[object])
    sums: Sums = field(default_factory=Sums)
    _counts: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, rows: object, totals: Tensor, key: CallKey) -> None:
        """Count a piece; `totals` f64[K] are the loss's over its rows.

        Raises:
            StateError: If it is of another call.
        """
        if key != self.key:
            raise self.unfinished(f"it was given one of call {key.ordinal} of step {key.step}")
        self.rows.append(rows)
        count = totals.new_tensor([float(num_rows(rows))])
        self._counts = [sum(self._counts, torch.cat([totals, count]))]

    def totals(self, ranks: RankGroup) -> Tensor:
        """f64[K]: the loss's totals over all pieces of all ranks; all of them must ask.

        Raises:
            ValueError: If none of them has a row.
        """
        counts = ranks.sum_(self._counts[0].clone())
        if not counts[-1]:
            raise ValueError(
                f"'{self.role}' has nothing to train on: none of the {len(self.rows)} piece(s) of "
                "the batch has a row; an optimizer step needs at least one"
            )
        return counts[:-1]

    def unfinished(self, what: str) -> StateError:
        """The message where the last piece was expected.

        Args:
            what: What came in place of it.
        """
        return StateError(
            f"'{self.role}' has {len(self.rows)} piece(s) of the batch of call {self.key.ordinal} "
            f"of step {self.key.step} and waits for the last one, but {what}"
        )


def divisor(loss: Loss[Any, Any], totals: Tensor, role: str) -> Tensor:
    """Divisor of a loss's sum over rows; see `Loss.divisor`.

    Raises:
        ConfigError: If that is not all that totals are to it.
    """
    found = loss.divisor(totals)
    if found is None:
        raise ConfigError(
            f"role '{role}' is given its batch in pieces, but {type(loss).__name__} has no "
            "divisor: it needs totals of the whole batch from the start, as normalized advantages "
            "do\n    have the step wait for the whole batch, or give the loss options without them"
        )
    return found


def one_step(role: str, epochs: int, num_minibatches: int) -> None:
    """Require what pieces of a batch can make together.

    Raises:
        ConfigError: If there are to be several optimizer steps.
    """
    if (epochs, num_minibatches) != (1, 1):
        raise ConfigError(
            f"role '{role}' is given its batch in pieces, which make one optimizer step together, "
            f"but trains with epochs={epochs} and num_minibatches={num_minibatches}\n"
            "    set both to 1, or have the step wait for the whole batch"
        )


def num_masked(batch: object) -> Tensor:
    """Trained tokens of a batch; 0 if it has no mask."""
    mask = columns(batch).get("mask")
    return torch.zeros(()) if mask is None else mask.sum()


def num_rows(batch: object) -> int:
    """Rows of a batch dataclass."""
    return len(next(iter(columns(batch).values())))
