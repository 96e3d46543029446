"""Verifiers by name: exact match, math-verify, instructions, code tests, the user's own functions.

A verifier is a function of what its parameters name (see `reward_function`) that returns a finite
number, or None where it cannot say (see `as_score`). It is named by a string, so that another
process can load it: a built-in name, `module:function`, or `path.py:function`. Loading one imports
the user's own module; nothing is ever unpickled.
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
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from ...dataflow.errors import ConfigError, nearest, raised_at
from ...dataflow.registry import Registry, imported
from ..isolation.child import USER_ERRORS

Verifier = Callable[..., Any]
"""Function of what its parameters name that returns a score; None where there is none."""
Reference = str | Verifier

_WITH_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}")
_SIGNATURE = (
    "a reward is a function whose parameters name what it reads, such as prompt, response, answer "
    "or a column of the data, and that returns a number"
)


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


def warm_up(reward: str, verifier: Any, options: Mapping[str, Any] | None) -> None:
    """Make a built-in verifier ready for its first call, in a process of its own.

    math-verify imports sympy and builds its grammars when first used, which takes seconds; that
    must not count against a call's time limit.
    """
    if reward == "math_verify":
        verifier("", "$\\frac{1}{2}$ and 2", "1/2")
    if reward == _CODE_TESTS:
        imported(f"{_HERE}.code_tests:check_place")(options or {})


def load_verifier(reference: Reference, options: Mapping[str, Any] | None = None) -> Any:
    """Load a reward by its name, bind its options, and check that it can be called."""
    verifier = _with_options(reference, options)
    # Without options it is loaded where a task is read, which may be another machine.
    if reference == _CODE_TESTS and options is not None:
        imported(f"{_HERE}.code_tests:check_place")(options, announce=True)
    return verifier


def _with_options(reference: Reference, options: Mapping[str, Any] | None) -> Any:
    found = _load(reference) if isinstance(reference, str) else reference
    if not isinstance(reference, str):
        _check_callable(getattr(reference, "__name__", repr(reference)), found)
    if not options:
        return found
    try:
        inspect.signature(found).bind_partial(**options)
    except TypeError as error:
        raise ConfigError(
            f"reward '{reference}' takes {inspect.signature(found)}: {error}\n"
            f"    options given are: {', '.join(options)}"
        ) from error
    _check_values(reference, found, options)
    return partial(found, **options)


def _check_values(reference: Reference, function: Any, options: Mapping[str, Any]) -> None:
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
    _check_callable(reference, function)
    return function


def place_of(reference: Reference) -> str:
    """A string by which a process that runs elsewhere can load a reward."""
    if not isinstance(reference, str):
        return reference_of(reference)
    place, _, name = reference.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else reference


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
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" and file is not None:
        return f"{Path(file).resolve()}:{name}"
    return f"{module.__name__}:{name}"


def called(function: Any) -> Any:
    """Return what runs when a reward is called: of an object, or a class, its `__call__` if any."""
    plain = getattr(function, "func", function)  # of options that were bound
    if inspect.isroutine(plain):
        return plain
    kind = plain if isinstance(plain, type) else type(plain)
    return next((vars(one)["__call__"] for one in kind.__mro__ if "__call__" in vars(one)), None)


def _check_callable(reference: str, function: Any) -> None:
    runs = called(function)
    if runs is None:
        what = "class without `__call__`" if isinstance(function, type) else type(function).__name__
        raise ConfigError(f"reward '{reference}' is a {what}, not a function\n    {_SIGNATURE}")
    if inspect.isasyncgenfunction(runs) or inspect.isgeneratorfunction(runs):
        raise ConfigError(
            f"reward '{reference}' is a generator function, whose call returns no number\n"
            f"    {_SIGNATURE}: write `return` without `yield`"
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
