"""Recording: from a typed step function to a `Graph`.

`build` calls the step function once with stand-ins. Every call of an `@op` function or of a role's
method appends a node; everything is checked at that line, so an error points at the user's code.
Prints, clocks, randomness and branches on the config happen at build time, once.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from ..errors import FlowError, Where, caller
from ..kinds import NodeKind, WeightRead
from .axes import Axis, Behavior, GroupId, Spec, has_mark, spec_of
from .check import (
    check_argument,
    check_batch,
    check_filtered,
    check_output,
    check_rows,
    check_table,
    check_unused,
    hints_of,
    is_table,
)
from .graph import Argument, Constant, Graph, Node, OutputColumn, Ref, RoleRef, TableArgument
from .proxies import (
    Column,
    RoleStandIn,
    TrainHandle,
    nearest,
    standins_in,
    table_standin,
    table_type,
)
from .role import CallSpec, Role, Scope

P = ParamSpec("P")
R = TypeVar("R")


def op(*, scope: Scope, makes_rows: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a pure function over columns usable as a node; called with tensors it simply runs.

    Args:
        scope: "row" if each output row depends on its own input row only, "group" if on the rows of
            its group, "batch" if on all rows. It decides what may run before the batch is complete.
        makes_rows: True if the output's rows are not the input's (a filter, a resampling). Such an
            op may take rows of several producers, to join them.

    Example:
        >>> @op(scope="row")
        ... def double(score: PerSample) -> PerSample:
        ...     return 2 * score
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            recorder = _recorder_for(args, kwargs)
            if recorder is None:
                return function(*args, **kwargs)
            return recorder.record_op(wrapper, scope, makes_rows, args, kwargs)

        return wrapper

    return decorate


def _recorder_for(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorder | None:
    # The recorder, if a step is being recorded and the arguments hold one of its stand-ins. A
    # function of its own so that an op refers to it by name: what a script's op refers to by value
    # travels with it to other processes, and a `ContextVar` cannot.
    recorder = _RECORDER.get()
    if recorder is None or next(standins_in((args, kwargs)), None) is None:
        return None
    return recorder


def build(step: Callable[..., Any], *, name: str | None = None, **constants: Any) -> Graph:
    """Record a step function into a graph. No model and no device is touched.

    Args:
        step: Parameters annotated with a table become sources, with a role contract become roles;
            every other parameter needs a value here or a default.
        name: The graph's name; the function's by default.
        **constants: Values of the remaining parameters, such as `cfg`.

    Returns:
        The frozen graph.

    Raises:
        FlowError: For whatever in the step cannot be a graph, at the line concerned.
    """
    recorder = Recorder(name or step.__name__)
    arguments: dict[str, Any] = {}
    hints = hints_of(step)
    parameters = inspect.signature(step).parameters
    for unknown in constants.keys() - parameters.keys():
        raise FlowError(
            f"'{step.__name__}' has no parameter '{unknown}'", fix=nearest(unknown, parameters)
        )
    for parameter in parameters.values():
        annotation = hints.get(parameter.name)
        if parameter.name in constants:
            arguments[parameter.name] = constants[parameter.name]
        elif isinstance(annotation, type) and issubclass(annotation, Role):
            arguments[parameter.name] = recorder.add_role(parameter.name, annotation)
        elif is_table(annotation):
            arguments[parameter.name] = recorder.add_source(
                parameter.name, annotation, _defined_at(step)
            )
        elif parameter.default is inspect.Parameter.empty:
            raise FlowError(
                f"parameter '{parameter.name}' of '{step.__name__}' is neither a table nor a role "
                "and has no value",
                where=_defined_at(step),
                fix=f"pass it: build({step.__name__}, {parameter.name}=...)",
            )
    before = _RECORDER.set(recorder)
    try:
        result = step(**arguments)
    finally:
        _RECORDER.reset(before)
    graph = recorder.finish(result)
    check_unused(graph)
    check_filtered(graph)
    return graph


def _defined_at(step: Callable[..., Any]) -> Where:
    code = step.__code__
    return Where(code.co_filename, code.co_firstlineno, f"def {step.__name__}(...)")


_RECORDER: ContextVar[Recorder | None] = ContextVar("penstock_recorder", default=None)


def is_recording() -> bool:
    """True if a step function is being recorded in this thread."""
    return _RECORDER.get() is not None


class Recorder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.roles: dict[str, type[Role]] = {}
        self.sources: dict[str, type] = {}
        self._calls: dict[str, int] = {}
        self._trains: dict[str, int] = {}

    def add_role(self, name: str, contract: type[Role]) -> RoleStandIn:
        self.roles[name] = contract
        return RoleStandIn(name, contract, self.record_call)

    def add_source(self, name: str, table: type, where: Where) -> Any:
        """Declare a table that every step reads from the data."""
        self.sources[name] = table
        node_name, ordinal = self._unique(name)
        outputs = tuple(_outputs_of(table, {}, node_name, True, {}, where))
        node = Node(node_name, NodeKind.SOURCE, "row", ordinal, where, outputs=outputs,
                    output_table=table)  # fmt: skip
        return self._append(node)

    def record_op(
        self,
        function: Callable[..., Any],
        scope: Scope,
        makes_rows: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a call of an op and return stand-ins for its outputs."""
        name, ordinal = self._unique(function.__name__)
        given = self._arguments(name, function, args, kwargs, method=False)
        if not makes_rows:
            check_rows(name, given.columns)
        made = self._returns(name, function, given, makes_rows)
        return self._call(name, ordinal, NodeKind.OP, scope, given, made, function=function)

    def record_call(
        self,
        role: str,
        function: Callable[..., Any],
        spec: CallSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a call of a role's method and return stand-ins for its outputs.

        A train call raises the version of the role's weights that later calls read.
        """
        name, ordinal = self._unique(f"{role}.{function.__name__}")
        is_train, rollout = spec.kind is NodeKind.TRAIN, spec.kind is NodeKind.ROLLOUT
        if is_train:
            bound = _bind(name, function, (None, *args), kwargs).arguments
            # Without a loss it learns by a rule of its own.
            if "loss" in inspect.signature(function).parameters:
                check_batch(name, bound.get("loss"), bound.get("batch"))
                check_output(name, bound.get("loss"), function)
        given = self._arguments(name, function, args, kwargs, method=True)
        check_rows(name, given.columns)
        made: _Made = (None, ())
        if not is_train:
            made = self._returns(name, function, given, makes_rows=rollout)
        given.roles.insert(0, role)
        method = function.__name__
        made_node = self._call(
            name, ordinal, spec.kind, spec.scope, given, made, role=role, method=method
        )
        if is_train:
            self._trains[role] = self._version(role) + 1
        return made_node

    def _call(
        self,
        name: str,
        ordinal: int,
        kind: NodeKind,
        scope: Scope,
        given: _Given,
        made: _Made,
        **called: Any,
    ) -> Any:
        table, outputs = made
        node = Node(
            name,
            kind,
            scope,
            ordinal,
            caller(),
            arguments=tuple(given.arguments),
            outputs=outputs,
            output_table=table,
            reads=tuple(
                WeightRead(role, self._version(role), kind is NodeKind.ROLLOUT)
                for role in dict.fromkeys(given.roles)
            ),
            **called,
        )
        return self._append(node)

    def finish(self, result: Any) -> Graph:
        """Freeze what was recorded; `result` is what the step function returned."""
        returned = list(_returned(result))
        names = tuple(dict.fromkeys(one if isinstance(one, str) else one.node for one in returned))
        columns = tuple(dict.fromkeys(one for one in returned if isinstance(one, Ref)))
        # A role that this config does not ask for anything needs no worker and no model.
        asked = {read.role for node in self.nodes for read in node.reads}
        roles = {name: kind for name, kind in self.roles.items() if name in asked}
        return Graph(self.name, tuple(self.nodes), roles, self.sources, names, columns)

    def _version(self, role: str) -> int:
        return self._trains.get(role, 0)

    def _unique(self, base: str) -> tuple[str, int]:
        ordinal = self._calls.get(base, 0)
        self._calls[base] = ordinal + 1
        return (base if ordinal == 0 else f"{base}#{ordinal + 1}"), ordinal

    def _append(self, node: Node) -> Any:
        self.nodes.append(node)
        if node.kind is NodeKind.TRAIN:
            return TrainHandle(node.name, node.where)
        columns = {
            output.name: Column(Ref(node.name, output.name), output.spec, output.rows, node.where)
            for output in node.outputs
        }
        if node.output_table is None:
            return columns["out"]
        verb = "declared" if node.kind is NodeKind.SOURCE else "called"
        origin = f"'{node.name}' was {verb} at {node.where.short}"
        return table_standin(node.output_table, columns, origin)

    def _arguments(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        method: bool,
    ) -> _Given:
        bound = _bind(name, function, (None, *args) if method else args, kwargs)
        if method:
            bound.arguments.pop("self")
        hints = hints_of(function)
        given = _Given()
        for parameter, value in bound.arguments.items():
            check_argument(name, parameter, hints.get(parameter), value, given.binding)
            given.arguments.append((parameter, self._freeze(name, parameter, value, given)))
        return given

    def _freeze(self, node: str, path: str, value: Any, given: _Given) -> Argument:
        if isinstance(value, Column):
            given.columns.append((path, value))
            return value.ref
        if isinstance(value, RoleStandIn):
            given.roles.append(value.standin_name)
            return RoleRef(value.standin_name)
        if isinstance(value, TrainHandle):
            raise FlowError(
                f"node '{node}', input '{path}': expected data, got the result of '{value.node}'",
                fix="metrics exist only after the step has run; return them from the step instead",
            )
        if dataclasses.is_dataclass(value) and is_table(table_type(value)):
            table = table_type(value)
            check_table(node, path, value, given.binding)
            fields = [
                (f.name, self._freeze(node, f"{path}.{f.name}", getattr(value, f.name), given))
                for f in dataclasses.fields(table)
            ]
            return TableArgument(table, tuple(fields))
        hidden = next(standins_in(value), None)
        if hidden is not None:
            inside = "" if hidden is value else f" inside a {type(value).__name__}"
            raise FlowError(
                f"node '{node}', input '{path}': got {hidden!r}{inside}",
                fix="give every column its own parameter or table field, and call a role's methods",
            )
        return Constant(value)

    def _returns(
        self,
        name: str,
        function: Callable[..., Any],
        given: _Given,
        makes_rows: bool,
    ) -> _Made:
        annotation = hints_of(function).get("return", inspect.Parameter.empty)
        rows = {} if makes_rows else _rows_by_axes([column for _, column in given.columns])
        if is_table(annotation):
            table: Any = annotation
            return table, tuple(_outputs_of(table, rows, name, makes_rows, given.binding))
        spec = spec_of(annotation)
        if spec is None:
            shown = getattr(annotation, "__name__", repr(annotation))
            what = (
                f"'{name}' has no return annotation"
                if annotation is inspect.Parameter.empty
                else f"'{name}' is annotated to return {shown}, which is neither a column nor a "
                "table of columns"
            )
            raise FlowError(
                what,
                origin=f"it is defined at {_defined_at(inspect.unwrap(function)).short}",
                fix="annotate the return type with Annotated[Tensor, f32(...)] or a dataclass of "
                "such columns",
            )
        spec = spec.bound(given.binding)
        _check_bound(f"{name}.out", spec)
        made = name if makes_rows else _rows_for(spec, rows, name)
        marks = {
            "group_id": has_mark(annotation, GroupId),
            "behavior": has_mark(annotation, Behavior),
        }
        return None, (OutputColumn("out", spec, made, **marks),)


_Made = tuple[type | None, tuple[OutputColumn, ...]]


@dataclass
class _Given:
    arguments: list[tuple[str, Argument]] = field(default_factory=list[tuple[str, Argument]])
    columns: list[tuple[str, Column]] = field(default_factory=list[tuple[str, Column]])
    roles: list[str] = field(default_factory=list[str])
    binding: dict[Axis, Axis] = field(default_factory=dict[Axis, Axis])


def _check_bound(column: str, spec: Spec) -> None:
    loose = next((axis for axis in spec.axes if axis.free), None)
    if loose is not None:
        raise FlowError(
            f"'{column}' is {spec}, whose axis '{loose}' is free, and no input says what it "
            "stands for",
            fix="annotate an input over the same free axis, or name the axis in the output",
        )


def _bind(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        parameters = list(inspect.signature(function).parameters)
        shown = ", ".join(parameter for parameter in parameters if parameter != "self")
        raise FlowError(f"node '{name}': {error}", fix=f"its parameters are ({shown})") from None


def _rows_by_axes(columns: list[Column]) -> dict[str, str]:
    rows: dict[str, str] = {}
    for column in columns:
        spec = column.spec
        if spec.row_axis is None:
            continue
        if spec.ragged_axis is not None:
            rows.setdefault(f"{spec.row_axis},{spec.ragged_axis}", column.rows)
        rows.setdefault(str(spec.row_axis), column.rows)
    return rows


def _rows_for(spec: Spec, rows: dict[str, str], name: str) -> str:
    if spec.row_axis is None:
        return name
    if spec.ragged_axis is not None:
        return rows.get(f"{spec.row_axis},{spec.ragged_axis}", name)
    return rows.get(str(spec.row_axis), name)


def _outputs_of(
    table: type,
    rows: dict[str, str],
    name: str,
    makes_rows: bool,
    binding: Mapping[Axis, Axis],
    where: Where | None = None,
) -> Iterator[OutputColumn]:
    for field_name, hint in hints_of(table).items():
        spec = spec_of(hint)
        if spec is None:
            raise FlowError(
                f"table '{table.__name__}', field '{field_name}' is not a column",
                where=where,
                fix="annotate it with Annotated[Tensor, f32(...)], i64(...) or boolean(...)",
            )
        spec = spec.bound(binding)
        _check_bound(f"{name}.{field_name}", spec)
        yield OutputColumn(
            field_name,
            spec,
            name if makes_rows else _rows_for(spec, rows, name),
            group_id=has_mark(hint, GroupId),
            behavior=has_mark(hint, Behavior),
        )


def _returned(result: Any) -> Iterator[str | Ref]:
    if isinstance(result, TrainHandle):
        yield result.node
    elif isinstance(result, Column):
        yield result.ref
    elif isinstance(result, (tuple, list, dict)):
        for item in result.values() if isinstance(result, dict) else result:
            yield from _returned(item)
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        for one in dataclasses.fields(result):
            yield from _returned(getattr(result, one.name))
