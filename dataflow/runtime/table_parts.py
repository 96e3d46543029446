"""Parts beside calls: tables as parts, as they travel, and parts as files.

The outputs of nodes are packed by their nodes, which know where lengths come from. Here a table
stands alone, so that each of its ragged axes needs a column of ids that says how long rows are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..file_errors import writing
from ..graph.axes import Spec, spec_of
from .messages import Part
from .ragged import Packed, lengths_of, pack, unpack

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


def save_part(part: Part, file: Path) -> None:
    """Write a part to a safetensors file."""
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
    """Read what `save_part` wrote."""
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
