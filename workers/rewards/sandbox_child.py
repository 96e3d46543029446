"""The process that foreign code runs in: a script of the standard library alone.

Its argument is a JSON object that says what to run and where; results go, a JSON object a line, to
a descriptor of their own. It gives up all it does not need before the first foreign line runs.
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
    import sandbox_kernel as kernel  # pyright: ignore[reportMissingImports]

    del sys.path[0]
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
        value = function(*call.get("args", ()), **call.get("kwargs", {}))
        return {"value": json.loads(json.dumps(value, default=_plain))}
    except Exception as error:  # a wrong program is a result
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _plain(value: Any) -> Any:
    """What JSON has no word for: sets as sorted lists, all else as its text."""
    return sorted(value) if isinstance(value, (set, frozenset)) else repr(value)


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
