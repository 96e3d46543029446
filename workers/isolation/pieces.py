"""A program for the sandbox that runs pieces of Python one after another, which share their names.

Each line of standard input is `{"nonce", "code", "most_chars"}`, and is answered by a line of
standard output, `{"nonce", "value"}` or `{"nonce", "error"}`: what the piece printed, and the value
of its last expression or what it raised. All this shares a process with the pieces, so it may
answer anything.

It is read as a text and runs with the standard library, in the process of `confine.py`.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import linecache
import os
import random
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import that is left out makes every run faster
    from typing import Any


class _Printed:
    """Takes the place of standard output and error: keeps the beginning, counts the rest."""

    def __init__(self, most_chars: int) -> None:
        self.kept: list[str] = []
        self.room, self.missing = most_chars, 0
        self.encoding, self.errors = "utf-8", "replace"

    def write(self, text: Any) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        kept = text[: self.room]
        self.room -= len(kept)
        self.missing += len(text) - len(kept)
        if kept:
            self.kept.append(kept)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def text(self) -> str:
        more = f"... ({self.missing} more characters)" if self.missing else ""
        return "".join(self.kept) + more


def serve(seed: int) -> None:
    """Run pieces until there are no more."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.stdin = io.StringIO()
    random.seed(seed)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    for number, line in enumerate(calls, 1):
        call = json.loads(line)
        printed = _Printed(call["most_chars"])
        sys.stdout = sys.stderr = printed
        failed = _run(call["code"], f"<piece {number}>", names, printed)
        answer = {"nonce": call["nonce"], "error" if failed else "value": printed.text()}
        left = json.dumps(answer).encode() + b"\n"
        while left:
            left = left[os.write(answers, left) :]


def _run(code: str, file: str, names: dict[str, Any], printed: _Printed) -> bool:
    """Run one piece; whether it failed."""
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    try:
        tree = ast.parse(code, file)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, file, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), names)
            if value is not None:
                printed.write(f"{value!r}\n")
    except BaseException as error:  # SystemExit ends the piece alone
        try:
            printed.write(_described(error, file))
        except BaseException as other:
            printed.write(f"{type(error).__name__}, which cannot be shown: {type(other).__name__}")
        return True
    return False


def _described(error: BaseException, file: str) -> str:
    """A traceback without the frames that are ours."""
    shown = traceback.TracebackException.from_exception(error, limit=-20)
    while shown.stack and not shown.stack[0].filename.startswith("<piece "):
        shown.stack.pop(0)
    return "".join(shown.format())
