"""The process that functions run in: a script that needs the standard library alone.

It speaks JSON, one message a line, and each message has a nonce. First comes `{"nonce", "path",
"functions", "max_bytes"}`, after which it imports the functions; then each line is a call,
`{"nonce", "name", "arguments"}`. Either is answered once, by `{"nonce", "text", "error"}`. Nothing
is ever unpickled. What a function prints goes nowhere.

How the process is supervised and killed with all that it has started is `verifiers/child.py`'s.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_LONGEST_ERROR = 1000
"""Characters of an error that are told."""


def called(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    max_bytes: int,
    caught: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
) -> tuple[str, bool]:
    """Call a function of a user's, which may return or raise anything.

    Args:
        function: What to call.
        arguments: By keyword.
        max_bytes: Of the text that is kept.
        caught: What counts as a failure of this call and not of the process.

    Returns:
        The text of its result, cut, and whether it is that of an error.
    """
    try:
        return cut(_text(function(**arguments)), max_bytes), False
    except caught as error:
        return cut(_described(error), max_bytes), True


def cut(text: str, max_bytes: int) -> str:
    """The beginning of a text that takes so many bytes, with a note of how much is missing.

    Half of a surrogate pair, which cannot be encoded, becomes a question mark.
    """
    kept = text[:max_bytes].encode(errors="replace")[:max_bytes].decode(errors="ignore")
    missing = len(text) - len(kept)
    return f"{kept}... ({missing} more characters)" if missing else kept


def _text(value: object) -> str:
    """A text as it is, what JSON has words for as JSON, all else as Python shows it."""
    if isinstance(value, str):
        return "".join(value)  # not what a class derived from it makes of it
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _described(error: BaseException) -> str:
    """The kind of an error and what it says, as far as it can say it."""
    try:
        said = str(error)[:_LONGEST_ERROR]
    except BaseException:  # user code again
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _serve(calls: int, replies: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    process = os.getpid()

    def reply(nonce: str, text: str, error: bool) -> None:
        if os.getpid() != process:  # user code has forked, and returned on both sides
            os._exit(0)
        message = json.dumps({"nonce": nonce, "text": text, "error": error})
        left = memoryview(message.encode() + b"\n")
        while left:
            left = left[os.write(replies, left) :]

    with os.fdopen(calls, "rb") as lines:
        setup = json.loads(lines.readline())
        sys.path[:] = setup["path"]
        found: dict[str, Callable[..., Any]] = {}

        def find() -> str:
            made: dict[str, Any] = {}  # objects of classes, which are this process's own
            for name, place in setup["functions"].items():
                module, _, attribute = place.partition(":")
                owner, _, method = attribute.rpartition(".")
                if owner and owner not in made:
                    made[owner] = getattr(import_module(module), owner)()
                found[name] = getattr(made[owner] if owner else import_module(module), method)
            return ""

        reply(setup["nonce"], *called(find, {}, setup["max_bytes"]))
        while line := lines.readline():
            call = json.loads(line)
            function = found[call["name"]]
            reply(call["nonce"], *called(function, call["arguments"], setup["max_bytes"]))


def _main() -> None:
    """Have `verifiers/child.py` do the rest; by its path, as the package need not be importable."""
    path = Path(__file__).with_name("supervised.py")
    spec = spec_from_file_location("_penstock_supervised", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.supervisor().main(_serve)


if __name__ == "__main__":
    _main()
