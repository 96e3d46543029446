"""Cutting a batch: minibatches that no layout can change, micro-batches that fit in memory.

A batch is a frozen dataclass of columns whose first axis counts rows. Minibatches are sampled from
the global rows (or groups) by a shuffle that depends on the call alone; every rank computes the
same shuffle and takes the rows it holds. Within a minibatch rows keep their order, so that rows of
one prompt stay neighbors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ...dataflow.graph.axes import GroupId, has_mark, spec_of
from .data_parallel import RankGroup
from .host_memory import on_host, sent

T = TypeVar("T")


@cache
def _annotations(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@cache
def _ragged(kind: type) -> frozenset[str]:
    specs = {name: spec_of(hint) for name, hint in _annotations(kind).items()}
    return frozenset(n for n, spec in specs.items() if spec is not None and spec.ragged_axis)


def row_sizes(batch: object) -> Tensor:
    """Size of each row where micro-batches are bounded, i64[rows], on the CPU.

    The length of its `tokens`; in a batch without them, all steps of its `mask`, True or False.
    """
    found = columns(batch)
    if "tokens" in found:
        return (found["tokens"] >= 0).sum(1).cpu()
    return torch.full((len(found["mask"]),), found["mask"].shape[1])


def columns(batch: Any) -> dict[str, Tensor]:
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


def take_rows(batch: T, rows: Tensor, device: torch.device | None = None) -> T:
    """Some rows of a batch, trimmed to the longest of them."""
    parts = {name: column[rows.to(column.device)] for name, column in columns(batch).items()}
    ragged = _ragged(type(batch))
    if ragged:
        width = max(int((parts["tokens"] >= 0).sum(1).max()), 1) if len(rows) else 0
        parts |= {name: parts[name][:, :width] for name in ragged & parts.keys()}
    whole: Any = batch
    found: T = dataclasses.replace(whole, **parts)
    return found if device is None else on_device(found, device)


def on_device(batch: T, device: torch.device) -> T:
    """A batch with all columns on a device; the same one if they are."""
    found = columns(batch)
    if all(column.device == device for column in found.values()):
        return batch
    whole: Any = batch
    return dataclasses.replace(whole, **{name: sent(part, device) for name, part in found.items()})


def _group_ids(batch: object) -> Tensor:
    annotations = _annotations(type(batch))
    for name, column in columns(batch).items():
        if has_mark(annotations[name], GroupId):
            return column
    raise ValueError(
        f"{type(batch).__name__} has no GroupId column, but its loss works on whole groups; "
        "annotate one column with GroupId()"
    )


class Minibatches:
    """The assignment of this rank's rows to minibatches."""

    def __init__(
        self, batch: object, unit: Literal["row", "group"], num_minibatches: int, group: RankGroup
    ) -> None:
        num_rows = len(next(iter(columns(batch).values())))
        if unit == "row":
            counts = [int(part) for part in group.gather(torch.tensor([num_rows]))]
            begin = sum(counts[: group.rank])
            self._unit_of_row = torch.arange(begin, begin + num_rows)
            self._num_units = sum(counts)
        else:
            self._unit_of_row, self._num_units = _group_units(_group_ids(batch), group)
        if not self._num_units:
            raise ValueError(
                "the batch has no rows, and an optimizer step needs at least one\n    have ops "
                "keep one in every step, or leave rows out by setting their mask to False"
            )
        if not 1 <= num_minibatches <= self._num_units:
            raise ValueError(
                f"num_minibatches is {num_minibatches}, but the batch has {self._num_units} "
                f"{unit}s; each minibatch needs at least one"
            )
        self._num_minibatches = num_minibatches

    def epoch(self, random: np.random.Generator) -> Iterator[Tensor]:
        """This rank's rows of each minibatch, i64[n], ascending; n may be 0."""
        order = torch.from_numpy(random.permutation(self._num_units))
        place = torch.empty_like(order)
        place[order] = torch.arange(self._num_units)
        # Sizes differ by one at most.
        bounds = [
            round(i * self._num_units / self._num_minibatches)
            for i in range(self._num_minibatches + 1)
        ]
        mine = place[self._unit_of_row]
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            yield torch.nonzero((mine >= low) & (mine < high))[:, 0]


def _group_units(ids: Tensor, group: RankGroup) -> tuple[Tensor, int]:
    """Number the groups over all ranks in order of first appearance."""
    parts = group.gather(ids)
    number: dict[int, int] = {}
    holder: dict[int, int] = {}
    for rank, part in enumerate(parts):
        for value in part.tolist():
            number.setdefault(value, len(number))
            if holder.setdefault(value, rank) != rank:
                raise ValueError(
                    f"group {value} has rows on ranks {holder[value]} and {rank}, but the loss "
                    "works on whole groups; split the batch between groups"
                )
    own = parts[group.rank].tolist()
    return torch.tensor([number[value] for value in own], dtype=torch.int64), len(number)


def micro_batches(
    batch: object,
    rows: Tensor,
    unit: Literal["row", "group"],
    max_tokens: int,
    *,
    sort_by_length: bool,
    shares_prompts: bool = False,
) -> Iterator[Tensor]:
    """Cut a minibatch's rows into micro-batches of at most `max_tokens` tokens or one unit.

    With `shares_prompts` a prompt counts once for consecutive rows of a micro-batch.
    """
    length: list[int] = row_sizes(batch)[rows].tolist()
    units: dict[int, list[int]] = {}
    keys = (rows if unit == "row" else _group_ids(batch).cpu()[rows]).tolist()
    for at, key in enumerate(keys):
        units.setdefault(key, []).append(at)
    members = list(units.values())
    if sort_by_length:
        members.sort(key=lambda unit_rows: max(length[at] for at in unit_rows))
    order = [at for unit_rows in members for at in unit_rows]
    again = [0] * len(order)
    found = columns(batch)
    if shares_prompts and {"tokens", "mask"} <= found.keys():
        here = rows[order]
        again = repeated_tokens(on_host(found["tokens"])[here], on_host(found["mask"])[here])
    ends = list(accumulate(map(len, members)))
    parts = bounded(ends, [length[at] for at in order], again, max_tokens)
    for begin, end in parts:
        # The very tensor that was given, by which a caller sees that nothing was cut.
        whole = end - begin == len(rows) and unit == "row" and not sort_by_length
        yield rows if whole else rows[order[begin:end]]


def bounded(
    ends: Sequence[int], sizes: Sequence[int], again: Sequence[int], max_tokens: int
) -> list[tuple[int, int]]:
    """Cut consecutive rows into micro-batches of at most `max_tokens` tokens or one unit.

    The rows of a prompt stay together where they fit, unless a micro-batch would be less than half
    full without the first of them: each further micro-batch computes the prompt again.

    Args:
        ends: Number of rows up to the end of each unit, which is not cut.
        sizes: Tokens of each row.
        again: Tokens of each row that need not be computed beside the row before it.
        max_tokens: The bound.

    Returns:
        The first row of each micro-batch and the row after its last.
    """
    before = [0, *accumulate(size - less for size, less in zip(sizes, again, strict=True))]
    starts = [0, *ends]
    alike = dict.fromkeys(starts, len(sizes))  # Start of a unit -> end of the rows of its prompt
    for at, end in reversed(list(pairwise(starts))):
        alike[at] = alike[end] if end < len(sizes) and again[end] else end
    cut = [0] if ends else []
    for at, end in pairwise(starts):
        begin = cut[-1]
        room = max_tokens - (before[at] - before[begin] + again[begin])
        needs = before[end] - before[at]
        whole = before[alike[at]] - before[at]
        kept = not again[at] and room < whole <= max_tokens and 2 * room < max_tokens
        if at > begin and (needs > room or kept):
            cut.append(at)
    return list(pairwise([*cut, len(sizes)]))


def repeated_tokens(tokens: Tensor, mask: Tensor) -> list[int]:
    """Length of each row's prompt where the row before it has the same one, else 0.

    Shapes: `tokens` i64[rows, T]; `mask` bool[rows, T], whose first True ends a row's prompt.
    """
    if not mask.numel():
        return [0] * len(mask)
    prompt = mask.long().argmax(1)
    found: list[int] = prompt.where(repeats(tokens, prompt), 0).tolist()
    return found


def repeats(tokens: Tensor, prompt: Tensor) -> Tensor:
    """Whether each row begins with the prompt of the row before it, bool[rows].

    Shapes: `tokens` i64[rows, T]; `prompt` i64[rows], lengths.
    """
    width = int(prompt.max())
    text = tokens[:, :width].where(torch.arange(width) < prompt[:, None], -1)
    same = torch.zeros(len(prompt), dtype=torch.bool)
    same[1:] = (text[1:] == text[:-1]).all(1) & (prompt[1:] == prompt[:-1])
    return same
