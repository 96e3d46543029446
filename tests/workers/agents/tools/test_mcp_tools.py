"""Tools of an MCP server that runs: its schemas, its answers, and what it may do wrong."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from killer import killing
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.library_logs import LibraryLines
from penstock.workers.agents.tools import mcp_tools
from penstock.workers.agents.tools.mcp_tools import McpTools
from penstock.workers.agents.tools.tool import ToolText

from .calling import Loop

pytestmark = pytest.mark.slow

_FOLDER = Path(__file__).parents[2]
GOOD = (sys.executable, "-P", str(_FOLDER / "tool_mcp_server.py"))
BAD = (sys.executable, "-P", str(_FOLDER / "bad_mcp_server.py"))

Children = Callable[[], list[psutil.Process]]


Serve = Callable[..., Loop]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as held:

        def make(**given: Any) -> Loop:
            every: dict[str, Any] = {"command": BAD, "time_limit_s": 60, **given}
            return held.enter_context(closing(Loop(McpTools(**every))))

        yield make


def test_a_server_made_with_the_package_is_called(serve: Serve) -> None:
    server = serve(command=GOOD, max_bytes=100)

    schema = server.tool.schemas[0]["function"]
    assert schema["name"] == "add"
    assert schema["description"] == "Add two integers."
    assert schema["parameters"]["required"] == ["a"]
    assert schema["parameters"]["properties"]["b"]["type"] == "integer"

    assert server.call("add", a=3) == ToolText("4")
    assert server.call("long") == ToolText("x" * 100 + "... (999900 more characters)")
    assert '"a": 1' in server.call("record").text
    assert server.call("nothing") == ToolText("there is no tool 'nothing'", error=True)
    for name, arguments in (("fail", {}), ("add", {"a": "three"}), ("add", {})):
        result = server.call(name, **arguments)
        assert result.error
        assert not result.timed_out
    assert server.call("add", a=3, b=4) == ToolText("7")

    async def many() -> list[ToolText]:
        calls = [_made(server.tool.open(i), "add", {"a": i}) for i in range(5)]
        return await asyncio.gather(*calls)

    assert server.run(many()) == [ToolText(str(i + 1)) for i in range(5)]


async def _made(session: Any, name: str, arguments: dict[str, Any]) -> ToolText:
    return await session.call(name, arguments)


def test_a_bad_answer_costs_its_call(serve: Serve) -> None:
    server = serve(max_restarts=0, max_bytes=20)

    assert server.call("babble") == ToolText("babble")
    assert server.call("refuse").text.startswith("refuse failed: this ")
    assert server.call("odd").error
    assert server.call("flood") == ToolText("x" * 20 + "... (4999980 more characters)")


def test_a_server_that_prints_is_named_once(
    serve: Serve, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    server = serve(max_restarts=0)
    for handler in logging.getLogger("mcp").handlers:
        if isinstance(handler, LibraryLines):
            handler.num_seen.clear()  # of earlier tests
    for _ in range(30):
        assert server.call("babble") == ToolText("babble")
    server.close()

    said = [r.getMessage() for r in caplog.records if "MCP server" in r.getMessage()]
    assert [line for line in said if "bad_mcp_server.py" in line and "got 'hello there" in line]
    assert len(said) <= 3
    # What propagates no further is not written by anything but our handler.
    assert not logging.getLogger("mcp").propagate
    assert len("".join(capfd.readouterr())) < 2000


def test_a_server_that_vanishes_costs_its_call_and_has_a_budget(serve: Serve) -> None:
    server = serve(max_restarts=1)
    lost = ToolText("the tool's server ended during the call", error=True)

    assert server.call("vanish") == lost
    assert server.call("add", a=1) == ToolText("2")
    assert server.call("vanish") == lost
    assert server.call("add", a=1) == ToolText(
        "the tool's server is gone, after 1 restarts of it", error=True
    )


def test_what_a_server_has_started_ends_with_it(serve: Serve) -> None:
    server = serve()
    left = int(server.call("leave").text)
    assert psutil.pid_exists(left)

    server.close()

    assert not psutil.pid_exists(left)


def test_a_call_that_takes_long_is_given_up_and_the_server_kept(serve: Serve) -> None:
    server = serve(time_limit_s=1, max_restarts=0)

    assert server.call("ignore") == ToolText(
        "ignore took longer than 1 s", error=True, timed_out=True
    )
    assert server.call("add", a=1) == ToolText("2")


def test_a_server_that_hangs_is_replaced(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "ANSWER_S", 0.2)
    server = serve(time_limit_s=1, max_restarts=1)

    assert server.call("hang").timed_out
    assert server.call("add", a=1) == ToolText("2")


def test_each_conversation_may_have_a_server_of_its_own(serve: Serve, children: Children) -> None:
    server = serve(per_conversation=True, allowed=("count",))

    async def counted() -> list[str]:
        first, second = server.tool.open(0), server.tool.open(1)
        texts = [(await one.call("count", {})).text for one in (first, first, second)]
        await first.close()
        return texts

    texts = server.run(counted())

    assert texts == ["1", "2", "1"]
    assert len(children()) == 1


def test_an_event_loop_may_follow_another(children: Children) -> None:
    tool = McpTools(command=BAD, time_limit_s=60, max_restarts=0).build()

    async def once() -> ToolText:
        return await tool.open(0).call("add", {"a": 1})

    assert asyncio.run(once()) == ToolText("2")
    assert asyncio.run(once()) == ToolText("2")
    assert children() == []


def test_a_server_that_never_answers_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        McpTools(command=(*BAD, "mute"), start_limit_s=0.5).build()

    assert "does not tell its tools: it did not answer in time" in str(caught.value)


def test_a_server_that_never_answers_again_costs_calls(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(self: McpTools) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "add"}}]

    monkeypatch.setattr(McpTools, "_listed", listed)
    server = serve(command=(*BAD, "mute"), start_limit_s=0.5, max_restarts=0)

    assert server.call("add", a=1) == ToolText(
        "the tool's server cannot be reached: it did not answer in time", error=True
    )
    assert server.call("add", a=1).text == "the tool's server is gone, after 0 restarts of it"


def test_a_server_that_ends_at_once_is_refused_with_what_it_said() -> None:
    with pytest.raises(ConfigError) as caught:
        McpTools(command=(*BAD, "dead")).build()

    assert "it said: this server does not want to" in str(caught.value)


def test_what_cannot_be_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has either a command or a url"):
        McpTools().build()
    with pytest.raises(ConfigError, match="it said: /no/such/program cannot be started"):
        McpTools(command=("/no/such/program",)).build()
    with pytest.raises(ConfigError, match="has no tool 'subtract'"):
        McpTools(command=BAD, allowed=("subtract",)).build()

    def found(name: str) -> None:
        del name

    monkeypatch.setattr(mcp_tools, "find_spec", found)
    with pytest.raises(ConfigError) as caught:
        McpTools(command=BAD).build()
    assert str(caught.value) == (
        "MCP servers need the package mcp, which is not installed\n    pip install penstock-rl[mcp]"
    )


@pytest.mark.parametrize("own", [True, False])
def test_a_deterministic_server_that_is_killed_is_told_again(
    serve: Serve, children: Children, *, own: bool
) -> None:
    server = serve(per_conversation=own, deterministic=True)

    async def calls() -> list[str]:
        session = server.tool.open(0)
        name = "count" if own else "add"
        texts = [(await session.call(name, {"a": 1})).text for _ in range(2)]
        with killing(lambda: [child.pid for child in children()], lambda: True):
            pass  # between two calls
        texts.append((await session.call(name, {"a": 1})).text)
        await session.close()
        return texts

    assert server.run(calls()) == (["1", "2", "3"] if own else ["2", "2", "2"])


def test_and_so_is_one_that_ends_in_a_call_but_once(serve: Serve, tmp_path: Path) -> None:
    server = serve(per_conversation=True, deterministic=True)
    mark = tmp_path / "mark"

    async def calls() -> list[str]:
        session = server.tool.open(0)
        given = [("count", {}), ("vanish", {"once": str(mark)}), ("count", {}), ("vanish", {})]
        texts = [(await session.call(name, arguments)).text for name, arguments in given]
        await session.close()
        return texts

    assert server.run(calls()) == ["1", "vanish", "2", "the tool's server ended during the call"]
