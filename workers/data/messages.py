"""Messages: what makes a list of them a conversation, and what the user said in it.

A conversation is a list of messages, each with a `role` and a `content`, as OpenAI, TRL and the
chat templates of transformers have them. Rendering them is in `chat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
"""Who may speak."""


class NotMessages(ValueError):
    """Why a value is no conversation."""


def check_messages(given: Any) -> list[dict[str, Any]]:
    """The value as messages, further fields of a message kept.

    Raises:
        NotMessages: If it is no list of messages, saying which one is wrong and how.
    """
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise NotMessages(f"expected a list of messages, got {_shown(given)}")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(given, start=1):
        if not isinstance(message, Mapping):
            raise NotMessages(f"message {number} is {_shown(message)}, not an object")
        # Columns of Parquet give every message every field, null where it has none.
        kept = {key: value for key, value in message.items() if value is not None}
        _check_message(number, kept)
        messages.append({"content": "", **kept} if kept.get("tool_calls") else kept)
    return messages


def _check_message(number: int, message: Mapping[str, Any]) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise NotMessages(
            f"message {number} has the role {role!r:.40}; roles are {', '.join(ROLES)}"
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
    """What the user said last: the part of a conversation that a verifier looks at."""
    said = [str(message["content"]) for message in messages if message["role"] == "user"]
    return said[-1] if said else ""
