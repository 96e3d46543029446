"""Stand-ins: what a step function is handed while it is recorded.

They imitate columns, tables and train results far enough for a step to be written naturally, and
refuse everything else with our message: control flow on a column, arithmetic outside an op, a
misspelt name. None of it reaches torch, and none of it survives recording.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from ..errors import FlowError, Where, closest
from .axes import Spec
from .graph import Ref
from .role import CallSpec, Role, call_spec


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` if something known is close to `name`, else a list of what is known."""
    names = sorted(known)
    found = closest(name, names)
    if found is not None:
        return f"did you mean '{found}'?"
    return f"known: {', '.join(names)}" if names else "there are none"


def _refused(what: str, fix: str) -> Callable[..., Any]:
    def refuse(self: Column, *_: object, **__: object) -> NoReturn:
        self._refuse(what, fix)  # pyright: ignore[reportPrivateUsage] - the class is made of these

    return refuse


class Column:
    """Stands for a column while a step is recorded."""

    __slots__ = ("ref", "rows", "spec", "where")
    __hash__ = object.__hash__

    def __init__(self, ref: Ref, spec: Spec, rows: str, where: Where) -> None:
        self.ref, self.spec, self.rows, self.where = ref, spec, rows, where

    def __repr__(self) -> str:
        return f"<column '{self.ref}' {self.spec}>"

    @property
    def origin(self) -> str:
        return f"'{self.ref}' was produced at {self.where.short}"

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise FlowError(
            f"{what} the column '{self.ref}' ({self.spec})", origin=self.origin, fix=fix
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(
            f"'.{name}' was asked of",
            "a column has no values while the step is recorded; compute in an @op function",
        )

    __bool__ = _refused(
        "an 'if', 'while', 'and', 'or' or 'not' looked at",
        "a step is recorded once and cannot branch on data; decide inside an @op function",
    )
    __iter__ = _refused("a loop or unpacking went over", "loop over rows inside an @op function")
    __len__ = _refused("len() was asked of", "lengths are known inside an @op function only")
    __getitem__ = _refused("an index was taken of", "index inside an @op function")
    __setitem__ = _refused(
        "an item was set in", "columns do not change; make a new one in an @op function"
    )
    __contains__ = _refused("'in' looked into", "look inside an @op function")
    __index__ = _refused("something was indexed with", "index inside an @op function")
    __float__ = _refused("float() was asked of", "compute in an @op function")
    __int__ = _refused("int() was asked of", "compute in an @op function")
    __call__ = _refused("a call was made of", "a column is data; drop the parentheses")
    __array__ = _refused("numpy was given", "call numpy inside an @op function")

    def __format__(self, format_spec: str) -> str:
        if not format_spec:
            return repr(self)
        return self._refuse(
            f"the format '{format_spec}' was asked of", "print inside an @op function"
        )

    def __array_ufunc__(self, ufunc: Any, *args: object, **kwargs: object) -> Any:
        return self._refuse(
            f"numpy.{ufunc.__name__} was given", "call numpy inside an @op function"
        )

    def __array_function__(self, func: Any, *args: object, **kwargs: object) -> Any:
        return self._refuse(f"numpy.{func.__name__} was given", "call numpy inside an @op function")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        column = next(a for a in _flat((*args, *(kwargs or {}).values())) if isinstance(a, Column))
        name = getattr(func, "__name__", str(func))
        return column._refuse(f"torch.{name} was given", "call torch inside an @op function")

    _arithmetic = _refused(
        "arithmetic or comparison was done on", "move it into an @op function and call that"
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _arithmetic
    __mod__ = __rmod__ = __pow__ = __rpow__ = __divmod__ = __rdivmod__ = _arithmetic
    __matmul__ = __rmatmul__ = __and__ = __rand__ = __or__ = __ror__ = _arithmetic
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _arithmetic
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = _arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = _arithmetic
    __eq__ = __ne__ = _arithmetic  # pyright: ignore[reportAssignmentType] - it never returns


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


class TrainHandle:
    """Stands for the metrics of a train call, which exist only after the step has run."""

    __slots__ = ("node", "where")

    def __init__(self, node: str, where: Where) -> None:
        self.node, self.where = node, where

    def __repr__(self) -> str:
        return f"<result of '{self.node}'>"

    def _refuse(self, what: str) -> NoReturn:
        raise FlowError(
            f"{what} the result of '{self.node}'",
            origin=f"'{self.node}' was called at {self.where.short}",
            fix="a train call returns metrics after the step has run; return it from the step "
            "function and read them from the engine's results",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(f"'.{name}' was asked of")

    def __bool__(self) -> bool:
        return self._refuse("an 'if', 'while', 'and', 'or' or 'not' looked at")

    def __iter__(self) -> Iterator[Any]:
        return self._refuse("a loop or unpacking went over")

    def __getitem__(self, item: object) -> Any:
        return self._refuse("an index was taken of")


RecordCall = Callable[[str, Callable[..., Any], CallSpec, tuple[Any, ...], dict[str, Any]], Any]
"""Appends the node of a role's call: role, method, its declaration, arguments."""


class RoleStandIn:
    """Stands for a role while a step is recorded: its contract's calls append nodes."""

    __slots__ = ("_contract", "_record", "standin_name")

    def __init__(self, name: str, contract: type[Role], record: RecordCall) -> None:
        self.standin_name, self._contract, self._record = name, contract, record

    def __repr__(self) -> str:
        return f"<role '{self.standin_name}'>"

    def __getattr__(self, method: str) -> MethodStandIn:
        if method.startswith("_"):
            raise AttributeError(method)
        function = getattr(self._contract, method, None)
        spec = call_spec(function)
        if function is None or spec is None:
            raise FlowError(
                f"role '{self.standin_name}' is a {self._contract.__name__}, which has no "
                f"'{method}'",
                fix=nearest(method, _call_names(self._contract)),
            )
        return MethodStandIn(self.standin_name, function, spec, self._record)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise FlowError(
            f"the role '{self.standin_name}' was called as if it were a function",
            fix=f"call one of its methods: {', '.join(_call_names(self._contract))}",
        )


def _call_names(contract: type[Role]) -> list[str]:
    return [name for name in dir(contract) if call_spec(getattr(contract, name, None))]


class MethodStandIn:
    """Stands for a role's method until it is called."""

    __slots__ = ("_function", "_record", "_role", "_spec")

    def __init__(
        self, role: str, function: Callable[..., Any], spec: CallSpec, record: RecordCall
    ) -> None:
        self._role, self._function, self._spec, self._record = role, function, spec, record

    def __repr__(self) -> str:
        return f"<uncalled method '{self._role}.{self._function.__name__}'>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._record(self._role, self._function, self._spec, args, kwargs)


def standins_in(value: Any) -> Iterator[Column | TrainHandle | RoleStandIn | MethodStandIn]:
    """Every stand-in in a value, however deep in lists, dicts and dataclasses."""
    if isinstance(value, (Column, TrainHandle, RoleStandIn, MethodStandIn)):
        yield value
        return
    inside: Iterable[Any] = ()
    if isinstance(value, (list, tuple, set, frozenset)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for item in inside:
        yield from standins_in(item)


_STANDIN_TYPES: dict[type, type] = {}


def table_standin(table: type, columns: dict[str, Column], origin: str) -> Any:
    """An instance of `table` whose fields are columns and whose other names are refused clearly."""
    if table not in _STANDIN_TYPES:
        _STANDIN_TYPES[table] = type(table.__name__, (table,), {"__getattr__": _missing_field})
    instance = _STANDIN_TYPES[table](**columns)
    object.__setattr__(instance, "_origin", origin)
    return instance


def table_type(value: Any) -> type:
    """The dataclass a table or its stand-in is an instance of."""
    kind = type(value)
    return kind.__mro__[1] if kind in _STANDIN_TYPES.values() else kind


def _missing_field(self: Any, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    table = type(self).__mro__[1]
    fields = [field.name for field in dataclasses.fields(table)]
    raise FlowError(
        f"table '{table.__name__}' has no column '{name}'",
        origin=self._origin,
        fix=nearest(name, fields),
    )
