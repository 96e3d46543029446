"""The functions that algorithms are made of, for docs/algorithms: signatures and shapes.

Shapes are read from the docstrings' lists of arguments, else from the annotations of columns.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType, NoneType, UnionType
from typing import Any

from penstock.algorithms import losses
from penstock.algorithms.ops.rollout_correction import RolloutCorrection
from penstock.configs.validate import key_docs
from penstock.dataflow import Loss
from penstock.dataflow.graph.axes import Spec

__all__ = ["MODULES", "function_page", "function_table", "loss_table"]

MODULES: dict[str, tuple[str, ...]] = {
    "advantages": ("ops.advantages", "ops.returns"),
    "losses": ("losses",),
    "rewards": ("ops.rewards",),
    "kl": ("ops.kl", "ops.reductions"),
    "parts": (
        "ops.macro_actions", "ops.rollout_correction", "ops.pairs",
        "ops.distributions", "ops.value_transforms", "ops.final_state",
    ),
}  # fmt: skip
"""Table of docs/algorithms/index.md -> the modules of `penstock.algorithms` it lists."""

_OPTIONS: dict[str, type] = {"ops.rollout_correction": RolloutCorrection}
"""Module -> the class of options that its functions take, which has an entry among them."""

_ROLE_OF = {"PolicyOutput": "Policy", "ValueOutput": "ValueModel", "ScoreOutput": "RewardModel"}
"""What a loss reads of a model -> the role whose model says it."""

_SHAPE = re.compile(r"(?:f32|f64|i64|bool|int)(?: or \w+)?\[[^\]]*\]|f\d\d scalar")
_SECTION = re.compile(r"^(Args|Returns|Raises|Example|Attributes):$", re.MULTILINE)


def function_table(table: str) -> str:
    """One row per function of a table's modules."""
    lines = ["| function | called with | gives |", "|---|---|---|"]
    for module, name, function in _functions()[table]:
        shown = f"{module.rpartition('.')[2]}.{name}" if len(MODULES[table]) > 1 else name
        called = _signature(function, in_lines=False)
        gives = _cell(_sections(function)["about"].split("\n\n")[0])
        lines.append(f"| [`{shown}`](functions.md#{name}) | `{called}` | {gives} |")
    return "\n".join(lines)


def loss_table() -> str:
    """One row per loss class: what `train` minimizes, what it reads, and of which role."""
    lines = ["| loss | batch | role | what it is |", "|---|---|---|---|"]
    for name in losses.__all__:
        made: Any = getattr(losses, name)
        if not (inspect.isclass(made) and issubclass(made, Loss)):
            continue
        bases = [base for kind in made.__mro__ for base in getattr(kind, "__orig_bases__", ())]
        batch, output = next(typing.get_args(b) for b in bases if typing.get_origin(b) is Loss)
        about = (inspect.getdoc(made) or "").split("\n\n")[0]
        role = _ROLE_OF[output.__name__]
        lines.append(f"| `{name}` | `{batch.__name__}` | `{role}` | {_cell(about)} |")
    return "\n".join(lines)


def function_page() -> str:
    """All functions with their whole documentation, one section per module."""
    lines = [
        "# The functions of algorithms",
        "",
        "For readers who write algorithms: every function that the shipped ones are made of, with",
        "shapes, arguments and result. Each takes plain tensors: `rows` responses, `T` tokens of",
        "whole sequences, prompt included; see [the conventions](index.md#functions). This page is",
        "generated from the docstrings.",
    ]
    for table, functions in _functions().items():
        lines += ["", f"## {', '.join(f'penstock.algorithms.{name}' for name in MODULES[table])}"]
        for module, name, function in functions:
            lines += ["", *_entry(module, name, function)]
        for module in MODULES[table]:
            if module in _OPTIONS:
                lines += ["", *_options_entry(module, _OPTIONS[module])]
    return "\n".join(lines) + "\n"


def _entry(module: str, name: str, function: Callable[..., Any]) -> Iterator[str]:
    parts = _sections(function)
    yield from (f"### {name}", "", f"`from penstock.algorithms.{module} import {name}`", "")
    yield from ("```text", _signature(function, in_lines=True), "```", "")
    yield parts["about"]
    arguments = list(_arguments(parts.get("Args", "")))
    if arguments:
        yield ""
    yield from (f"- `{argument}`: {words}" for argument, words in arguments)
    if "Returns" in parts:
        yield from ("", "Returns " + " ".join(parts["Returns"].split()))


def _options_entry(module: str, kind: type) -> Iterator[str]:
    name = kind.__name__
    yield from (f"### {name}", "", f"`from penstock.algorithms.{module} import {name}`", "")
    yield from (inspect.getdoc(kind) or "", "")
    for key, words in key_docs(kind).items():
        yield f"- `{key}`, `{getattr(kind, key)!r}` by default: {words}"


@cache
def _functions() -> dict[str, list[tuple[str, str, Callable[..., Any]]]]:
    """For each table module, name and function of all that is public; each is there once."""
    found: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {}
    seen: set[str] = set()
    for table, names in MODULES.items():
        found[table] = []
        for module in names:
            loaded = importlib.import_module(f"penstock.algorithms.{module}")
            for name in sorted(_public(loaded) - seen):
                if inspect.isfunction(function := getattr(loaded, name)):
                    found[table].append((module, name, function))
                    seen.add(name)
    return found


def _public(module: ModuleType) -> set[str]:
    """Return the names in `__all__`, or else those defined without an underscore."""
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    return set(getattr(module, "__all__", defined))


def _sections(function: Callable[..., Any]) -> dict[str, str]:
    """The parts of a docstring by their titles; "about" is what stands before them."""
    pieces = _SECTION.split(inspect.getdoc(function) or "")
    found = {"about": pieces[0].strip()}
    found |= dict(zip(pieces[1::2], (piece.strip("\n") for piece in pieces[2::2]), strict=True))
    return found


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    for one in re.split(r"\n(?=    \S)", text):
        name, colon, words = one.strip().partition(":")
        if colon:
            yield name, " ".join(words.split())


def _signature(function: Callable[..., Any], *, in_lines: bool) -> str:
    shapes = {name: _SHAPE.match(words) for name, words in _arguments_of(function)}
    hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    parts: list[str] = []
    starred = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        shape = shapes.get(name)
        kind = shape[0] if shape else _type_name(hints[name])
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        starred = starred or bool(star)
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{star}{name}: {kind}{default}")
    returned = _SHAPE.match(_sections(function).get("Returns", "").strip())
    kind = _type_name(hints["return"])
    column = returned is not None and kind.startswith(("Tensor", "f32", "i64", "bool["))
    made = f" -> {returned[0] if returned is not None and column else kind}"
    if in_lines:
        return "\n".join([f"{function.__name__}(", *(f"    {part}," for part in parts), f"){made}"])
    return _cell(f"{function.__name__}({', '.join(parts)}){made}")


def _arguments_of(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    yield from _arguments(_sections(function).get("Args", ""))


def _type_name(hint: Any) -> str:
    """A type as a reader wants it: a column's dtype and axes, or the values there are."""
    if typing.get_origin(hint) is typing.Annotated:
        specs = [one for one in hint.__metadata__ if isinstance(one, Spec)]
        if specs:
            return re.sub(r"sample|\brow\b", "rows", re.sub(r"token~|\bstep\b", "T", str(specs[0])))
        return _type_name(hint.__origin__)
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return " or ".join(map(_type_name, typing.get_args(hint)))
    if typing.get_args(hint):
        inner = ", ".join(_type_name(part) for part in typing.get_args(hint) if part is not ...)
        return f"{typing.get_origin(hint).__name__}[{inner}]"
    return "None" if hint is NoneType else getattr(hint, "__name__", str(hint))


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
