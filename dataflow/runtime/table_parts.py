"""Tables as parts: any frozen dataclass of annotated columns, as it travels and is stored.

The outputs of nodes are packed by their nodes, which know where lengths come from. Here a table
stands alone, so that each of its ragged axes needs a column of ids that says how long rows are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from torch import Tensor

from ..graph.axes import Spec, spec_of
from .messages import Part
from .ragged import lengths_of, pack, unpack

__all__ = ["pack_table", "unpack_table"]

T = TypeVar("T")


def pack_table(table: Any) -> Part:
    """A table's columns, in the order of its fields.

    Raises:
        WorkerError: If a column contradicts its annotation, or a ragged one has no ids beside it.
    """
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
    """The table that `pack_table` made a part of."""
    columns = zip(_specs(kind), part, strict=True)
    return kind(**{name: unpack(packed, spec.dtype) for (name, spec), packed in columns})


def _specs(kind: type) -> Iterator[tuple[str, Spec]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        spec = spec_of(hints[field.name])
        if spec is None:
            raise TypeError(f"{kind.__name__}.{field.name} is no annotated column")
        yield field.name, spec
