"""Tools: what a model may call, for one conversation after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ToolText:
    """The result of a call, as the model reads it.

    Attributes:
        text: The result, or what went wrong.
        error: Whether it went wrong, in the tool or because the call could not be made.
        timed_out: Whether it took too long.
    """

    text: str
    error: bool = False
    timed_out: bool = False


class ToolSession:
    """The tools of one conversation, with what they remember of it."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        """Make a call; returns in bounded time, and raises nothing that a tool does."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what the conversation has started."""


class Tool:
    """One or several functions by name.

    Attributes:
        deterministic: Whether a result is a function of the conversation alone.
        why_not_deterministic: What conversations share, if that was found out.
        schemas: JSON schemas, as chat templates take them, each `{"type": "function", "function":
            {"name", "description", "parameters"}}`.
    """

    deterministic: bool = True
    why_not_deterministic: str = ""
    schemas: tuple[Mapping[str, Any], ...] = ()

    def open(self, seed: int) -> ToolSession:
        """Begin a conversation; what is expensive to start is started with the first call."""
        raise NotImplementedError

    async def close(self) -> None:
        """End what all conversations share."""


@dataclass(frozen=True)
class TextFunction:
    """A function of one text.

    Attributes:
        name: As the model calls it.
        description: What it does, as the model is told.
        argument: Its argument's name.
        meaning: What the argument is.
    """

    name: str
    description: str
    argument: str
    meaning: str

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas in the form of `Tool.schemas`."""
        properties = {self.argument: {"type": "string", "description": self.meaning}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return ({"type": "function", "function": function},)

    def text(self, name: str, arguments: Mapping[str, Any]) -> str | ToolText:
        """Return the text that a call gives, or what is wrong with the call."""
        if name != self.name:
            return ToolText(f"there is no tool {name!r}", error=True)
        given = arguments.get(self.argument)
        if len(arguments) != 1 or not isinstance(given, str):
            text = f"{name} needs one argument, '{self.argument}', which is a text"
            return ToolText(text, error=True)
        return given


class Toolbox(Protocol):
    """Picklable recipe for tools."""

    def build(self) -> Tool:
        """Make them.

        Raises:
            ConfigError: If they cannot be made.
        """
        ...
