"""The process that untrusted code runs in: a module of the standard library alone.

It is told on a descriptor what to run and where; results go, a JSON object a line, to a descriptor
of their own. It gives up all it does not need before the first untrusted line runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import that is left out makes every run faster
    from typing import Any, TextIO

CONFINED = b"confined"
"""What is told on a descriptor of its own before the first untrusted line runs, or else why not."""


def main(descriptor: int) -> None:
    """Confine this process, then run what the descriptor holds: `{"setup", "work"}`."""
    import kernel  # pyright: ignore[reportMissingImports]

    with os.fdopen(descriptor, encoding="utf-8") as file:
        given = json.load(file)
    setup, work = given["setup"], given["work"]
    results = os.fdopen(setup["results"], "w", encoding="utf-8")
    try:
        _confine(setup)
    except (kernel.Unconfined, OSError) as error:
        os.write(setup["verdict"], str(error).encode())
        os._exit(1)
    for name in ("child", "kernel", "namespaces"):  # a program may have modules of these names
        sys.modules.pop(name, None)
    os.write(setup["verdict"], CONFINED)
    os.close(setup["verdict"])
    del given, setup, kernel
    _run(work, results)


def _confine(setup: dict[str, Any]) -> None:
    """Take everything from this process but CPU, memory, its streams and perhaps one folder."""
    import kernel  # pyright: ignore[reportMissingImports]
    import namespaces  # pyright: ignore[reportMissingImports]

    del sys.path[0]
    libc = ctypes.CDLL(None, use_errno=True)
    kind = setup["kind"]
    if kind != "bubblewrap":  # which sees to it by itself
        kernel.end_with_parent(libc)
    if kind == "namespaces":
        namespaces.enter(libc, setup["places"], kernel.call)
    kernel.end_if_alone(setup["lifeline"])
    folder = None
    if kind in ("bubblewrap", "namespaces"):
        folder = namespaces.FOLDER
        namespaces.bounded_folder(libc, setup["limits"]["file_bytes"], kernel.call)
    os.chdir(setup["folder"])
    kernel.limit(**setup["limits"])
    if kind == "limits":
        return
    kernel.drop_capabilities(libc)
    kernel.restrict_files(libc, setup["readable"], folder, required=folder is None)
    program = bytes.fromhex(setup["filter"])
    own = setup["own_pid"].to_bytes(4, sys.byteorder)
    kernel.filter_calls(libc, program.replace(own, os.getpid().to_bytes(4, sys.byteorder)))


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
