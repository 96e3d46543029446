"""Option classes: frozen dataclasses that pydantic checks when an instance is made.

An annotation says which values a field takes. Types are strict: an integer stands for a float, and
nothing else is converted. Numbers under a bound are finite. The words for what is refused are here,
for Python and for configurations alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ArgsKwargs, PydanticKnownError
from typing_extensions import dataclass_transform

T = TypeVar("T")

_MOST_BITS = 63
"""Most bits of an integer: a larger one is a typing error, and no tensor holds it."""
_MOST = 2**_MOST_BITS - 1


def _python_number(value: object, info: ValidationInfo) -> object:
    # Strict pydantic takes whatever has `__float__`, a number of numpy as well.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PydanticKnownError("float_type")
    if isinstance(value, int) and abs(value) > _MOST and info.mode == "python":
        raise PydanticKnownError("less_than_equal", {"le": _MOST})
    return value


Int = Annotated[int, Ge(-_MOST), Le(_MOST)]
PositiveInt = Annotated[int, Ge(1), Le(_MOST)]
NonNegativeInt = Annotated[int, Ge(0), Le(_MOST)]
FiniteFloat = Annotated[float, AllowInfNan(False), BeforeValidator(_python_number)]
PositiveFloat = Annotated[FiniteFloat, Gt(0)]
NonNegativeFloat = Annotated[FiniteFloat, Ge(0)]
Fraction = Annotated[FiniteFloat, Ge(0), Le(1)]
PositiveFraction = Annotated[FiniteFloat, Gt(0), Le(1)]
FractionBelowOne = Annotated[FiniteFloat, Ge(0), Lt(1)]

_CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
_BOUNDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
RANGE_ERRORS = frozenset(
    {"greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number"}
)
"""Pydantic's names of errors about a number outside its bounds."""
_SIGNATURE_ERRORS = frozenset(
    {"missing_argument", "missing_keyword_only_argument", "unexpected_keyword_argument"}
    | {"unexpected_positional_argument"}
)
_WORDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "bool_type": "true or false",
    "dict_type": "a mapping of keys",
    "mapping_type": "a mapping of keys",
    "dataclass_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
    "finite_number": "a finite number",
}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def option_class(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with keyword arguments, whose instances check their fields.

    A wrong value is refused with a ValueError such as "epochs is 0; expected at least 1". What a
    plain dataclass inherits from an option class is checked as well.
    """
    options: Any = dataclass(frozen=True, kw_only=True)(cls)
    options.__pydantic_config__ = _CONFIG
    plain_init, own_check = options.__init__, getattr(options, "__post_init__", None)

    @wraps(plain_init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        kwargs = _with_tuples(options, kwargs)
        try:
            _validator(options).validate_python(ArgsKwargs(args, kwargs), self_instance=self)
        except ValidationError as error:
            if any(one["type"] in _SIGNATURE_ERRORS for one in error.errors()):
                plain_init(self, *args, **kwargs)  # raises what Python says of a wrong call
            raise _refusal(options, kwargs, error) from None

    def __post_init__(self: Any) -> None:
        if type(self).__init__ is not getattr(type(self), "_checked_init", None):
            check_given(options, _inherited(options, self))
        if own_check is not None:
            own_check(self)

    options._plain_init = plain_init
    options.__init__ = options._checked_init = checked_init
    options.__post_init__ = __post_init__
    return options


def is_option_class(kind: type) -> bool:
    """Return whether a class was made by `option_class`, or inherits from one that was."""
    return getattr(kind, "__pydantic_config__", None) is _CONFIG


def _inherited(kind: type, instance: object) -> dict[str, Any]:
    """Values that a plain dataclass has for fields of the option class it inherits from.

    Fields of which it changes the type are left out, numbers with bounds excepted.
    """
    types = type(instance).__mro__
    own: set[str] = set()
    for one in types[: types.index(kind)]:
        own.update(vars(one).get("__annotations__", ()))
    return {
        name: value
        for name, value in vars(instance).items()
        if value is not None and (name not in own or _bounds(kind, name) is not None)
    }


@cache
def _validator(kind: type) -> Any:
    return TypeAdapter(kind).validator


def _with_tuples(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(cast("list[Any]", value))
        if isinstance(value, list) and name in _tuples(kind)
        else value
        for name, value in given.items()
    }


@cache
def _tuples(kind: type) -> frozenset[str]:
    hints = get_type_hints(kind)
    return frozenset(
        name
        for name, hint in hints.items()
        if tuple in {get_origin(part) for part in (hint, *get_args(hint))}
    )


def check_given(kind: type, given: Mapping[str, Any]) -> None:
    """Check values of some fields of an option class without making an instance.

    Raises:
        ValueError: As the class itself, for the first field with a wrong value.
    """
    names = {one.name for one in fields(cast("Any", kind))}
    given = _with_tuples(kind, {name: value for name, value in given.items() if name in names})
    alone: Any = _fields_alone(kind)
    try:
        _validator(alone).validate_python(ArgsKwargs((), given), self_instance=alone())
    except ValidationError as error:
        raise _refusal(kind, given, error) from None


def check_early(kind: Any, given: Mapping[str, Any], later: Iterable[str]) -> None:
    """Check options of a dataclass before other fields are known; its own checks see None in them.

    Raises:
        ValueError: As the class itself.
    """
    if is_option_class(kind):
        check_given(kind, given)
    init = vars(kind).get("_plain_init", kind.__init__)
    init(object.__new__(kind), **dict.fromkeys(later), **given)


@cache
def _fields_alone(kind: Any) -> type:
    hints = get_type_hints(kind, include_extras=True)
    names = [one.name for one in fields(kind) if one.init]
    alone: Any = type(kind.__name__, (), dict.fromkeys(names))
    alone.__annotations__ = {name: hints[name] for name in names}
    alone.__pydantic_config__ = _CONFIG
    return dataclass(kw_only=True)(alone)


def _refusal(kind: type, given: Mapping[str, Any], error: ValidationError) -> ValueError:
    first, *others = error.errors(include_url=False)
    if first["type"] == "value_error":
        return cast("ValueError", first.get("ctx", {})["error"])  # of the class's own checks
    name = str(first["loc"][0])
    if first["type"] in RANGE_ERRORS:
        return ValueError(out_of_range(kind, name, given[name]))
    same = [first, *(one for one in others if one["loc"][0] == name)]
    expected = " or ".join(dict.fromkeys(map(expected_by, same)))
    if _bounds(kind, name) is not None and not isinstance(first["input"], int | float):
        expected = "a number"
    return ValueError(f"{name} is {given[name]!r}; expected {expected}")


def out_of_range(kind: type, name: str, value: Any) -> str:
    """Say that a number is not finite or not within a field's bounds; of a tuple, that one is."""
    items = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)
    most = max(item.bit_length() if isinstance(item, int) else 0 for item in items)
    if most > _MOST_BITS:
        return f"{name} is of {most} bits; expected at most {_MOST_BITS}"
    if not all(math.isfinite(item) for item in items):
        return f"{name} is {value}; expected a finite number"
    bounds = _bounds(kind, name) or {}
    expected = " and ".join(
        f"{words} {bounds[mark]:g}" for mark, words in _BOUNDS.items() if mark in bounds
    )
    return f"{name} is {value}; expected {expected}"


def _bounds(kind: type, name: str) -> dict[type, float] | None:
    marks = [*_marks(get_type_hints(kind, include_extras=True).get(name))]
    found = {type(mark): mark for mark in marks if type(mark) in _BOUNDS}
    values = {mark: getattr(found[mark], mark.__name__.lower()) for mark in found}
    return {k: v for k, v in values.items() if abs(v) != _MOST} if marks else None


def _marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for argument in get_args(annotation):
        yield from _marks(argument)


def expected_by(error: Any) -> str:
    """Say in our words what pydantic expected where it found an error."""
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        return f"one of {context['expected']}"
    if error["type"] == "too_short":
        return f"at least {context['min_length']} items"
    if error["type"] == "string_pattern_mismatch":
        return f"a text that matches {context['pattern']}"
    if "multiple_of" in context:
        return f"a multiple of {context['multiple_of']}"
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if name in context:
            bound = context[name]
            return f"{words} {int(bound) if bound == int(bound) else bound}"
    return _WORDS.get(error["type"], str(error["msg"]).removeprefix("Input should be "))
