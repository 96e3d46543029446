"""The rules a step must keep, one function each. All run while recording: no tensor exists yet."""

from __future__ import annotations

import dataclasses
import typing
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard, get_type_hints

from ..errors import FlowError
from ..kinds import NodeKind
from .axes import Axis, Spec, is_optional, spec_of
from .graph import Constant, Graph, Node
from .proxies import Column, RoleStandIn, TrainHandle, table_type
from .role import Loss


class FlowWarning(UserWarning):
    """A step that is valid but probably not what was meant."""


_HINTS: dict[Any, dict[str, Any]] = {}


def hints_of(thing: Any) -> dict[str, Any]:
    """Resolved annotations of a function or dataclass, marks included; cached."""
    if thing not in _HINTS:
        try:
            _HINTS[thing] = get_type_hints(thing, include_extras=True)
        except NameError as error:
            raise FlowError(
                f"an annotation of '{thing.__qualname__}' cannot be resolved: {error}",
                fix="define or import that name at the top level of the module, outside "
                "'if TYPE_CHECKING'",
            ) from None
    return _HINTS[thing]


def check_argument(
    node: str, path: str, annotation: Any, value: Any, binding: dict[Axis, Axis]
) -> None:
    """A parameter takes a column, or a table, if it is annotated as such, and only then."""
    spec = spec_of(annotation)
    if spec is not None:
        if value is not None or not is_optional(annotation):
            check_column(node, path, spec, value, binding)
    elif is_table(annotation):
        if not isinstance(value, annotation):
            raise FlowError(
                f"node '{node}', input '{path}': expected a {annotation.__name__}, got "
                f"{_kind_of(value)}",
                origin=_origin_of(value),
                fix=f"build a {annotation.__name__}({_fields(annotation)})",
            )
    elif isinstance(value, Column):
        raise FlowError(
            f"node '{node}', input '{path}': got a column ({value.spec}), but this parameter is "
            "not annotated as one",
            origin=value.origin,
            fix="annotate it with Annotated[Tensor, f32(...)], i64(...) or boolean(...)",
        )


def is_table(annotation: Any) -> TypeGuard[type]:
    """True for a dataclass with at least one column."""
    return (
        isinstance(annotation, type)
        and dataclasses.is_dataclass(annotation)
        and any(spec_of(hint) is not None for hint in hints_of(annotation).values())
    )


def check_column(
    node: str, path: str, expected: Spec, value: Any, binding: dict[Axis, Axis]
) -> None:
    """An argument annotated as a column must be one of exactly that dtype and those axes."""
    expected = expected.bound(binding)
    if not isinstance(value, Column):
        raise FlowError(
            f"node '{node}', input '{path}': expected {expected}, got {_kind_of(value)}",
            origin=_origin_of(value),
            fix=_columns_like(expected, value),
        )
    found = expected.binding_to(value.spec, binding)
    if found is None:
        raise FlowError(
            f"node '{node}', input '{path}': expected {expected}, got {value.spec}",
            origin=value.origin,
            fix=_how_to_convert(expected, value.spec),
        )
    binding.update(found)


def _kind_of(value: Any) -> str:
    if isinstance(value, type):
        return f"the class '{value.__name__}' itself; make an instance of it"
    if isinstance(value, TrainHandle):
        return f"the result of '{value.node}', which exists only after the step has run"
    if isinstance(value, RoleStandIn):
        return f"the role '{value.standin_name}'; call one of its methods"
    if dataclasses.is_dataclass(value):
        table = table_type(value).__name__
        return f"the whole table '{table}'"
    return f"a {type(value).__name__} ({value!r})"


def _origin_of(value: Any) -> str | None:
    if isinstance(value, TrainHandle):
        return f"'{value.node}' was called at {value.where.short}"
    return getattr(value, "_origin", None) if dataclasses.is_dataclass(value) else None


def _columns_like(expected: Spec, value: Any) -> str:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return "give a column: a field of a table, or what an op or a role's method returned"
    columns = {
        field.name: column
        for field in dataclasses.fields(value)
        if isinstance(column := getattr(value, field.name), Column)
    }
    fitting = [name for name, column in columns.items() if column.spec == expected]
    if fitting:
        return f"give one of its {expected} columns: {', '.join(fitting)}"
    known = ", ".join(f"{name} {column.spec}" for name, column in columns.items())
    return f"none of its columns is {expected}; it has {known}"


def _how_to_convert(expected: Spec, got: Spec) -> str:
    if expected.axes == got.axes:
        return f"the dtype differs; convert to {expected.dtype.value} inside an op"
    missing = [axis for axis in expected.axes if axis not in got.axes]
    if expected.row_axis == got.row_axis and expected.row_axis and len(missing) == 1:
        name = missing[0].name
        return (
            f"one value per {expected.row_axis.name} was given where one per {name} is needed; "
            f"use an op such as broadcast_over_{name}s(..., mask=...)"
        )
    extra = [axis for axis in got.axes if axis not in expected.axes]
    if expected.row_axis == got.row_axis and expected.row_axis and extra:
        return (
            f"one value per {extra[-1].name} was given where one per {expected.row_axis.name} is "
            "needed; reduce it in an op"
        )
    return (
        f"its rows are {got.row_axis or 'none'}s where {expected.row_axis or 'none'}s are needed; "
        "take the column from a table with those rows, or convert it in an op"
    )


def check_rows(node: str, columns: list[tuple[str, Column]]) -> None:
    """Ragged columns over the same axes must describe the same rows: lengths are per producer."""
    first: dict[tuple[Any, Any], tuple[str, Column]] = {}
    for path, column in columns:
        if column.spec.ragged_axis is None:
            continue
        key = (column.spec.row_axis, column.spec.ragged_axis)
        seen_path, seen = first.setdefault(key, (path, column))
        if seen.rows != column.rows:
            raise FlowError(
                f"node '{node}': inputs '{seen_path}' and '{path}' are both {column.spec.axes[0]} "
                f"by {column.spec.axes[1]}, but of different rows: '{seen.rows}' made the one and "
                f"'{column.rows}' the other",
                origin=f"{seen.origin}; {column.origin}",
                fix="take both from one producer; their lengths differ row by row",
            )


def check_batch(node: str, loss: Any, batch: Any) -> None:
    """A train call's loss must be a `Loss` for exactly the batch dataclass it is given."""
    if not isinstance(loss, Loss):
        raise FlowError(
            f"node '{node}', input 'loss': expected a Loss, got {_kind_of(loss)}",
            fix="pass an instance of a class deriving from Loss[Batch, Output]",
        )
    wanted = _loss_parameters(type(loss))[0]
    if isinstance(wanted, type) and not isinstance(batch, wanted):
        got = f"a {type(batch).__name__}" if dataclasses.is_dataclass(batch) else _kind_of(batch)
        raise FlowError(
            f"node '{node}', input 'batch': {type(loss).__name__} reads a {wanted.__name__}, got "
            f"{got}",
            fix=f"build a {wanted.__name__}({_fields(wanted)}), or use the loss made for this "
            "batch",
        )


def check_output(node: str, loss: Any, method: Any) -> None:
    """A loss must read the output that this role's forward pass makes."""
    parameter = hints_of(method).get("loss")
    wanted = typing.get_args(parameter)[1:] if parameter is not None else ()
    given = _loss_parameters(type(loss))[1]
    made = wanted[0] if wanted else None
    if isinstance(made, type) and isinstance(given, type) and not issubclass(made, given):
        raise FlowError(
            f"node '{node}', input 'loss': {type(loss).__name__} reads a {given.__name__}, but "
            f"this role's model makes a {made.__name__}",
            fix="use a loss made for this kind of role",
        )


def _loss_parameters(loss: type) -> tuple[Any, Any]:
    for base in loss.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            if typing.get_origin(generic) is Loss:
                arguments = typing.get_args(generic)
                return arguments[0], arguments[1]
    return None, None


def _fields(table: type) -> str:
    return ", ".join(f"{field.name}=..." for field in dataclasses.fields(table))


def check_table(node: str, prefix: str, table: Any, binding: dict[Axis, Axis]) -> dict[str, Column]:
    """Every field of a batch that is annotated as a column must hold a fitting one."""
    columns: dict[str, Column] = {}
    hints = hints_of(table_type(table))
    for field in dataclasses.fields(table):
        value = getattr(table, field.name)
        check_argument(node, f"{prefix}.{field.name}", hints[field.name], value, binding)
        if isinstance(value, Column):
            columns[field.name] = value
    return columns


def check_unused(graph: Graph) -> None:
    """Warn about a node whose outputs no other node reads and the step does not return."""
    for node in graph.nodes:
        if node.kind is NodeKind.TRAIN or graph.consumers(node.name):
            continue
        if node.name not in graph.results:
            names = ", ".join(f"'{node.name}.{output.name}'" for output in node.outputs)
            warnings.warn(
                f"{node.where}\n{names} of '{node.name}' is computed but nothing reads it; drop "
                "the call or return the column from the step",
                FlowWarning,
                stacklevel=3,
            )


def check_lag(
    graph: Graph, max_lag: int, segment_tokens: int = 0, *, in_flight: bool = False
) -> None:
    """Refuse a loss on rollouts of older weights that does not read how they were sampled.

    Raises:
        FlowError: If a train call reads no behavior column of a rollout of its own role.
    """
    if max_lag == 0 and segment_tokens == 0:
        return
    old = f"up to {max_lag} optimizer step(s) old (Schedule.max_lag={max_lag})"
    if segment_tokens:
        old = f"begun under older weights (Schedule.segment_tokens={segment_tokens})"
    change = f"Schedule({'segment_tokens' if segment_tokens else 'max_lag'}=0)"
    if in_flight:
        old = "by several versions of the weights (Schedule.in_flight)"
        change = "Schedule(in_flight=False, max_lag=0)"
    for node in graph.nodes:
        if node.kind is not NodeKind.TRAIN or _tolerates_lag(node):
            continue
        for rollout in _own_rollouts(graph, node):
            if _reads_behavior(graph, node, rollout):
                continue
            columns = [output.name for output in rollout.outputs if output.behavior]
            name = columns[0] if columns else "behavior_logprob"
            raise FlowError(
                f"'{node.name}' may see samples {old} but reads no '{name}', so the update "
                "cannot correct for it.",
                where=node.where,
                fix=f"Pass {name} from '{rollout.name}', annotated as Behavior() in every table "
                f"it goes through, or set {change}.",
            )


def check_filtered(graph: Graph) -> None:
    """A loss must not compare a trainer's log-probabilities with those of a filtered distribution.

    What a rollout is asked for says by `filtered_by`, a text such as "top_p=0.9", that it samples
    from another distribution than the role's own.
    """
    for node in graph.nodes:
        if node.kind is not NodeKind.TRAIN:
            continue
        for rollout in _own_rollouts(graph, node):
            filtered_by = _filtered_by(rollout)
            if filtered_by and _reads_behavior(graph, node, rollout):
                raise FlowError(
                    f"'{node.name}' compares log-probabilities of the whole distribution with "
                    f"those of '{rollout.name}', which samples from a filtered one "
                    f"({filtered_by}); nothing makes up for what is never sampled.",
                    where=node.where,
                    fix=f"Leave out {filtered_by}; or set algorithm.cfg.correction.mode=none "
                    "where the algorithm has a correction, to compare two passes of the trainer "
                    "and leave the filter uncorrected.",
                )


def _filtered_by(rollout: Node) -> str:
    given = (argument for _, argument in rollout.arguments if isinstance(argument, Constant))
    return next((text for c in given if (text := getattr(c.value, "filtered_by", ""))), "")


def _own_rollouts(graph: Graph, node: Node) -> list[Node]:
    makers: set[str] = set()
    todo = [ref for _, ref in node.inputs]
    while todo:
        ref = todo.pop()
        rows = next(o.rows for o in graph[ref.node].outputs if o.name == ref.column)
        if rows not in makers:
            makers.add(rows)
            if graph[rows].kind is NodeKind.OP:
                todo += [ref for _, ref in graph[rows].inputs]
    return [
        other
        for other in graph.nodes
        if other.name in makers
        and other.kind is NodeKind.ROLLOUT
        and any(read.role == node.role for read in other.reads)
    ]


def _reads_behavior(graph: Graph, node: Node, rollout: Node) -> bool:
    for _, ref in node.inputs:
        maker = graph[ref.node]
        marked = any(output.behavior and output.name == ref.column for output in maker.outputs)
        passed_on = maker.kind is NodeKind.OP and rollout.name in graph.ancestors(ref.node)
        if marked and (maker.name == rollout.name or passed_on):
            return True
    return False


def _tolerates_lag(node: Node) -> bool:
    arguments: Mapping[str, Any] = dict(node.arguments)
    loss = arguments.get("loss")
    return isinstance(loss, Constant) and bool(getattr(loss.value, "tolerates_lag", False))
