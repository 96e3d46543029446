"""Conversations with tools: what is called, counted, refused and scored, whatever tools do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import BadCall, Environment, Reply, ToolCall, TurnResult
from penstock.workers.agents.tools.functions import FunctionTool
from penstock.workers.agents.tools.parsing import call_parser
from penstock.workers.agents.tools.tool import (
    Tool,
    ToolEnvironment,
    ToolLimits,
    ToolSession,
    ToolText,
    schemas_of,
)
from tool_functions import add

from ..conversing import converse


def _length(answer: str) -> float:
    return float(len(answer))


def _reply(*calls: ToolCall | BadCall, turn: int = 0, content: str = "") -> Reply:
    return Reply(turn=turn, text=content, content=content, calls=calls)


class Bad(Tool):
    """A tool whose functions are given, and may do anything."""

    def __init__(self, **functions: Callable[[], Awaitable[Any]]) -> None:
        self._functions = functions
        self.closed: list[int] = []
        self.schemas = tuple({"type": "function", "function": {"name": one}} for one in functions)

    def open(self, seed: int) -> ToolSession:
        if "unopened" in self._functions:
            raise RuntimeError("not today")
        return BadSession(self._functions, self.closed, seed)


class BadSession(ToolSession):
    def __init__(
        self, functions: Mapping[str, Callable[[], Awaitable[Any]]], closed: list[int], seed: int
    ) -> None:
        self._functions, self._closed, self._seed = functions, closed, seed

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        return await self._functions[name]()

    async def close(self) -> None:
        self._closed.append(self._seed)
        raise OSError("it does not close")


def test_a_conversation_calls_tools_until_it_answers() -> None:
    environment: Environment = ToolEnvironment([FunctionTool([add])], _length)
    assert isinstance(environment, ToolEnvironment)
    said = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    content, calls = call_parser("hermes")(said)

    first, second = converse(
        environment,
        Reply(turn=0, text=said, content=content, calls=calls),
        _reply(turn=1, content="three"),
    )

    assert first == TurnResult(
        messages=[{"role": "tool", "name": "add", "content": "3"}], counts={"tool_calls": 1.0}
    )
    assert second == TurnResult(reward=5.0, done=True)


def test_an_answer_may_be_scored_by_something_that_waits() -> None:
    async def score(answer: str) -> float:
        await asyncio.sleep(0)
        return 0.5

    assert converse(ToolEnvironment([], score), _reply()) == [TurnResult(reward=0.5, done=True)]


def test_what_is_no_call_is_told_counted_and_charged() -> None:
    environment = ToolEnvironment([FunctionTool([add])], _length, ToolLimits(penalty=0.25))

    (result,) = converse(
        environment,
        _reply(BadCall("{", "the JSON is cut off"), ToolCall("sub"), ToolCall("add", {"a": "x"})),
    )

    assert [message["content"] for message in result.messages] == [
        "Error: this call cannot be read: the JSON is cut off",
        "Error: there is no such tool; there are: add",
        "Error: argument 'a' of add: Input should be a valid integer; got \"x\"",
    ]
    assert result.counts == {
        "bad_calls": 1.0,
        "unknown_tools": 1.0,
        "tool_calls": 1.0,
        "tool_errors": 1.0,
    }
    assert result.reward == -0.5
    assert not result.done


def test_calls_beyond_a_limit_are_not_made() -> None:
    limits = ToolLimits(max_calls_per_turn=2, max_calls=3, max_turns=3)
    environment = ToolEnvironment([FunctionTool([add])], _length, limits)
    call = ToolCall("add", {"a": 1})

    first, second, third = converse(
        environment, *(_reply(call, call, call, turn=turn) for turn in range(3))
    )

    assert [message["content"] for message in first.messages] == [
        "2",
        "2",
        "Error: the call was not made: a turn may make at most 2 calls",
    ]
    assert [message["content"] for message in second.messages] == [
        "2",
        "Error: the call was not made: a conversation may make at most 3 calls",
        "Error: the call was not made: a turn may make at most 2 calls",
    ]
    assert first.counts == {"tool_calls": 2.0, "refused_calls": 1.0}
    assert second.counts == {"tool_calls": 1.0, "refused_calls": 2.0}
    assert third == TurnResult(done=True, counts={"refused_calls": 3.0, "turn_limit": 1.0})


async def _raise(error: BaseException) -> ToolText:
    raise error


async def _forever() -> ToolText:
    await asyncio.sleep(1000)
    return ToolText("")


async def _something(value: Any) -> Any:
    return value


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("I say nothing")


@pytest.mark.parametrize(
    ("function", "content", "timed_out"),
    [
        (lambda: _raise(ValueError("no")), "Error: the tool failed: ValueError: no", False),
        (lambda: _raise(SystemExit(3)), "Error: the tool failed: SystemExit: 3", False),
        (lambda: _raise(_Mute()), "Error: the tool failed: _Mute", False),
        (lambda: _raise(TimeoutError()), "Error: the tool failed: TimeoutError: ", False),
        (lambda: _raise(asyncio.CancelledError()), "Error: the tool cancelled the call", False),
        (lambda: 1 / 0, "Error: the tool failed: ZeroDivisionError: division by zero", False),
        (lambda: 3, "Error: the tool failed: TypeError: ", False),
        (lambda: _something("text"), "Error: the tool failed: it answered str", False),
        (lambda: _something(ToolText("half \ud800")), "half ?", False),
        (_forever, "Error: the tool did not answer within 0.05 s", True),
    ],
)
def test_no_tool_breaks_a_conversation(
    function: Callable[[], Any], content: str, timed_out: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tool = Bad(bad=function)
    environment = ToolEnvironment(
        [tool, FunctionTool([add])], _length, ToolLimits(call_limit_s=0.05)
    )

    (result,) = converse(environment, _reply(ToolCall("bad"), ToolCall("add", {"a": 1})))

    assert result.messages[0]["content"].startswith(content)
    assert result.messages[1]["content"] == "2"
    assert result.counts.get("tool_errors", 0) == content.startswith("Error")
    assert result.counts.get("tool_timeouts", 0) == timed_out
    assert tool.closed == [7]
    assert "a tool could not end a conversation: OSError: it does not close" in caplog.text


def test_a_tool_that_cannot_begin_fails_its_calls() -> None:
    environment = ToolEnvironment([Bad(unopened=_forever), FunctionTool([add])], _length)

    (result,) = converse(environment, _reply(ToolCall("unopened"), ToolCall("add", {"a": 1})))

    assert [message["content"] for message in result.messages] == [
        "Error: the tool could not begin this conversation",
        "2",
    ]


def test_who_cancels_a_conversation_is_heard() -> None:
    async def cancelled() -> None:
        environment = ToolEnvironment([Bad(bad=_forever)], _length)
        environment.reset(0, 0)
        stepping = asyncio.ensure_future(environment.step(_reply(ToolCall("bad"))))
        await asyncio.sleep(0)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        await environment.close()

    asyncio.run(cancelled())


def test_names_are_unique_and_limits_make_sense() -> None:
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        ToolEnvironment([FunctionTool([add]), FunctionTool([add])], _length)
    with pytest.raises(ValueError, match="max_turns is 0; expected at least 1"):
        ToolLimits(max_turns=0)
    assert [s["function"]["name"] for s in schemas_of([FunctionTool([add])])] == ["add"]
