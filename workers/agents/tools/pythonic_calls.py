"""Calls that are written as a Python list: `[f(a=1), g(b="x")]`, as Llama 3.2 and 4 write them.

Nothing is evaluated. The text must first be made of a few kinds of tokens, nested no deeper than
some bound, so that Python's own parser, which then reads it, can neither run out of stack nor take
long; of the tree that it makes only literals and calls with named arguments are accepted.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from ..environment import BadCall, ToolCall
from .call_values import MOST_CALLS, bad_call, call_of, distinct

_TAGS = ("<|python_start|>", "<|python_end|>")
_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_TOKENS = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<text>'''(?:[^'\\]++|\\[\s\S]|'(?!''))*'''"
    r'|"""(?:[^"\\]++|\\[\s\S]|"(?!""))*"""'
    r"|'(?:[^'\\\n]++|\\[\s\S])*'"
    r'|"(?:[^"\\\n]++|\\[\s\S])*")'
    rf"|(?P<name>{_NAME})"
    r"|(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<open>[\[({])|(?P<close>[\])}])|(?P<mark>[,:=])",
    re.ASCII,
)
_VALUES = ("text", "name", "number")
_LONGEST = 1 << 17
"""Characters that are read; Python's parser takes most of a second for as many small literals."""
_DEEPEST = 40
_LONGEST_NAME = 256


class _Refused(ValueError):
    """Why it is no call; its text is told to the model."""


def pythonic_calls(text: str) -> tuple[str, tuple[ToolCall | BadCall, ...]]:
    """A turn that is a list of calls of functions.

    Args:
        text: What a model said.

    Returns:
        Nothing and the calls, or the text if it does not begin like a list of calls.
    """
    said = text.strip()
    if said.startswith(_TAGS[0]):
        said = said.removeprefix(_TAGS[0]).removesuffix(_TAGS[1]).strip()
    if not _BEGINS.match(said):
        return text.strip(), ()
    try:
        return "", _calls(said)
    except _Refused as error:
        return "", (bad_call(said, str(error)),)


def _calls(said: str) -> tuple[ToolCall | BadCall, ...]:
    _check_tokens(said)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of an escape that is none
            tree = ast.parse(said, mode="eval").body
    except SyntaxError as error:
        raise _Refused(f"this is not a list of calls: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError):  # such as a number of 5,000 digits
        raise _Refused("this cannot be read as a list of calls") from None
    if not isinstance(tree, ast.List):
        raise _Refused("a turn that makes calls is one list of them")
    if len(tree.elts) > MOST_CALLS:
        raise _Refused(f"a turn may make {MOST_CALLS} calls")
    return tuple(_call(said, node) for node in tree.elts)


def _check_tokens(said: str) -> None:
    """Refuse what literals and calls are not made of, before Python's parser sees it."""
    if len(said) > _LONGEST:
        raise _Refused(f"the calls are longer than {_LONGEST} characters")
    place = depth = 0
    before = ""
    while place < len(said):
        token = _TOKENS.match(said, place)
        if token is None:
            raise _Refused(f"{said[place]!r} at character {place} belongs to no literal")
        kind = token.lastgroup or ""
        depth += (kind == "open") - (kind == "close")
        if kind in _VALUES and before in _VALUES:
            raise _Refused(f"there is no comma before character {place}")
        if kind == "name" and token.end() - place > _LONGEST_NAME:
            raise _Refused(f"a name is longer than {_LONGEST_NAME} characters")
        if depth > _DEEPEST:
            raise _Refused(f"brackets are nested deeper than {_DEEPEST}")
        before = before if kind == "space" else kind
        place = token.end()
    if depth > 0:
        raise _Refused("the list of calls is cut off")


def _call(said: str, node: ast.expr) -> ToolCall | BadCall:
    start, end = node.col_offset, node.end_col_offset
    single = node.lineno == node.end_lineno == 1 and said.isascii()
    written = said[start:end] if single else said
    try:
        if not isinstance(node, ast.Call):
            raise _Refused("the list may hold calls only")
        if node.args:
            raise _Refused("name every argument, as in f(a=1)")
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise _Refused("every argument has a name of its own")
            arguments[keyword.arg] = _value(keyword.value)
        return call_of(written, _dotted(node.func), arguments)
    except _Refused as error:
        return bad_call(written, str(error))


def _dotted(node: ast.expr) -> str:
    """The name of a function, which may be `module.function`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _Refused("what is called has no name")


def _value(node: ast.expr) -> Any:
    """The JSON value that a literal stands for."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="true" | "false" as name):
            return name == "true"
        case ast.Name(id="null"):
            return None
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            try:
                return distinct([*zip(map(_key, keys), map(_value, values), strict=True)])
            except ValueError as error:
                raise _Refused(str(error)) from None
        case ast.Name(id=name):
            raise _Refused(f"{name} is no literal; write texts in quotes")
        case _:
            raise _Refused(f"a {type(node).__name__} is no JSON value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _Refused("a key of an object is a text")
