"""What a call may be made of: a name and JSON values, of bounded size and depth.

A model may write anything. What passes here can be put into messages, logs and pipes, whatever
format it was written in.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from ..environment import BadCall, ToolCall

MOST_CALLS = 64
"""Calls that are read of one turn: what follows them is one bad call."""

_DEEPEST = 32
"""Lists and objects within each other."""
_LONGEST_NAME = 256
_MOST_BITS = 4096
"""Of an integer; Python itself refuses to print much larger ones."""
_SHOWN = 2000
"""Characters of a bad call that are kept."""
_SPACE = re.compile(r"\s*")


class _Refused(ValueError):
    """Why a value is none; its text is told to the model."""


def skip_space(text: str, start: int) -> int:
    """Where the next character stands that is no white space."""
    found = _SPACE.match(text, start)
    assert found is not None, "it matches nothing, too"
    return found.end()


def read_json(text: str, start: int) -> tuple[Any, int] | str:
    """A JSON value at the beginning of some text.

    Args:
        text: What may go on after the value.
        start: Where the value begins, without white space.

    Returns:
        The value and where it ends, or why there is none.
    """
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            return "the JSON is cut off"
        return f"this is not JSON: {error.msg} at character {error.pos - start}"
    except _Refused as error:
        return str(error)
    except RecursionError:
        return f"lists and objects are nested deeper than {_DEEPEST}"
    except ValueError:  # an integer of thousands of digits
        return "a number is too large"


def call_of(written: str, name: object, arguments: object) -> ToolCall | BadCall:
    """A call, if these are a name and arguments.

    Args:
        written: What the model wrote, for messages.
        name: What should be the name.
        arguments: What should be an object.
    """
    try:
        if not isinstance(name, str) or not name:
            raise _Refused("the name of the tool is missing, or no text")
        if len(name) > _LONGEST_NAME:
            raise _Refused(f"the name of the tool is longer than {_LONGEST_NAME} characters")
        if not isinstance(arguments, dict):
            raise _Refused("the arguments are not an object")
        _check(name, 0)
        _check(cast(object, arguments), 0)
    except _Refused as error:
        return bad_call(written, str(error))
    return ToolCall(name, cast("dict[str, Any]", arguments))


def bad_call(written: str, why: str) -> BadCall:
    """A call that cannot be made; of a long one the beginning is kept."""
    return BadCall(written[:_SHOWN], why)


def _check(value: object, depth: int) -> None:
    """Refuse what is no JSON, or too deep or too large for others to handle."""
    if depth > _DEEPEST:
        raise _Refused(f"lists and objects are nested deeper than {_DEEPEST}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Refused("a text has half of a surrogate pair, which is no character") from None
    elif isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise _Refused("a number is too large")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _Refused("a number is not finite")
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            if not isinstance(key, str):
                raise _Refused("a key of an object is no text")
            _check(key, depth + 1)
            _check(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[object]", value):
            _check(item, depth + 1)
    elif value is not None:
        raise _Refused(f"a {type(value).__name__} is no JSON value")


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no JSON number")


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with these members.

    Raises:
        ValueError: If a key occurs twice: which of its values is meant cannot be known.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Refused(f"the key {twice[:_LONGEST_NAME]!r} stands twice in an object")
    return found


_DECODER = json.JSONDecoder(parse_constant=_constant, object_pairs_hook=distinct)
