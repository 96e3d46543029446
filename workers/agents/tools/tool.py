"""Tools, and conversations in which a model calls them until it answers.

A turn that makes calls is answered with a message for each of them; a turn without calls is the
answer, which ends the conversation and is scored. Whatever a tool does, or a model writes where a
call should be, becomes a text that the model is told: nothing of it is raised. Calls are made one
after another, in the order in which the model wrote them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from annotated_types import Gt, Le

from ....dataflow.errors import ConfigError
from ....dataflow.options import FiniteFloat, NonNegativeFloat, PositiveInt, option_class
from ...data.task import Message
from ...isolation.child import USER_ERRORS
from ..environment import BadCall, Reply, ToolCall, TurnResult

Score = Callable[[str], Awaitable[float | None] | float | None]
"""From what a model answered to its reward; it may wait for something."""

_LOG = logging.getLogger("penstock.tools")
_CLOSE_S = 30.0  # seconds that a tool may take to end a conversation


@dataclass(frozen=True)
class ToolText:
    """The result of a call, as the model reads it."""

    text: str  # the result, or what went wrong
    error: bool = False  # whether it went wrong, in the tool or because the call could not be made
    timed_out: bool = False  # whether it took too long


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


def schema_of(name: str, description: str, parameters: Any) -> Mapping[str, Any]:
    """A schema in the form of `Tool.schemas`."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class TextFunction:
    name: str  # as the model calls it
    description: str  # what it does, in the words that the model is shown
    argument: str  # its argument's name
    meaning: str  # what the argument is

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"name '{self.name}' is no name\n    use letters, digits and _")

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        properties = {self.argument: {"type": "string", "description": self.meaning}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        return (schema_of(self.name, self.description, parameters),)

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


@option_class
class ToolLimits:
    """Limits of a conversation."""

    max_turns: PositiveInt = 8
    """The last of them must be the answer: what it calls is not called."""
    max_calls_per_turn: PositiveInt = 8
    """Further ones are answered with an error."""
    max_calls: PositiveInt = 32
    """In the whole conversation."""
    call_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 600.0
    """Seconds after which a call is given up whose tool does not keep a limit of its own."""
    penalty: NonNegativeFloat = 0.0
    """Taken off the reward of a turn for each malformed call and each call of an unknown tool."""


class ToolEnvironment:
    """The other side of one conversation; an `Environment`.

    A turn counts `tool_calls`, the calls that were made, `tool_errors`, those of them that went
    wrong, `tool_timeouts`, those of these that took too long, `unknown_tools`, `bad_calls`,
    `refused_calls`, those beyond a limit, and `turn_limit`, 1 where the last turn still made calls.
    """

    def __init__(
        self, tools: Sequence[Tool], score: Score, limits: ToolLimits | None = None
    ) -> None:
        self._owners = check_names(tools)
        self._tools, self._score, self._limits = tuple(tools), score, limits or ToolLimits()
        self._sessions: dict[int, ToolSession] = {}
        self._num_calls = 0

    def reset(self, problem: int, seed: int) -> None:
        self._num_calls = 0
        for number, tool in enumerate(self._tools):
            try:
                self._sessions[number] = tool.open(seed)
            except USER_ERRORS as error:  # its calls will fail
                _LOG.warning("a tool could not begin a conversation: %s", _described(error))

    async def step(self, reply: Reply) -> TurnResult:
        if not reply.calls:
            score = self._score(reply.content)
            reward = await score if inspect.isawaitable(score) else score
            return TurnResult(reward=reward, done=True)
        counts: Counter[str] = Counter()
        last = reply.turn + 1 >= self._limits.max_turns
        messages = [
            await self._answer(number, call, counts, last=last)
            for number, call in enumerate(reply.calls)
        ]
        counts["turn_limit"] += last
        wrong = counts["bad_calls"] + counts["unknown_tools"]
        return TurnResult(
            messages=() if last else messages,
            reward=-self._limits.penalty * wrong if wrong else 0.0,
            done=last,
            counts={name: float(count) for name, count in counts.items() if count},
        )

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await session.close()
            except USER_ERRORS as error:
                _LOG.warning("a tool could not end a conversation: %s", _described(error))

    async def _answer(
        self, number: int, call: ToolCall | BadCall, counts: Counter[str], *, last: bool
    ) -> Message:
        if isinstance(call, BadCall):
            counts["bad_calls"] += 1
            return _message("tool", f"Error: this call cannot be read: {call.why}")
        if call.name not in self._owners:
            counts["unknown_tools"] += 1
            known = ", ".join(self._owners) or "none"
            return _message(call.name, f"Error: there is no such tool; there are: {known}")
        if (why := self._refusal(number, last=last)) is not None:
            counts["refused_calls"] += 1
            return _message(call.name, f"Error: the call was not made: {why}")
        self._num_calls += 1
        counts["tool_calls"] += 1
        result = await self._call(call)
        counts["tool_errors"] += result.error
        counts["tool_timeouts"] += result.timed_out
        return _message(call.name, f"Error: {result.text}" if result.error else result.text)

    def _refusal(self, number: int, *, last: bool) -> str | None:
        limits = self._limits
        if last:
            return f"a conversation has at most {limits.max_turns} turns"
        if number >= limits.max_calls_per_turn:
            return f"a turn may make at most {limits.max_calls_per_turn} calls"
        if self._num_calls >= limits.max_calls:
            return f"a conversation may make at most {limits.max_calls} calls"
        return None

    async def _call(self, call: ToolCall) -> ToolText:
        """Make a call; nothing that a tool raises leaves it, and nothing takes for ever."""
        session = self._sessions.get(self._owners[call.name])
        if session is None:
            return ToolText("the tool could not begin this conversation", error=True)
        limit_s = self._limits.call_limit_s
        clock = asyncio.timeout(limit_s)
        try:
            async with clock:
                result: Any = await session.call(call.name, call.arguments)
            if isinstance(result, ToolText):
                return result
            return ToolText(f"the tool failed: it answered {type(result).__name__}", error=True)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # it is we who are told to stop
                raise
            return ToolText("the tool cancelled the call", error=True)
        except USER_ERRORS as error:
            if isinstance(error, TimeoutError) and clock.expired():
                text = f"the tool did not answer within {limit_s:g} s"
                return ToolText(text, error=True, timed_out=True)
            return ToolText(f"the tool failed: {_described(error)}", error=True)


def check_names(tools: Sequence[Tool]) -> dict[str, int]:
    """Return name -> place of its tool; refuse a name that two tools have."""
    owners: dict[str, int] = {}
    for number, tool in enumerate(tools):
        for schema in tool.schemas:
            name: str = schema["function"]["name"]
            if name in owners:
                raise ConfigError(
                    f"two tools are called '{name}'\n    rename one of them, or leave it out"
                )
            owners[name] = number
    return owners


def schemas_of(tools: Sequence[Tool]) -> tuple[Mapping[str, Any], ...]:
    return tuple(schema for tool in tools for schema in tool.schemas)


def _message(name: str, text: str) -> Message:
    """A tool's message; what is no character, which no tokenizer takes, becomes a question mark."""
    content = text.encode(errors="replace").decode()
    return {"role": "tool", "name": name.encode(errors="replace").decode(), "content": content}


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {str(error)[:500]}"
    except Exception:  # a tool's own
        return type(error).__name__
