"""Axes and column specs: what a named tensor of a step looks like.

A **column** is a tensor with a `Spec`: a dtype and axes. An **axis** is an object, not a string, so
two columns agree about "item" only if they name the same `Axis`. The first axis of a column counts
its rows; a ragged axis may follow it, whose length differs from row to row; further axes are fixed.

Inside a step (ops, losses, role methods) a ragged column is a padded dense tensor; on the wire it
is packed (see `Packed`). The padding is part of the spec: `-1` for integers, `0` for floats,
`False` for booleans. An integer column therefore says by itself where each of its rows ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import torch


@dataclass(frozen=True)
class Axis:
    """One axis of a column.

    Attributes:
        name: What it counts, in the singular: "query", "sample", "item".
        within: The axis whose elements this one is grouped by: samples within a query.
        ragged: True if its length differs from row to row.
        free: True if it stands for whatever axis a column has in its place, the same one throughout
            a call: an op over free axes serves columns of any kind.

    Example:
        >>> QUERY = Axis("query")
        >>> str(f32(Axis("sample", within=QUERY), Axis("item", ragged=True)))
        'f32[sample, item~]'
    """

    name: str
    within: Axis | None = None
    ragged: bool = False
    free: bool = False

    def __str__(self) -> str:
        return f"{self.name}~" if self.ragged else self.name


class DType(Enum):
    """The dtypes that travel between nodes. Models compute in whatever precision they like."""

    F32 = "f32"
    I64 = "i64"
    BOOL = "bool"

    @property
    def torch(self) -> torch.dtype:
        return {"f32": torch.float32, "i64": torch.int64, "bool": torch.bool}[self.value]

    @property
    def padding(self) -> float | int | bool:
        """The value of a padded position of a ragged column."""
        return {"f32": 0.0, "i64": -1, "bool": False}[self.value]


@dataclass(frozen=True)
class Spec:
    """Dtype and axes of a column; prints as `f32[sample, item~]`."""

    dtype: DType
    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        for position, axis in enumerate(self.axes):
            if axis.ragged and position != 1:
                raise ValueError(
                    f"ragged axis '{axis.name}' is axis {position} of {self}; a ragged "
                    "axis must be the second one: its lengths are per row of the first"
                )

    def __str__(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.axes))}]"

    def bound(self, binding: Mapping[Axis, Axis]) -> Spec:
        """The spec with the axes that its free axes stand for, as far as `binding` knows them."""
        return Spec(self.dtype, tuple(binding.get(axis, axis) for axis in self.axes))

    def binding_to(self, other: Spec, binding: Mapping[Axis, Axis]) -> dict[Axis, Axis] | None:
        """The axes that free ones stand for if `other` is to be of this spec; else None."""
        found = dict(binding)
        if other.dtype is not self.dtype or len(other.axes) != len(self.axes):
            return None
        for axis, given in zip(self.axes, other.axes, strict=True):
            wanted = found.setdefault(axis, given) if axis.free else axis
            if wanted != given:
                return None
        return found

    @property
    def row_axis(self) -> Axis | None:
        return self.axes[0] if self.axes else None

    @property
    def ragged_axis(self) -> Axis | None:
        """The ragged axis, if the column has one."""
        return self.axes[1] if len(self.axes) > 1 and self.axes[1].ragged else None


def f32(*axes: Axis) -> Spec:
    """Spec of a float32 column over `axes`; padding is 0."""
    return Spec(DType.F32, axes)


def i64(*axes: Axis) -> Spec:
    """Spec of an int64 column over `axes`; padding is -1."""
    return Spec(DType.I64, axes)


def boolean(*axes: Axis) -> Spec:
    """Spec of a boolean column over `axes`; padding is False."""
    return Spec(DType.BOOL, axes)


@dataclass(frozen=True)
class GroupId:
    """Marks the column that says which group a row belongs to.

    Rows of one group stay on one worker wherever a node needs the whole group. Group ids survive
    filtering and reordering of rows, which counting `G` rows at a time would not. Where rows are
    cut into chunks, those of a group must be next to each other; a table in which they are not is
    refused.
    """


@dataclass(frozen=True)
class Behavior:
    """Marks the column that says how likely the weights that made the rows were to make them.

    A loss on rows made by older weights must read it, or it cannot correct for their age. An op
    that keeps some rows, or turns it into weights of the loss, marks its own output so.
    """


def spec_of(annotation: Any) -> Spec | None:
    """The `Spec` in `Annotated[Tensor, spec, ...]`, or None if the annotation is not a column.

    It looks through `... | None`; see `is_optional`.
    """
    if is_optional(annotation):
        specs = [spec_of(member) for member in get_args(annotation)]
        return next((spec for spec in specs if spec is not None), None)
    if get_origin(annotation) is Annotated:
        return next((item for item in get_args(annotation)[1:] if isinstance(item, Spec)), None)
    return None


def is_optional(annotation: Any) -> bool:
    """True for `X | None`, however it is spelt."""
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def has_mark(annotation: Any, mark: type[GroupId | Behavior]) -> bool:
    """True if the annotation is a column that carries `mark`."""
    return get_origin(annotation) is Annotated and any(
        isinstance(item, mark) for item in get_args(annotation)[1:]
    )
