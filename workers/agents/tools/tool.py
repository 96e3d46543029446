"""Tools: what a model may call, for one conversation after another."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolText:
    """What the model is told of its call.

    Attributes:
        text: The result, or what went wrong.
        error: Whether it went wrong, in the tool or because the call could not be made.
        timed_out: Whether it took too long.
    """

    text: str
    error: bool = False
    timed_out: bool = False


class ToolSession(Protocol):
    """The tools of one conversation, with what they remember of it."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Awaitable[ToolText]:
        """Make a call; returns in bounded time, and raises nothing that a tool does."""
        ...

    async def close(self) -> None:
        """End what the conversation has started."""
        ...


class Tool(Protocol):
    """One or several functions by name.

    Attributes:
        deterministic: Whether a result is a function of the conversation alone.
    """

    deterministic: bool

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """JSON schemas, as chat templates take them.

        Each is `{"type": "function", "function": {"name", "description", "parameters"}}`.
        """
        ...

    def open(self, seed: int) -> ToolSession:
        """Begin a conversation; what is expensive to start is started with the first call."""
        ...

    async def close(self) -> None:
        """End what all conversations share."""
        ...


class Toolbox(Protocol):
    """Picklable recipe for tools."""

    def build(self) -> Tool:
        """Make them.

        Raises:
            ConfigError: If they cannot be made.
        """
        ...
