"""The process that untrusted code runs in: a script of the standard library alone.

Its argument is a JSON object that says what to run and where; results go, a JSON object a line, to
a descriptor of their own. It gives up all it does not need before the first untrusted line runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

UNCONFINED = 97
"""Exit code: the kernel does not offer what was asked for; the reason is the only result."""


def main() -> None:
    """Confine this process, then run what it was given."""
    sys.path.insert(0, str(Path(__file__).parent))
    import kernel  # pyright: ignore[reportMissingImports]

    del sys.path[0], sys.modules["kernel"]  # a program may have a module of that name
    setup = json.loads(sys.argv[1])
    del sys.argv[1:]
    kernel.end_with_parent(setup["parent"])
    with contextlib.suppress(OSError):  # if memory runs out, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")
    with os.fdopen(setup["work"], encoding="utf-8") as file:
        work = json.load(file)
    results = os.fdopen(setup["results"], "w", encoding="utf-8")
    os.chdir(setup["folder"])
    kernel.limit(**setup["limits"])
    if setup["confined"]:
        try:
            kernel.confine(setup["folder"])
        except kernel.Unconfined as error:
            _write(results, {"unconfined": str(error)})
            results.close()
            os._exit(UNCONFINED)
    _run(work, results)


def _run(work: dict[str, Any], results: TextIO) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(work["program"], "program.py", "exec"), namespace)
    for call in work["calls"]:
        _write(results, _called(namespace, call))
    for test in work["asserts"]:
        _write(results, {**_asserted(namespace, test), "token": work["token"]})


def _called(namespace: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    try:
        function = namespace.get(call["function"])
        if function is None and "Solution" in namespace:
            function = getattr(namespace["Solution"](), call["function"], None)
        if function is None:
            return {"error": f"there is no function {call['function']}"}
        args, kwargs = call.get("args", ()), call.get("kwargs", {})
        if call.get("typed"):
            args = [untyped(arg) for arg in args]
            kwargs = {name: untyped(arg) for name, arg in kwargs.items()}
            return {"value": json.loads(json.dumps(typed(function(*args, **kwargs))))}
        return {"value": json.loads(json.dumps(function(*args, **kwargs), default=_plain))}
    except Exception as error:  # a wrong program is a result
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _plain(value: Any) -> Any:
    """What JSON has no word for: sets as sorted lists, all else as its text."""
    return sorted(value) if isinstance(value, (set, frozenset)) else repr(value)


def typed(value: Any) -> Any:
    """A literal as JSON that keeps its type: lists and scalars as they are, the rest named.

    Sets and dicts are put into an order of their own. What is no literal is its text, which no
    literal becomes.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [typed(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [typed(one) for one in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(typed, value), key=json.dumps)}
    if isinstance(value, dict):
        pairs = [[typed(key), typed(one)] for key, one in value.items()]
        return {"dict": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return {"repr": repr(value)}


def untyped(value: Any) -> Any:
    """The reverse of `typed`, for literals."""
    if isinstance(value, list):
        return [untyped(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    ((kind, parts),) = value.items()
    return {"tuple": tuple, "set": set, "dict": dict}[kind](untyped(part) for part in parts)


def _asserted(namespace: dict[str, Any], test: str) -> dict[str, Any]:
    try:
        exec(compile(test, "test.py", "exec"), namespace)
    except Exception as error:  # a failed assertion is a result
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"value": True}


def _write(results: TextIO, result: dict[str, Any]) -> None:
    results.write(json.dumps(result) + "\n")
    results.flush()


if __name__ == "__main__":
    main()
