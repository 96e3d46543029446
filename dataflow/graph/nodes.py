"""The nodes of a graph as frozen data: calls, their arguments, and the columns they produce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import Where
from ..kinds import NodeKind, WeightRead
from .axes import Spec
from .role import Loss, Scope


@dataclass(frozen=True)
class Ref:
    """An edge: one output column of another node."""

    node: str
    column: str

    def __str__(self) -> str:
        return f"{self.node}.{self.column}"


@dataclass(frozen=True)
class RoleRef:
    """A role passed as an argument: the callee reads that role's weights."""

    role: str

    def __str__(self) -> str:
        return f"<{self.role}>"


@dataclass(frozen=True)
class Constant:
    """A value fixed when the step was recorded."""

    value: Any

    def __str__(self) -> str:
        return _describe(self.value)


@dataclass(frozen=True)
class TableArgument:
    """A table built from columns, as a train call's batch is."""

    table: type
    fields: tuple[tuple[str, Argument], ...]


Argument = Ref | RoleRef | Constant | TableArgument


@dataclass(frozen=True)
class OutputColumn:
    """One column a node produces."""

    name: str  # Field name in the output table, or "out" for a single column
    spec: Spec
    rows: str  # Which node made the rows this column describes; columns with equal `rows` line up
    group_id: bool = False  # True if it says which group each row belongs to
    behavior: bool = False  # True if it is the log-probability the rows were made with


@dataclass(frozen=True)
class Node:
    """One call of the step."""

    # `actor.generate`, `gae`, `ref.logprob#2`; unique, deterministic, what plans refer to.
    name: str
    kind: NodeKind
    scope: Scope
    ordinal: int  # Calls of the same method or op before it in the step
    where: Where  # The line of the step function that made it
    role: str | None = None
    method: str | None = None
    function: Callable[..., Any] | None = None
    # Parameter name -> argument, in the callee's order.
    arguments: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[OutputColumn, ...] = ()
    # The dataclass of the outputs, or None for a single column or none.
    output_table: type | None = None
    reads: tuple[WeightRead, ...] = ()  # Weights this call reads, own role first

    @cached_property
    def inputs(self) -> tuple[tuple[str, Ref], ...]:
        """Every column read, as (path, producer): `("batch.advantage", Ref(...))`."""
        return tuple(_references(self.arguments))

    @property
    def learns(self) -> bool:
        return self.kind is NodeKind.TRAIN and any(
            isinstance(argument, Constant) and isinstance(argument.value, Loss)
            for _, argument in self.arguments
        )

    @property
    def leader(self) -> str | None:
        """The role whose weights it moves its own role's towards; None if it does no such thing."""
        given = dict(self.arguments).get("leader")
        return given.role if isinstance(given, RoleRef) else None

    def output(self, column: str) -> OutputColumn:
        """The output of that name; KeyError if there is none."""
        for output in self.outputs:
            if output.name == column:
                return output
        raise KeyError(column)


def _references(
    arguments: tuple[tuple[str, Argument], ...], prefix: str = ""
) -> Iterator[tuple[str, Ref]]:
    for name, argument in arguments:
        if isinstance(argument, Ref):
            yield prefix + name, argument
        elif isinstance(argument, TableArgument):
            yield from _references(argument.fields, f"{prefix}{name}.")


def argument_json(argument: Argument) -> Any:
    if isinstance(argument, TableArgument):
        fields = {name: argument_json(value) for name, value in argument.fields}
        return {"table": argument.table.__name__, "fields": fields}
    if isinstance(argument, Ref):
        return {"from": str(argument)}
    if isinstance(argument, RoleRef):
        return {"role": argument.role}
    return {"constant": _describe(argument.value)}


def _describe(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [
            f"{field.name}={_describe(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)
