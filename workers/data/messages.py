"""Messages: what makes a list of them a conversation, and what the user said in it.

A conversation is a list of messages, each with a `role` and a `content`, as OpenAI, TRL and the
chat templates of transformers have them. Rendering them is in `chat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages."""
_NOT_READ = {
    "function_call": "give the call as tool_calls",
    "refusal": "give the text as content",
    "audio": "only text is read",
    "train": "give weight: 0 for what is not imitated",
    "loss": "give weight: 0 for what is not imitated",
}
"""Fields of other formats that would change what is trained on -> what to write instead."""


class NotMessages(ValueError):
    """A value that is no conversation; the text says why."""


def check_messages(given: Any) -> list[dict[str, Any]]:
    """Return the value as messages: parts of text joined, further fields of a message kept."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise NotMessages(f"expected a list of messages, got {_shown(given)}")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(given, start=1):
        if not isinstance(message, Mapping):
            raise NotMessages(f"message {number} is {_shown(message)}, not an object")
        kept = {key: value for key, value in message.items() if value is not None}
        parts = kept.get("content")
        if isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts):
            kept["content"] = _joined(number, parts)
        _check_message(number, kept)
        messages.append({"content": "", **kept} if kept.get("tool_calls") else kept)
    return messages


def messages_in(text: str) -> list[Any] | None:
    """Return the conversation that a text holds as JSON; None if it is a plain text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    conversation = read and all(isinstance(one, Mapping) and "role" in one for one in read)
    return read if conversation else None


def is_imitated(message: Mapping[str, Any]) -> bool:
    """Return whether training imitates a message: the assistant's, unless it has a weight of 0."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def _joined(number: int, parts: Sequence[Mapping[str, Any]]) -> str:
    for part in parts:
        if not isinstance(part.get("text"), str):
            kind = f"{part.get('type')!r:.40}"
            raise NotMessages(
                f"the content of message {number} has a part of type {kind}, not text"
            )
    return "".join(part["text"] for part in parts)


def _check_message(number: int, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise NotMessages(
            f"message {number} has the role {role!r:.40}; roles are {', '.join(ROLES)}"
        )
    for field, remedy in _NOT_READ.items():
        if field in message:
            raise NotMessages(f"message {number} has '{field}', which is not read; {remedy}")
    weight = message.get("weight", 0)
    if isinstance(weight, bool) or weight not in ((0, 1) if role == "assistant" else (0,)):
        raise NotMessages(
            f"message {number}, the {role}'s, has the weight {weight!r:.40}; the assistant's "
            "messages have 1, or 0 if they are only read, and no others are imitated"
        )
    if content is None and not message.get("tool_calls"):
        raise NotMessages(f"message {number} has no content")
    if content is not None and not isinstance(content, str):
        raise NotMessages(f"the content of message {number} is {_shown(content)}, not text")


def _shown(value: Any) -> str:
    kinds = {str: "text", list: "a list", dict: "an object", type(None): "null", bool: "a boolean"}
    if value == []:
        return "an empty list"
    return kinds.get(type(value), "a number" if isinstance(value, (int, float)) else "another type")


def last_user_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the user's last message: the part of a conversation that a verifier reads."""
    said = [str(message["content"]) for message in messages if message["role"] == "user"]
    return said[-1] if said else ""
