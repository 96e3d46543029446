"""Columns between nodes, packed and in chunks of rows; and those of a source or a call.

Inside a call a ragged column is a padded dense tensor, because that is what maths is written on.
Between calls it is `Packed`: the values of all rows one after another, and the rows' lengths.
Packing drops whatever stood at padded positions, so nothing can depend on it; unpacking pads as the
spec says. Both copy, so work on a dense tensor in place cannot change what is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError, WorkerError, no_exit
from ..files import writing
from ..graph.axes import DType, Spec, spec_of
from ..graph.graph import Graph, Node, OutputColumn, Ref
from .call_context import DeadlineExceeded, deadline

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """One column on the wire."""

    values: Tensor  # The column itself if it is not ragged; else all rows' entries end to end
    lengths: Tensor | None = None  # i64[rows] for a ragged column, None otherwise

    @property
    def num_rows(self) -> int:
        """Rows in this piece; 1 for a scalar."""
        rows = self.values if self.lengths is None else self.lengths
        return rows.shape[0] if rows.dim() else 1

    @property
    def num_bytes(self) -> int:
        lengths = 0 if self.lengths is None else self.lengths.nbytes
        return self.values.nbytes + lengths


Part = tuple[Packed, ...]
"""One chunk of a node's output: its columns, in the order of `Node.outputs`."""


def lengths_of(ids: Tensor) -> Tensor:
    """Row lengths i64[rows] of a dense integer column, padded with -1 at the end of its rows."""
    return (ids >= 0).sum(dim=1)


def pack(name: str, dense: Tensor, spec: Spec, lengths: Tensor | None) -> Packed:
    """Turn a dense column into what travels."""
    if dense.dtype != spec.dtype.torch or dense.dim() != len(spec.axes):
        raise WorkerError(
            f"'{name}' should be {spec}, but the call returned {_shown(dense)}; make it "
            f"{spec.dtype.torch} with {len(spec.axes)} axes"
        )
    if spec.ragged_axis is None:
        return Packed(dense.detach().clone())
    if lengths is None:
        raise WorkerError(
            f"'{name}' is {spec}, but nothing says how long its rows are; return an i64 column "
            "over the same axes beside it, padded with -1"
        )
    longest = int(lengths.max()) if len(lengths) else 0
    if dense.shape[0] != len(lengths) or dense.shape[1] < longest:
        others = dense.shape[0] != len(lengths)
        fix = "; an op that drops or adds rows says @op(..., makes_rows=True)" if others else ""
        raise WorkerError(
            f"'{name}' is {spec}, with {len(lengths)} rows of up to {longest} "
            f"{spec.axes[1].name}s, but the call returned {_shown(dense)}{fix}"
        )
    return Packed(dense.detach()[_inside(lengths, dense.shape[1])], lengths)


def _inside(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def unpack(packed: Packed, dtype: DType) -> Tensor:
    """The dense tensor, new: `[rows, longest row, ...]`, padded as the dtype says."""
    if packed.lengths is None:
        return packed.values.clone()
    lengths = packed.lengths
    width = int(lengths.max()) if len(lengths) else 0
    shape = (len(lengths), width, *packed.values.shape[1:])
    dense = torch.full(shape, dtype.padding, dtype=packed.values.dtype, device=lengths.device)
    dense[_inside(lengths, width)] = packed.values
    return dense


def concatenate(pieces: Sequence[Packed]) -> Packed:
    """The pieces' rows one after another. A single piece is returned as it is."""
    if len(pieces) == 1:
        return pieces[0]
    values = torch.cat([piece.values for piece in pieces])
    lengths = [piece.lengths for piece in pieces if piece.lengths is not None]
    return Packed(values, torch.cat(lengths) if lengths else None)


def split(packed: Packed, num_rows: Iterable[int]) -> list[Packed]:
    """Cut into pieces of the given numbers of rows, in order; they must add up."""
    sizes = list(num_rows)
    if packed.lengths is None:
        return [Packed(part) for part in torch.split(packed.values, sizes)]
    lengths = torch.split(packed.lengths, sizes)
    values = torch.split(packed.values, [int(part.sum()) for part in lengths])
    return [Packed(value, length) for value, length in zip(values, lengths, strict=True)]


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
        if ref not in self._packed:
            index, output = self._output(ref)
            pieces = [part[index] for part in self._parts[ref.node]]
            scalar = output.spec.row_axis is None
            self._packed[ref] = pieces[0] if scalar else concatenate(pieces)
        return self._packed[ref]

    def dense(self, ref: Ref) -> Tensor:
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
    """The columns of what a call returned, in the order of the node's outputs.

    Raises:
        WorkerError: If it is of another type than the annotation, or a column is no tensor.
    """
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


class Source(Protocol):
    """A step's rows, as a pure function of the step's index."""

    def batch(self, step: int) -> Any:
        """The table of that step, as dense padded tensors."""
        ...


def read_source(
    node: Node, source: Source, step: int, num_chunks: int, deadline_s: float
) -> tuple[Part, ...]:
    """A step's rows from the source of `node`, packed and cut into chunks."""
    try:
        with no_exit(), deadline(deadline_s):
            table = source.batch(step)
    except DeadlineExceeded:
        raise TimeoutError(
            f"it gave nothing within {deadline_s:g} s (Schedule.deadline_s)"
        ) from None
    return _pack(node, table, num_chunks)


def _pack(node: Node, table: Any, num_chunks: int) -> tuple[Part, ...]:
    expected = node.output_table
    if expected is None or not isinstance(table, expected):
        raise ConfigError(
            f"source '{node.name}' should give a {expected.__name__ if expected else 'table'}, but "
            f"gave a {type(table).__name__}"
        )
    lengths = {
        output.spec.ragged_axis: lengths_of(getattr(table, output.name))
        for output in node.outputs
        if output.spec.ragged_axis is not None and output.spec.dtype.value == "i64"
    }
    packed = tuple(
        pack(
            f"{node.name}.{output.name}",
            getattr(table, output.name),
            output.spec,
            lengths.get(output.spec.ragged_axis) if output.spec.ragged_axis else None,
        )
        for output in node.outputs
    )
    return cut_table(node, packed, num_chunks)


def pack_table(table: Any) -> Part:
    """Return a table's columns, in the order of its fields."""
    columns = [(name, spec, getattr(table, name)) for name, spec in _specs(type(table))]
    lengths: dict[tuple[Any, Any], Tensor] = {}
    for _, spec, column in columns:
        key = spec.row_axis, spec.ragged_axis
        if spec.ragged_axis is not None and spec.dtype.value == "i64" and key not in lengths:
            lengths[key] = lengths_of(column)
    owner = type(table).__name__
    return tuple(
        pack(f"{owner}.{name}", column, spec, lengths.get((spec.row_axis, spec.ragged_axis)))
        for name, spec, column in columns
    )


def unpack_table(kind: type[T], part: Part) -> T:
    columns = zip(_specs(kind), part, strict=True)
    return kind(**{name: unpack(packed, spec.dtype) for (name, spec), packed in columns})


def _specs(kind: type) -> Iterator[tuple[str, Spec]]:
    hints = get_type_hints(kind, include_extras=True)
    for name in (one.name for one in fields(kind)):
        spec = spec_of(hints[name])
        if spec is None:
            raise TypeError(f"{kind.__name__}.{name} is no annotated column")
        yield name, spec


def save_part(part: Part, file: Path) -> None:
    # Cloned, because columns of one table share their lengths and safetensors refuses to write
    # memory that is shared.
    tensors: dict[str, Tensor] = {}
    for index, column in enumerate(part):
        tensors[f"{index}.values"] = column.values.clone()
        if column.lengths is not None:
            tensors[f"{index}.lengths"] = column.lengths.clone()
    with writing(file):
        save_file(tensors, file, metadata={"columns": json.dumps(len(part))})


def load_part(file: Path) -> Part:
    with safe_open(file, "pt") as stored:  # pyright: ignore[reportUnknownVariableType]
        names = set(stored.keys())
        count = json.loads(stored.metadata()["columns"])
        return tuple(
            Packed(
                stored.get_tensor(f"{index}.values"),
                stored.get_tensor(f"{index}.lengths") if f"{index}.lengths" in names else None,
            )
            for index in range(count)
        )
