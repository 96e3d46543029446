"""From plain data to typed config, with messages a person can act on.

`validated(kind, data, at)` turns what Hydra composed into an instance of a dataclass or a pydantic
model. Types are strict: nothing is converted silently but an integer to a float. What is wrong is
said with its full key, what was expected, what came, and what the key means.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from os.path import commonprefix
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from ..dataflow.errors import ConfigError, closest, nearest
from ..dataflow.options import RANGE_ERRORS, expected_by, is_option_class, out_of_range
from .references import load_object

T = TypeVar("T")

RENAMED: Mapping[str, str] = {
    "agreement": "mismatch",
    "task.normalisation": "task.normalization",
    "tracker.tensorboard": "tracker.kind",
    "*.normalise_advantages": "normalize_advantages",
    "*.options.ring": "num_overlapped",
    "*.verifier_options.allow_unconfined": "minimum",
    "model.architecture.memory": "model.architecture.recurrent_units",
}
"""Key as it was -> as it is. After `*.`, keys at any depth, of which the last is renamed."""


def validated(kind: type[T], data: Mapping[str, Any], at: str = "") -> T:
    """Make an instance of a dataclass or a pydantic model from plain data.

    Refused with a `ConfigError` are a key that has another name now, an unknown key, a missing key,
    and a value of the wrong type or out of range; of the latter two every one is listed.
    """
    check_renamed(data, at)
    _check_keys(kind, data, at, (kind, data, at))
    _check_texts(data, at)
    data = _over_defaults(kind, data)
    try:
        # JSON is the one input for which strict validation still takes a mapping for a dataclass.
        return _adapter(kind).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        faults = [_fault(kind, data, at, *same) for same in _by_key(data, error)]
        raise ConfigError("\n".join(dict.fromkeys(faults))) from None


def check_renamed(data: Mapping[str, Any], at: str = "") -> None:
    """Refuse keys that have another name now, however deep they stand."""
    if renamed := [*_renamed(data, at)]:
        raise ConfigError(
            "\n".join(f"'{old}' is now '{new}'" for old, new in renamed)
            + "\n    rename it where it is written: on the command line, in a YAML file, or in "
            "config.yaml of a run that is resumed"
        )


def _renamed(data: Mapping[str, Any], at: str) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        path = _join(at, str(key))
        deep = next((old for old in RENAMED if old[0] == "*" and path.endswith(old[1:])), None)
        if path in RENAMED:
            yield path, RENAMED[path]
        elif deep is not None:
            yield path, _join(at, RENAMED[deep])
        elif isinstance(value, Mapping):
            yield from _renamed(typing.cast("Mapping[str, Any]", value), path)


def check_finite(data: Any, at: str) -> None:
    """Refuse numbers that are none, or infinite, where types say nothing: null would be written."""
    for key, value in _leaves(data, at):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"'{key}': expected a finite number, got {value}")


def _check_texts(data: Any, at: str) -> None:
    for key, value in _leaves(data, at):
        if not isinstance(value, str):
            continue
        if "\0" in value:
            raise ConfigError(f"'{key}': a text holds the character 0, which no path can hold")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"'{key}': character {error.start + 1} of {value[:40]!r} is half of a surrogate "
                "pair, or a byte that is not UTF-8\n    write it as UTF-8"
            ) from None


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield every value that holds no others, and every key, with the key under which it stands."""
    if isinstance(value, Mapping):
        for key, inner in typing.cast("Mapping[Any, Any]", value).items():
            yield at, str(key)
            yield from _leaves(inner, _join(at, str(key)))
    elif isinstance(value, list):
        for inner in typing.cast("list[Any]", value):
            yield from _leaves(inner, at)
    else:
        yield at, value


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    _close(kind)
    return TypeAdapter(kind)


_CLOSED: set[type] = set()


def _close(kind: Any) -> None:
    """Have pydantic refuse keys that a dataclass does not have, however deep."""
    # Of a union it takes the first member that does not complain: one that leaves the key out
    # instead of the one whose key it is.
    for member in typing.get_args(kind):
        _close(member)
    known = fields_of(kind)
    if known is None or kind in _CLOSED:
        return
    _CLOSED.add(kind)
    if not issubclass(kind, BaseModel) and "__pydantic_config__" not in vars(kind):
        kind.__pydantic_config__ = ConfigDict(extra="forbid")
    for annotation in known.values():
        _close(annotation)


def _over_defaults(kind: Any, data: Any, default: Any = None) -> Any:
    """Return `data` laid over the default of its kind, or over those of its parts, however deep.

    An owner may want other defaults for a part than the part's own: to set one key of the part
    leaves its other keys as the owner wants them. Free mappings are replaced.
    """
    known = fields_of(kind)
    if known is None or not isinstance(data, Mapping):
        return data
    given = typing.cast("Mapping[str, Any]", data)
    if default is None:
        merged, defaults = dict(given), _defaults_of(kind)
    else:
        defaults = {name: getattr(default, name) for name in known}
        merged = {**_adapter(kind).dump_python(default, mode="json"), **given}
    for key in given.keys() & known.keys():
        part, own = _plain_type(known[key], given[key]), defaults[key]
        merged[key] = _over_defaults(part, given[key], own if part is type(own) else None)
    return merged


def _defaults_of(kind: Any) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {name: field.default for name, field in kind.model_fields.items()}
    return {field.name: field.default for field in dataclasses.fields(kind)}


def _check_keys(kind: Any, data: Any, at: str, root: tuple[Any, Any, str]) -> None:
    """Refuse a key that nothing declares; `root`, the whole, may have it in another section."""
    kind = _plain_type(kind, data)
    known = fields_of(kind)
    if known is not None and isinstance(data, Mapping):
        for key, value in data.items():
            if key in known:
                _check_keys(known[key], value, _join(at, key), root)
            elif not _is_open(kind):
                near = nearest(key, known, at)
                hint = _elsewhere(root, _join(at, key), value, near)
                raise ConfigError(
                    f"there is no key '{_join(at, key)}'{hint}\n"
                    f"    {at or 'the configuration'} has: {', '.join(known)}"
                )
    elif isinstance(data, Mapping):
        arguments = typing.get_args(kind)
        for key, value in data.items():
            inner = arguments[1] if len(arguments) == 2 else None
            _check_keys(inner, value, _join(at, key), root)


# Names of keys in other trainers -> our keys.
_ELSEWHERE = {
    "learning_rate": "algorithm.optimizer.lr",
    "batch_size": "algorithm.per_step",
    "sampling": "algorithm.cfg.sampling",
}


def _elsewhere(root: tuple[Any, Any, str], path: str, value: Any, near: str) -> str:
    """Return `; did you mean 'a.b.key'?` for a key that is declared, or set, in another section.

    A key of exactly that name comes before `near`, the hint for one with a similar spelling.
    """
    kind, data, at = root
    unknown, name = f"{path}.", path.rpartition(".")[2]
    while isinstance(value, Mapping) and len(typing.cast("Mapping[str, Any]", value)) == 1:
        ((key, value),) = typing.cast("Mapping[str, Any]", value).items()
        path = _join(path, str(key))
    every = {*_declared(kind, at), *_given(data, at)}
    if "algorithm.cfg" in every:  # the step declares its keys
        every |= {"algorithm.cfg.sampling", *_declared(_step_options(data), "algorithm.cfg")}
    paths = {one for one in every if not f"{one}.".startswith(unknown)}
    last = path.rpartition(".")[2]
    alike = closest(last, {one.rpartition(".")[2] for one in paths})
    for wanted in (path, _ELSEWHERE.get(name, name), None, _ELSEWHERE.get(last, last), alike):
        if wanted is None and near:
            return near
        found = [one for one in paths if f".{one}".endswith(f".{wanted}")]
        if found:
            best = min(found, key=lambda one: (-len(commonprefix([one, path])), len(one), one))
            return f"; did you mean '{best}'?"
    return ""


def _step_options(data: Any) -> Any:
    """The class of a configured step's `cfg`; None if there is no such step."""
    try:
        step = load_object(data["algorithm"]["step"], "algorithm.step")
        return get_type_hints(step).get("cfg")
    except (ConfigError, KeyError, TypeError, NameError):  # told when the step is looked at
        return None


def _declared(kind: Any, at: str) -> Iterator[str]:
    """Yield every key that a class declares at any depth, except those of free mappings."""
    for name, annotation in (fields_of(kind) or {}).items():
        yield _join(at, name)
        inner = _plain_type(annotation, {})
        if inner is not kind:
            yield from _declared(inner, _join(at, name))


def _given(data: Any, at: str) -> Iterator[str]:
    """Yield every key that has a value, at any depth."""
    if isinstance(data, Mapping):
        for name, value in typing.cast("Mapping[str, Any]", data).items():
            yield _join(at, str(name))
            yield from _given(value, _join(at, str(name)))


def fields_of(kind: Any) -> dict[str, Any] | None:
    """Field name -> annotation of a dataclass or a pydantic model; None of anything else."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    return None


def _is_open(kind: Any) -> bool:
    return issubclass(kind, BaseModel) and kind.model_config.get("extra") == "allow"


def _plain_type(kind: Any, data: Any) -> Any:
    """The type without marks; of a union, the member that `data` is meant for."""
    if typing.get_origin(kind) is typing.Annotated:
        return _plain_type(typing.get_args(kind)[0], data)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [_plain_type(member, data) for member in typing.get_args(kind)]
        with_fields = [member for member in members if fields_of(member) is not None]
        if isinstance(data, Mapping) and with_fields:
            given = set(typing.cast("Mapping[str, Any]", data))
            return max(with_fields, key=lambda m: len(given & set(fields_of(m) or {})))
        return next((member for member in members if typing.get_args(member)), None)
    return kind


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _by_key(data: Mapping[str, Any], error: ValidationError) -> list[tuple[list[str], list[Any]]]:
    """Return keys and what pydantic says of each.

    Of a union it says for each member why the value is not that. Where it found fault with
    something inside the value, the value was meant for that member.
    """
    found: dict[tuple[str, ...], list[Any]] = {}
    every = error.errors(include_url=False)
    # Keys have been checked: one is unknown only to a member of a union that was not meant.
    for one in [e for e in every if e["type"] != "unexpected_keyword_argument"] or every:
        path = tuple(_keys_of(data, one["loc"], one["type"]))
        found.setdefault(path, []).append(one)
    return [
        (list(path), errors)
        for path, errors in found.items()
        if not any(other[: len(path)] == path for other in found if len(other) > len(path) > 0)
    ]


def _fault(kind: type, data: Mapping[str, Any], at: str, path: list[str], errors: list[Any]) -> str:
    error = errors[0]
    key = ".".join([at, *path]) if at else ".".join(path)
    owner, depth, doc = _owner(kind, data, path)
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"'{key}' is missing\n    {doc or f'{owner.__name__} needs it'}"
    if error["type"] == "value_error":
        return f"'{key or at}': {error['ctx']['error']}"
    if error["type"] in RANGE_ERRORS and is_option_class(owner):
        value: Any = data
        for part in path[: depth + 1]:
            value = value[part]
        declared = TypeAdapter(get_type_hints(owner)[path[depth]])
        value = declared.validate_json(json.dumps(value))  # as it was to become
        section = ".".join([at, *path[:depth]] if at else path[:depth])
        return f"'{section}': {out_of_range(owner, path[depth], value)}"
    expected = " or ".join(dict.fromkeys(map(expected_by, errors)))
    lines = [f"'{key}': expected {expected}, got {_shown(error['input'])}"]
    if doc:
        lines.append(f"    {path[depth]}: {doc}")
    return "\n".join(lines)


def _keys_of(data: Any, loc: tuple[int | str, ...], kind: str) -> list[str]:
    """The part of pydantic's location that consists of keys of `data`; it adds names of types."""
    path: list[str] = []
    for item in loc:
        if isinstance(data, Mapping) and item in data:
            data = typing.cast("Mapping[str | int, Any]", data)[item]
        elif isinstance(data, list) and isinstance(item, int) and item < len(data):
            data = typing.cast("list[Any]", data)[item]
        elif not (kind.startswith("missing") and item == loc[-1]):
            continue
        path.append(str(item))
    return path


def _owner(kind: Any, data: Any, path: list[str]) -> tuple[type, int, str]:
    """The innermost class that declares a key of the path, where in it, and the key's doc."""
    owner, depth, doc = kind, 0, ""
    for place, key in enumerate(path):
        kind = _plain_type(kind, data)
        known = fields_of(kind)
        if known is not None and key in known:
            owner, depth, doc = kind, place, key_docs(kind).get(key, "")
            kind = known[key]
        else:
            arguments = typing.get_args(kind)
            kind = arguments[1] if len(arguments) == 2 else None
        inner = typing.cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else {}
        data = inner.get(key)
    return owner, depth, doc


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, Mapping):
        return "a mapping of keys"
    return repr(value)


@cache
def key_docs(kind: type) -> dict[str, str]:
    """Field name -> its doc on one line, inherited fields included."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if "__annotations__" in vars(owner):
            docs |= _own_docs(owner)
    return docs


def _own_docs(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # made without a source file, as pydantic's own base is
        return {}
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    docs: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[statement.target.id] = " ".join(after.value.value.split())
    return docs
