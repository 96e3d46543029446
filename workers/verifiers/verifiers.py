"""Verifiers by name: exact match, math-verify, instructions, code tests, the user's own functions.

A verifier is a function of (prompt, response, answer) that returns a finite number, or None where
it cannot say (see `as_score`). It is named by a string, so that another process can load it: a
built-in name, `module:function`, or `path.py:function`. Loading one imports the user's own module;
nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from ...dataflow.errors import ConfigError, nearest, raised_at
from ...dataflow.registry import Registry, imported
from ..isolation.child import USER_ERRORS

Verifier = Callable[[str, str, str | None], float | None]
"""Function of (prompt, response, answer) that returns a score; None where there is none."""

_WITH_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}")
_SIGNATURE = "a reward is a function of (prompt, response, answer) that returns a number"


def exact_match(prompt: str, response: str, answer: str | None) -> float:
    """1 if the response is the answer, white space around both left aside; else 0."""
    if answer is None:
        raise ValueError("exact_match needs an answer to compare with")
    return float(response.strip() == answer.strip())


def math_verify(prompt: str, response: str, answer: str | None) -> float:
    r"""1 if the last result in the response equals the answer as mathematics, else 0.

    Both may be plain or LaTeX: "0.5" equals "$\frac{1}{2}$". math-verify's own time limits work
    through signals, in a main thread only, and are off: call this where a limit holds, as in a
    `VerifierPool`.
    """
    if answer is None:
        raise ValueError("math_verify needs an answer to compare with")
    if _WITH_EXPONENT.fullmatch(answer.strip()):
        answer = format(Decimal(answer.strip()), "f")  # an exponent would cut the number short
    # Each of the two says once that its time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(f"the answer {answer!r} cannot be read as mathematics")
    given = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(verify(gold, given, timeout_seconds=None))


_HERE = "penstock.workers.verifiers"
_CODE_TESTS = "code_tests"

BUILT_IN = Registry[Verifier](
    {
        "exact_match": f"{_HERE}.verifiers:exact_match",
        "math_verify": f"{_HERE}.verifiers:math_verify",
        "instructions": f"{_HERE}.instructions.instructions:instruction_score",
        _CODE_TESTS: f"{_HERE}.code_tests:code_tests",
    }
)
"""Verifiers by name. They need an answer."""


def make_verifier(reward: str, options: Mapping[str, Any] | None = None) -> Verifier:
    """`load_verifier` for a process of its own, ready for the first call.

    math-verify imports sympy and builds its grammars when first used, which takes seconds; that
    must not count against a call's time limit.
    """
    verifier = _with_options(reward, options)
    if reward == "math_verify":
        verifier("", "$\\frac{1}{2}$ and 2", "1/2")
    if reward == _CODE_TESTS:
        imported(f"{_HERE}.code_tests:check_place")(options or {})
    return verifier


def load_verifier(reference: str, options: Mapping[str, Any] | None = None) -> Verifier:
    verifier = _with_options(reference, options)
    # Without options it is loaded where a task is read, which may be another machine.
    if reference == _CODE_TESTS and options is not None:
        imported(f"{_HERE}.code_tests:check_place")(options, announce=True)
    return verifier


def _with_options(reference: str, options: Mapping[str, Any] | None) -> Verifier:
    found = _load(reference)
    if not options:
        return found
    try:
        inspect.signature(found).bind("", "", "", **options)
    except TypeError as error:
        raise ConfigError(
            f"reward '{reference}' takes {inspect.signature(found)}: {error}\n"
            f"    options given are: {', '.join(options)}"
        ) from error
    _check_values(reference, found, options)
    return partial(found, **options)


def _check_values(reference: str, function: Any, options: Mapping[str, Any]) -> None:
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        hints = get_type_hints(function)
    except Exception:  # noqa: BLE001 - an annotation may be any expression
        return
    for name in [name for name in options if name in hints]:
        try:
            # As JSON, in which options travel: there a list may be a tuple, and a text a path.
            TypeAdapter(hints[name]).validate_json(json.dumps(options[name]), strict=True)
        except (PydanticUserError, TypeError):  # what pydantic does not know, or JSON cannot say
            continue
        except ValidationError as error:
            raise ConfigError(
                f"reward '{reference}': option '{name}' is {options[name]!r:.80}: "
                f"{error.errors()[0]['msg']}\n    it takes {inspect.signature(function)}"
            ) from error
    own_module, own_name = (getattr(function, key, "") for key in ("__module__", "__name__"))
    if f"{own_module}:{own_name}" == BUILT_IN.paths[_CODE_TESTS]:
        imported(f"{_HERE}.code_tests:check_limits")(options)


def _load(reference: str) -> Verifier:
    if reference in BUILT_IN:
        return BUILT_IN[reference]
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(
            f"there is no reward '{reference}'{nearest(reference, BUILT_IN)}\n"
            f"    use {', '.join(sorted(BUILT_IN))}, module:function or path.py:function"
        )
    module = import_user_module(f"reward '{reference}'", place)
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(
            f"reward '{reference}': {place} has no '{name}'{nearest(name, vars(module))}\n"
            f"    {_SIGNATURE}"
        )
    _check_signature(reference, function)
    return function


def reference_of(function: Verifier) -> str:
    """A string by which another process can load `function`."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is None or not name.isidentifier() or getattr(module, name, None) is not function:
        raise ConfigError(
            f"the reward {function!r} cannot be found by name in another process\n"
            "    define it at the top of a module, or set reward_in_process=true to run it in the "
            "worker itself, without a time limit"
        )
    _check_signature(name, function)
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" and file is not None:
        return f"{Path(file).resolve()}:{name}"
    return f"{module.__name__}:{name}"


def _check_signature(reference: str, function: Any) -> None:
    if not callable(function):
        raise ConfigError(
            f"reward '{reference}' is a {type(function).__name__}, not a function\n    {_SIGNATURE}"
        )
    called = function if inspect.isroutine(function) else type(function).__call__
    kinds = {
        inspect.iscoroutinefunction: "coroutine",
        inspect.isasyncgenfunction: "coroutine",
        inspect.isgeneratorfunction: "generator",
    }
    for check, kind in kinds.items():
        if check(function) or check(called):
            raise ConfigError(
                f"reward '{reference}' is a {kind} function, whose call returns no number\n"
                f"    {_SIGNATURE}: write `def` and `return`, without `async` or `yield`"
            )
    try:
        inspect.signature(function).bind("", "", "")
    except TypeError as error:
        raise ConfigError(
            f"reward '{reference}' takes {inspect.signature(function)}: {error}\n    {_SIGNATURE}"
        ) from error
    except ValueError:  # a builtin without a signature
        return


_LIKE = {
    "prompt": ("question", "problem", "instruction", "query", "input", "task"),
    "response": ("completion", "output", "generat", "text", "reply", "prediction"),
    "answer": ("gold", "target", "reference", "solution", "expected", "label", "truth", "correct"),
}
"""Argument of a reward, in order -> words in other names that rewards give it."""


def check_parameters(
    reference: str, function: Any, columns: Iterable[str], read_as: Mapping[str, str | None]
) -> None:
    """Refuse a reward whose parameters say that it expects other arguments than it is given.

    It is called with (prompt, response, answer) in this order; columns of the data are not passed.
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except ValueError:  # a builtin without a signature
        return
    passed = tuple(_LIKE)
    known = set(columns)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [one for one in parameters if one.kind in (*positional, inspect.Parameter.KEYWORD_ONLY)]
    for place, (name, kind) in enumerate((one.name, one.kind) for one in named):
        own = passed[place] if place < len(passed) and kind in positional else None
        if own is not None and name in (own, read_as.get(own)):
            continue
        if name in passed:
            what = f"has '{name}' where {own or 'nothing'} is passed"
        elif name in known:
            what = f"has a parameter '{name}', a column of the data, and columns are not passed"
        elif (
            own is not None
            and not name.startswith("_")
            and not any(word in name or word.startswith(name) for word in (own, *_LIKE[own]))
        ):
            what = f"has a parameter '{name}' where the {own} is passed"
        else:
            continue
        raise ConfigError(
            f"reward '{reference}' takes {inspect.signature(function)}: it {what}\n"
            f"    {_SIGNATURE}; put what else it needs into the answer, such as JSON text in "
            "`answer_field`, or name the parameter otherwise"
        )


def import_user_module(what: str, place: str) -> ModuleType:
    path = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ConfigError(
            f"{what}: there is no file {place}\n"
            "    give the path of a Python file, from the folder the run is started in"
        )
    if os.getcwd() not in sys.path:  # a console script's own folder stands there instead
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place) if path is None else _module_of(path)
    except USER_ERRORS as error:
        raise ConfigError(
            f"{what}: importing {place} fails {blame(error)}\n"
            "    fix the module; it is imported before the run starts"
        ) from error


def _module_of(path: Path) -> ModuleType:
    name = f"penstock_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a half-made module must not be found the next time
        raise
    return module


def blame(error: BaseException) -> str:
    """`at file:line: Type: text` of what user code raised, of the innermost frame."""
    at = f"at {raised_at(error).short}: "
    if isinstance(error, SystemExit):
        return f"{at}it calls sys.exit({error.code!r:.80}), which is for programs alone"
    if isinstance(error, (ModuleNotFoundError, SyntaxError)):
        at = ""  # the text itself says which module or line
    return f"{at}{type(error).__name__}: {error}"
