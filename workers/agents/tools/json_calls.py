"""Calls that are written as JSON: in tags as Hermes and Qwen write them, or alone as Llama does.

Each reader takes what a model said and returns the part that is no call, and the calls in order. It
raises nothing, and its time is in proportion to the length of the text.
"""

from __future__ import annotations

import re
from typing import Any, cast

from ..environment import BadCall, ToolCall
from .call_values import MOST_CALLS, bad_call, call_of, read_json, skip_space

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_NAMED = re.compile(r'\{\s*"(?:name|type)"\s*:')
"""How a call begins that has no tag; another object may be an answer."""


def hermes_calls(text: str) -> tuple[str, tuple[ToolCall | BadCall, ...]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times.

    Args:
        text: What a model said.

    Returns:
        The text around the calls, and the calls.
    """
    content: list[str] = []
    calls: list[ToolCall | BadCall] = []
    place = 0
    while (start := text.find(_OPEN, place)) >= 0:
        content.append(text[place:start])
        if len(calls) == MOST_CALLS:
            calls.append(bad_call(text[start:], f"a turn may make {MOST_CALLS} calls"))
            place = len(text)
            break
        call, place = _tagged(text, start)
        calls.append(call)
    content.append(text[place:])
    return "".join(content).strip(), tuple(calls)


def _tagged(text: str, start: int) -> tuple[ToolCall | BadCall, int]:
    """The call at a tag, and where it ends.

    The value decides where it ends, as its texts may contain the tags. Where there is no value,
    the next tag does.
    """
    place = skip_space(text, start + len(_OPEN))
    read = read_json(text, place)
    if not isinstance(read, str):
        value, end = read
        end = skip_space(text, end)
        if text.startswith(_CLOSE, end):
            end += len(_CLOSE)
            return _named(text[start:end], value, "arguments"), end
        read = f"there is no {_CLOSE} after the object"
    end = text.find(_CLOSE, place)
    again = text.find(_OPEN, place, end if end >= 0 else len(text))
    if again >= 0:
        return bad_call(text[start:again], read), again
    end = len(text) if end < 0 else end + len(_CLOSE)
    return bad_call(text[start:end], read), end


def _named(written: str, value: object, *keys: str) -> ToolCall | BadCall:
    """The call that an object describes; its arguments are at the first of these keys it has."""
    if not isinstance(value, dict):
        return bad_call(written, "a call is an object with a name and arguments")
    fields = cast("dict[str, Any]", value)
    arguments = next((fields[key] for key in keys if key in fields), None)
    if arguments is None:
        return bad_call(written, f"the object has no {keys[0]}")
    return call_of(written, fields.get("name"), arguments)


def llama_calls(text: str) -> tuple[str, tuple[ToolCall | BadCall, ...]]:
    """A turn that is `{"name": ..., "parameters": {...}}`, or several of them with `;` between.

    A turn that has the tag `<|python_tag|>` must be calls from there on. Another turn is an answer
    unless it begins like a call; so an answer may be JSON.

    Args:
        text: What a model said.

    Returns:
        The text before the tag, or all of it if there is no call, and the calls.
    """
    content, tag, said = text.partition(_PYTHON_TAG)
    if not tag:
        content, said = "", text
        if not _NAMED.match(text, skip_space(text, 0)):
            return text.strip(), ()
    calls: list[ToolCall | BadCall] = []
    place = skip_space(said, 0)
    while not calls or place < len(said):
        if len(calls) == MOST_CALLS:
            calls.append(bad_call(said[place:], f"a turn may make {MOST_CALLS} calls"))
            break
        read = read_json(said, place)
        if isinstance(read, str):
            calls.append(bad_call(said[place:], read))
            break
        end = skip_space(said, read[1])
        calls.append(_named(said[place:end], read[0], "parameters", "arguments"))
        if end < len(said) and said[end] != ";":
            calls.append(bad_call(said[end:], "calls are separated by a semicolon"))
            break
        place = skip_space(said, end + 1)
    return content.strip(), tuple(calls)
