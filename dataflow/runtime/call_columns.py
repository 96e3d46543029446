"""The columns of a call: what it is given, as dense tensors, and what it returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import WorkerError
from ..graph.axes import Spec
from ..graph.graph import Graph, Node, OutputColumn, Ref
from .messages import Part
from .ragged import Packed, concatenate, lengths_of, split, unpack


def cut(node: Node, columns: CallColumns, packed: Part, num_chunks: int) -> tuple[Part, ...]:
    """Cut a whole batch's output into chunks: like its inputs' where rows are kept, else evenly."""
    kept = [o.rows for o in node.outputs if o.rows != node.name and o.spec.row_axis is not None]
    sizes = columns.num_rows(kept[0]) if kept else None
    if sizes is None:
        return cut_table(node, packed, num_chunks)
    return _cut_to(node, packed, sizes)


def cut_table(node: Node, packed: Part, num_chunks: int) -> tuple[Part, ...]:
    """Cut a table of new rows into `num_chunks` nearly equal parts that keep groups together."""
    columns = list(zip(node.outputs, packed, strict=True))
    groups = [(f"{node.name}.{o.name}", column.values) for o, column in columns if o.group_id]
    if groups and num_chunks > 1:
        _check_together(*groups[0], num_chunks)
    rows = [column.num_rows for o, column in columns if o.spec.row_axis]
    sizes = even_cuts(rows[0] if rows else 0, num_chunks, groups[0][1] if groups else None)
    return _cut_to(node, packed, sizes)


def _check_together(column: str, groups: Tensor, num_chunks: int) -> None:
    starts = [0, *_changes(groups)] if len(groups) else []
    seen: set[int] = set()
    for start, group in zip(starts, groups[starts].tolist(), strict=True):
        if group in seen:
            raise WorkerError(
                f"'{column}' has rows of group {group} in places apart, again from row {start} on, "
                f"and cutting the rows into {num_chunks} chunks would part them; put the rows of a "
                "group next to each other, or set num_chunks to 1"
            )
        seen.add(group)


def _changes(groups: Tensor) -> list[int]:
    return ((groups[1:] != groups[:-1]).nonzero().flatten() + 1).tolist()


def _cut_to(node: Node, packed: Part, sizes: Sequence[int]) -> tuple[Part, ...]:
    if len(sizes) == 1:
        return (packed,)
    pieces = [
        split(column, sizes) if o.spec.row_axis is not None else [column] * len(sizes)
        for o, column in zip(node.outputs, packed, strict=True)
    ]
    return tuple(zip(*pieces, strict=True))


def even_cuts(num_rows: int, num_chunks: int, groups: Tensor | None) -> list[int]:
    """Sizes of `num_chunks` contiguous pieces, nearly equal, cut only where the group changes."""
    allowed = list(range(num_rows + 1))
    if groups is not None and num_rows:
        allowed = [0, *_changes(groups), num_rows]
    ends = [min(allowed, key=lambda a: abs(a - num_rows * (i + 1) / num_chunks))
            for i in range(num_chunks - 1)]  # fmt: skip
    ends.append(num_rows)
    starts = [0, *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def rank_shares(num_chunks: int, num_ranks: int) -> list[list[int]]:
    # Which chunks each rank trains on: contiguous, so that rank order is row order.
    bounds = [num_chunks * rank // num_ranks for rank in range(num_ranks + 1)]
    return [list(range(bounds[rank], bounds[rank + 1])) for rank in range(num_ranks)]


class CallColumns:
    """A call's inputs: dense tensors on demand, each unpacked once, and their rows and lengths."""

    def __init__(self, graph: Graph, parts: Mapping[str, list[Part]]) -> None:
        self._graph = graph
        self._parts = parts
        self._packed: dict[Ref, Packed] = {}
        self._dense: dict[Ref, Tensor] = {}

    def _output(self, ref: Ref) -> tuple[int, OutputColumn]:
        for index, output in enumerate(self._graph[ref.node].outputs):
            if output.name == ref.column:
                return index, output
        raise KeyError(ref)

    def packed(self, ref: Ref) -> Packed:
        """All chunks of a column as one."""
        if ref not in self._packed:
            index, output = self._output(ref)
            pieces = [part[index] for part in self._parts[ref.node]]
            scalar = output.spec.row_axis is None
            self._packed[ref] = pieces[0] if scalar else concatenate(pieces)
        return self._packed[ref]

    def dense(self, ref: Ref) -> Tensor:
        """The column as a padded tensor."""
        if ref not in self._dense:
            _, output = self._output(ref)
            self._dense[ref] = unpack(self.packed(ref), output.spec.dtype)
        return self._dense[ref]

    def no_rows(self) -> bool:
        counts = [
            part[index].num_rows
            for node, parts in self._parts.items()
            for index, output in enumerate(self._graph[node].outputs)
            if output.spec.row_axis is not None
            for part in parts
        ]
        return bool(counts) and not any(counts)

    def lengths(self, rows: str, spec: Spec) -> Tensor | None:
        """Row lengths of `rows`, from any input column that has them."""
        for node in self._parts:
            for output in self._graph[node].outputs:
                if output.rows == rows and length_key(output.spec) == length_key(spec):
                    return self.packed(Ref(node, output.name)).lengths
        return None

    def num_rows(self, rows: str) -> list[int] | None:
        for node, parts in self._parts.items():
            for index, output in enumerate(self._graph[node].outputs):
                if output.rows == rows and output.spec.row_axis is not None:
                    return [part[index].num_rows for part in parts]
        return None


def length_key(spec: Spec) -> str | None:
    """Equal for ragged columns whose rows are equally long if they are the same rows."""
    return f"{spec.row_axis},{spec.ragged_axis}" if spec.ragged_axis is not None else None


def empty_part(node: Node) -> Part:
    none = torch.zeros(0, dtype=torch.int64)
    return tuple(
        Packed(none.to(o.spec.dtype.torch), none if o.spec.ragged_axis is not None else None)
        for o in node.outputs
    )


def returned_columns(node: Node, returned: Any) -> list[Tensor]:
    """The columns that a call of `node` returned."""
    expected = node.output_table.__name__ if node.output_table else "a tensor"
    if node.output_table is not None and not isinstance(returned, node.output_table):
        raise WorkerError(
            f"'{node.name}' should return {expected}, but returned a {type(returned).__name__}"
        )
    columns = [
        returned if node.output_table is None else getattr(returned, output.name)
        for output in node.outputs
    ]
    for output, column in zip(node.outputs, columns, strict=True):
        if not isinstance(column, Tensor):
            raise WorkerError(
                f"'{node.name}.{output.name}' should be {output.spec}, but the call returned a "
                f"{type(column).__name__}"
            )
    return columns


def output_lengths(
    node: Node, columns: CallColumns, dense: list[Tensor]
) -> dict[str | None, Tensor | None]:
    """Lengths for each ragged axis of the outputs: the inputs' if rows are kept, else from ids."""
    lengths: dict[str | None, Tensor | None] = {None: None}
    for output in node.outputs:
        key = length_key(output.spec)
        if key is not None and key not in lengths and output.rows != node.name:
            lengths[key] = columns.lengths(output.rows, output.spec)
    for output, column in zip(node.outputs, dense, strict=True):
        key = length_key(output.spec)
        if lengths.get(key) is None and key is not None and output.spec.dtype.value == "i64":
            lengths[key] = lengths_of(column)
    return lengths
