"""Rewards from tests: programs in responses are run in the sandbox and their answers compared.

What a test expects never enters the sandbox: a program that shares a process with its judge can
have it say anything. So an assertion that compares a call with a literal is taken apart, and any
other is refused, unless `run_asserts` accepts that a response can forge it.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...dataflow.errors import ConfigError
from ..isolation.confine import typed
from ..isolation.sandbox import Limits, announce_sandbox, check_sandbox, run_python


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    streams: Sequence[tuple[str, str]] = ()
    """Input of a program, and its expected output; each in a run of its own."""
    calls: Sequence[Mapping[str, Any]] = ()
    """`{"function", "args", "kwargs", "expected"}`; all in one run. With `"typed"`, which
    assertions become, arguments and `expected` are as `confine.typed` makes them."""
    asserts: Sequence[str] = ()
    """Statements that must not raise; all in one run. A response can forge that."""
    setup: str = ""  # source that comes before the program


def tests_of(answer: str | Sequence[Any] | Mapping[str, Any], *, run_asserts: bool) -> CodeTests:
    read: Any = json.loads(answer) if isinstance(answer, str) else answer
    if isinstance(read, Mapping):
        read = _from_inputs(read) if "inputs" in read else read
        parts = [*read.get("asserts", ()), *read.get("streams", ()), *read.get("calls", ())]
        setup = str(read.get("setup", ""))
    else:
        parts, setup = read, ""
    if not isinstance(parts, list) or not parts or not all(map(_is_test, parts)):
        raise ValueError(
            'the answer must list tests as JSON, such as ["assert f(1) == 2"], '
            '[{"stdin": "1", "stdout": "2"}] or [{"function": "f", "args": [1], "expected": 2}]; '
            f"got {answer!r:.200}"
        )
    asserts = {text: _call_of(text) for text in parts if isinstance(text, str)}
    opaque = [text for text, call in asserts.items() if call is None]
    if opaque and not run_asserts:
        raise ConfigError(_OPAQUE.format(opaque[0][:200]))
    calls = [call for call in asserts.values() if call is not None]
    return CodeTests(
        streams=[(str(t["stdin"]), str(t["stdout"])) for t in parts if "stdout" in t],
        calls=[*(t for t in parts if isinstance(t, Mapping) and "function" in t), *calls],
        asserts=opaque,
        setup=setup,
    )


_OPAQUE = (
    "the assertion {!r} would have to be run beside the response's program, which could forge that "
    "it holds\n    write it as assert f(LITERALS) == LITERAL, as a call "
    '{{"function", "args", "expected"}} or as {{"stdin", "stdout"}}; or accept forged rewards: '
    "run_asserts=true"
)


def _call_of(text: str) -> dict[str, Any] | None:
    """The call and what it must return, of `assert f(LITERALS) == LITERAL`; None of other forms."""
    try:
        match ast.parse(text.strip()).body:
            case [
                ast.Assert(
                    test=ast.Compare(
                        left=ast.Call(func=ast.Name(id=name), args=args, keywords=named),
                        ops=[ast.Eq()],
                        comparators=[expected],
                    )
                )
            ] if all(one.arg for one in named):
                return {
                    "function": name,
                    "args": [typed(_literal(arg)) for arg in args],
                    "kwargs": {one.arg: typed(_literal(one.value)) for one in named},
                    "expected": typed(_literal(expected)),
                    "typed": True,
                }
            case _:
                return None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # not literals
        return None


def _literal(node: ast.expr) -> Any:
    value = ast.literal_eval(node)
    json.dumps(typed(value), allow_nan=False)
    if any(isinstance(one, ast.Constant) and type(one.value) in _UNSAID for one in ast.walk(node)):
        raise ValueError("it holds a complex number or an ellipsis")
    return value


_UNSAID = (complex, type(...))


def _is_test(item: Any) -> bool:
    if isinstance(item, Mapping):
        return {"stdin", "stdout"} <= item.keys() or {"function", "expected"} <= item.keys()
    return isinstance(item, str)


def _from_inputs(read: Mapping[str, Any]) -> Mapping[str, Any]:
    pairs = list(zip(read["inputs"], read["outputs"], strict=True))
    name = read.get("fn_name")
    if name is None:
        return {**read, "streams": [{"stdin": _text(i), "stdout": _text(o)} for i, o in pairs]}
    calls = [{"function": name, "args": i, "expected": o} for i, o in pairs]
    return {**read, "calls": calls}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def program_in(response: str) -> str:
    """The last fenced block of a response that is marked as Python or not at all, or else all."""
    blocks = re.findall(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", response, flags=re.DOTALL)
    fitting = [text for mark, text in blocks if mark.lower() in ("", "python", "python3", "py")]
    return fitting[-1] if fitting else response


def code_tests(
    prompt: str,
    response: str,
    answer: str | None,
    *,
    score: Literal["all", "share"] = "all",
    time_s: float = 4.0,
    memory_mb: int = 512,
    minimum: str = "landlock",
    run_asserts: bool = False,
) -> float:
    """A verifier: whether the program in a response passes the tests that the answer lists."""
    if answer is None:
        raise ValueError("code_tests needs an answer that lists tests as JSON")
    tests = tests_of(answer, run_asserts=run_asserts)
    limits = Limits(time_s=time_s, memory_mb=memory_mb)
    program = f"{tests.setup}\n{program_in(response)}"
    passed = 0
    if tests.calls or tests.asserts:
        asked = [{k: v for k, v in call.items() if k != "expected"} for call in tests.calls]
        ran = run_python(
            program, calls=asked, asserts=tests.asserts, limits=limits, minimum=minimum
        )
        wanted = [*(call["expected"] for call in tests.calls), *(True for _ in tests.asserts)]
        passed += sum(
            "value" in result and _same(result["value"], expected)
            for result, expected in zip(ran.results, wanted, strict=False)
        )
        if score == "all" and passed < len(wanted):
            return 0.0
    for stdin, stdout in tests.streams:
        ran = run_python(program, stdin=stdin, limits=limits, minimum=minimum)
        good = ran.exit_code == 0 and _lines(ran.stdout) == _lines(stdout)
        if score == "all" and not good:
            return 0.0
        passed += good
    return passed / (len(tests.streams) + len(tests.calls) + len(tests.asserts))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same(given: Any, expected: Any) -> bool:
    """Compare JSON values and their types; floats may differ by rounding."""
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, float) or isinstance(expected, float):
        floats = isinstance(given, float) and isinstance(expected, float)
        return floats and math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(_same, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(_same(given[k], expected[k]) for k in given)
    return bool(given == expected)


def check_place(options: Mapping[str, Any], *, announce: bool = False) -> None:
    """Refuse a machine without a sandbox as strong as the options of `code_tests` ask for."""
    check_sandbox(**{key: str(value) for key, value in options.items() if key == "minimum"})
    if announce:
        announce_sandbox()


def check_limits(options: Mapping[str, Any]) -> None:
    """Refuse limits among the options of `code_tests` that no sandbox takes."""
    try:
        Limits(**{key: options[key] for key in ("time_s", "memory_mb") if key in options})
    except ValueError as error:
        raise ConfigError(
            f"reward 'code_tests': option {error}\n    time_s is in seconds, memory_mb in MiB"
        ) from error
