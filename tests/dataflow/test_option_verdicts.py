"""Which of forty values every field of every option class takes, in Python and configured.

`option_verdicts.json` holds what was taken when ranges were still checked by calls in
`__post_init__`. What a configuration takes is the same to the letter. In Python a value is taken if
it was and a configuration takes it, and a list stands for a tuple; so True, 3.0 and None, which
passed for integers there, no longer do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import penstock
import pytest
from pydantic import PydanticSchemaGenerationError, TypeAdapter

Verdicts = Mapping[str, tuple[str, str]]
"""Field -> for each value whether it is taken ("A") or refused ("-"), in Python and configured."""

VALUES: tuple[Any, ...] = (
    *(float("inf"), float("-inf"), float("nan"), True, False, None, "3", "", "x", -1, -0.5),
    *(0, 0.0, 0.5, 1, 1.0, 2, 3, 3.0, 3.5, 64, 10**6, 2**63 - 1, 2**63, 10**30),
    *([], [1], [0.5, 0.5], ["a"]),
)
"""Values that YAML can hold."""
IN_PYTHON: tuple[Any, ...] = (
    *(np.float64(0.5), np.float32(0.5), np.float64(2), np.int64(2), np.bool_(True), np.ones(1)),
    *((), (1,), (0.5, 0.5), ("a",), b"3", 3j),
)
"""Further values that Python can."""
RECORD = Path(__file__).with_name("option_verdicts.json")
_ROOT = Path(penstock.__file__).parent
_REQUIRED: Mapping[str, Any] = {
    "TokenizerSpec": {},
    "ModelSpec": {"folder": "x"},
    "EnvSpec": {"id": "x"},
    "HasSpaces": None,
    "TaskSpec": None,
    "Any": {"kind": "x"},
    "str": "x",
    "float": 1.0,
    "tuple[int, ...]": (1,),
    "tuple[str, ...]": ("x",),
}
"""Type of a field without a default -> a value."""
_TOGETHER = {
    "ChatClientOptions": {"url": "x", "model": "x"},
    "AskedRewardSpec": {"url": "x", "model": "x"},
    "JudgeSpec": {"url": "x", "model": "x"},
}
"""Fields that are checked together, with values."""


@cache
def _places() -> Mapping[str, list[str]]:
    """Class name -> modules that define it."""
    found: dict[str, list[str]] = {}
    for file in sorted(_ROOT.rglob("*.py")):
        parts = file.relative_to(_ROOT).with_suffix("").parts
        if parts[0] in {"dataflow", "algorithms", "planner", "workers", "launch"}:
            for name in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE):
                found.setdefault(name, []).append(".".join(("penstock", *parts)))
    return found


def option_class_named(name: str, having: set[str]) -> Any:
    """The class of that name with these fields."""
    for module in _places()[name]:
        kind = getattr(import_module(module), name)
        if having <= {one.name for one in fields(kind)}:
            return kind
    raise LookupError(name)


def verdicts(kind: Any, names: Iterable[str]) -> Verdicts:
    """Try every value on some fields of a class."""
    own = {one.name: one for one in fields(kind) if one.init}
    needed = {
        name: re.sub(r"SkipValidation\[(\w+)\]|NonNegative(Float)", r"\1\2", str(one.type))
        for name, one in own.items()
        if one.default is MISSING and one.default_factory is MISSING
    }
    base = {name: _REQUIRED[type_.replace("Float", "float")] for name, type_ in needed.items()}
    base |= _TOGETHER.get(kind.__name__, {})
    hints = get_type_hints(kind)
    in_python = {
        name: hints[name](**value) if is_dataclass(hints[name]) else value
        for name, value in base.items()
    }

    try:
        adapter: Any = TypeAdapter(kind)
    except PydanticSchemaGenerationError:  # it has a field for objects
        adapter = None

    def python(name: str, value: Any) -> object:
        return kind(**{**in_python, name: value})

    def configured(name: str, value: Any) -> object:
        return adapter.validate_json(json.dumps({**base, name: value}), strict=True)

    possible = adapter is not None
    possible = possible and (not base or _taken(configured, *list(base.items())[:1]) == "A")
    return {
        name: (
            _taken(python, *((name, value) for value in (*VALUES, *IN_PYTHON))),
            _taken(configured, *((name, value) for value in VALUES)) if possible else "",
        )
        for name in names
    }


def _taken(attempt: Callable[[str, Any], object], *calls: tuple[str, Any]) -> str:
    marks = ""
    for name, value in calls:
        try:
            attempt(name, value)
        except Exception:  # whichever error: the value is refused
            marks += "-"
        else:
            marks += "A"
    return marks


def _recorded() -> Iterator[tuple[str, Verdicts]]:
    by_class: dict[str, dict[str, tuple[str, str]]] = {}
    for both, names in json.loads(RECORD.read_text()).items():
        python, _, configured = both.partition(" ")
        for name in names:
            owner, _, field = name.partition(".")
            by_class.setdefault(owner, {})[field] = (python, configured)
    yield from by_class.items()


@pytest.mark.parametrize(("name", "then"), [*_recorded()])
def test_values_are_taken_and_refused_as_ever(name: str, then: Verdicts) -> None:
    now = verdicts(option_class_named(name, set(then)), then)
    for field, (python, configured) in then.items():
        python_now, configured_now = now[field]
        assert configured_now == configured, field
        for value, was, is_now, set_ in zip(
            (*VALUES, *IN_PYTHON),
            python,
            python_now,
            configured.ljust(len(python), "?"),
            strict=True,
        ):
            if isinstance(value, list) and set_ == "A":
                assert is_now == "A", (field, value)
            elif set_ == "?":
                assert was == "A" or is_now == "-", (field, value)
            else:
                assert (is_now == "A") == (was == set_ == "A"), (field, value)
