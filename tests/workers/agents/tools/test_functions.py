"""Functions as tools: their schemas, what they are called with, and all that they may do wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from killer import killing
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.tools.functions import FunctionTool, FunctionTools
from penstock.workers.agents.tools.tool import ToolText
from tool_functions import WAYS, add, describe, misbehave

from .calling import Loop

PLACES = ("tool_functions:misbehave", "tool_functions:add", "tool_functions:describe")

Children = Callable[[], list[psutil.Process]]


def options(**given: Any) -> FunctionTools:
    every: dict[str, Any] = {"functions": PLACES, "time_limit_s": 30, **given}
    return FunctionTools(**every)


@pytest.fixture
def pooled() -> Iterator[Loop]:
    with closing(Loop(options(num_processes=1))) as loop:
        yield loop


def test_a_schema_is_made_of_hints_and_docstring() -> None:
    (schema,) = FunctionTool([describe]).schemas

    assert schema == {
        "type": "function",
        "function": {
            "name": "describe",
            "description": "Describe a thing.",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string", "description": "The thing."},
                    "kinds": {
                        "type": "array",
                        "items": {"type": "string", "enum": ["red", "blue"]},
                        "description": "Of it.",
                    },
                    "note": {"type": "string", "nullable": True, "description": "To add."},
                },
                "required": ["what", "kinds"],
            },
        },
    }


_CHECKED: list[tuple[str, dict[str, Any], ToolText]] = [
    ("add", {"a": 1, "b": 2}, ToolText("3")),
    ("add", {"a": 1}, ToolText("2")),
    ("add", {}, ToolText("add needs the argument 'a'", error=True)),
    ("add", {"a": 1, "c": 2},
     ToolText("add has no argument 'c'; its arguments: a, b", error=True)),
    ("add", {"a": "1"},
     ToolText("argument 'a' of add: Input should be a valid integer; got \"1\"", error=True)),
    ("add", {"a": 1.5},
     ToolText("argument 'a' of add: Input should be a valid integer; got 1.5", error=True)),
    ("add", {"a": b"1"}, ToolText("argument 'a' of add is no JSON value", error=True)),
    ("add", {"a": 10**5000}, ToolText("argument 'a' of add is no JSON value", error=True)),
    ("describe", {"what": "é", "kinds": ["red"]},
     ToolText('{"what": "é", "kinds": ["red"], "note": null}')),
    ("describe", {"what": "x", "kinds": ["red", "green"]},
     ToolText("argument 'kinds'[1] of describe: Input should be 'red' or 'blue'; "
              'got ["red", "green"]', error=True)),
    ("subtract", {"a": 1}, ToolText("there is no tool 'subtract'", error=True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "expected"), _CHECKED)
def test_what_a_function_is_called_with_is_checked(
    pooled: Loop, name: str, arguments: dict[str, Any], expected: ToolText
) -> None:
    assert pooled.call(name, **arguments) == expected
    session = FunctionTool([add, describe]).open(0)  # a quick one, in this process
    assert pooled.run(_made(session.call(name, arguments))) == expected


async def _made(call: Any) -> ToolText:
    return await call


_ENDS = {
    "os._exit": "misbehave failed: its process ended with exit code 3",
    "segfault": "misbehave failed: its process ended by SIGSEGV",
    "abort": "misbehave failed: its process ended by SIGABRT",
    "kill itself": "misbehave failed: its process ended by SIGKILL",
    "kill group": "misbehave failed: its process ended by SIGKILL",
    "write everywhere": "misbehave failed: ",  # which of its words comes first is a race
    "close everything": "misbehave failed: its process ended with exit code 1",
    "sys.exit": "SystemExit: 4",
    "raise": "ValueError: no such thing",
    "raise base": "BaseException: of all",
    "raise interrupt": "KeyboardInterrupt",
    "raise mute": "_Mute",
    "raise long": "ValueError: " + "x" * 1000,
    "unshown": "SystemExit: 5",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "nested": "RecursionError: maximum recursion depth exceeded while getting the repr of "
    "an object",
    "huge": "ValueError: Exceeds the limit (4300 digits) for integer string conversion; "
    "use sys.set_int_max_str_digits() to increase the limit",
}
_RESULTS = {
    "bytes": "b'\\xff\\x00'",
    "nan": "NaN",
    "long text": "ä" * 8192 + "... (9991808 more characters)",
    "surrogate": "half ? of it",
    "circle": "[[...]]",
    "fork and return": "parent",
    "print": "printed",
    "change folder": "changed",
    "nothing": "null",
}
_OVERRUNS = ("hang", "loop", "ignore signals")


@pytest.mark.slow
@pytest.mark.parametrize("way", _ENDS)
def test_a_function_that_fails_costs_its_own_call(pooled: Loop, way: str) -> None:
    found = pooled.call("misbehave", how=way)
    assert found.error
    assert not found.timed_out
    if way == "write everywhere":
        assert found.text.startswith(_ENDS[way])
    else:
        assert found.text == _ENDS[way]
    assert pooled.call("add", a=1) == ToolText("2")


@pytest.mark.parametrize("way", _RESULTS)
def test_whatever_is_returned_becomes_a_text(pooled: Loop, way: str) -> None:
    assert pooled.call("misbehave", how=way) == ToolText(_RESULTS[way])
    assert pooled.call("add", a=1) == ToolText("2")


@pytest.mark.parametrize("way", _OVERRUNS)
def test_a_function_without_end_is_stopped(way: str) -> None:
    stopped = "misbehave took longer than 0.3 s and was stopped"
    with closing(Loop(options(num_processes=1, time_limit_s=0.3))) as hasty:
        assert hasty.call("misbehave", how=way) == ToolText(stopped, error=True, timed_out=True)


def test_every_way_to_misbehave_is_tried() -> None:
    forks = {"fork that stays", "fork and hang"}
    assert {*_ENDS, *_RESULTS, *_OVERRUNS} | forks == set(WAYS)


@pytest.mark.slow
def test_what_an_overrunning_function_has_started_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "pid"
    monkeypatch.setenv("LEFT_BEHIND", str(told))
    with closing(Loop(options(time_limit_s=2))) as loop:
        assert loop.call("misbehave", how="fork and hang").timed_out
        assert not psutil.pid_exists(int(told.read_text()))


def test_a_process_that_a_function_left_ends_with_the_tool() -> None:
    with closing(Loop(options())) as loop:
        left = int(loop.call("misbehave", how="fork that stays").text)
        assert psutil.pid_exists(left)
    assert not psutil.pid_exists(left)


@pytest.mark.parametrize("quick", [True, False])
def test_each_conversation_has_a_class_of_its_own(quick: bool, children: Children) -> None:
    given = options(functions=("tool_functions:Notes", PLACES[1]), quick=quick)

    async def talk() -> list[list[str]]:
        tool = given.build()
        assert tool.deterministic
        names = [schema["function"]["name"] for schema in tool.schemas]
        assert names == ["hang", "note", "notes", "add"]
        sessions = [tool.open(seed) for seed in range(3)]
        said = [[await one.call("note", {"text": f"{n}"}) for n in range(2)] for one in sessions]
        kept = [await one.call("notes", {}) for one in sessions]
        for one in sessions:
            await one.close()
        assert not children()
        await tool.close()
        return [
            [text.text for text in (*own, notes)] for own, notes in zip(said, kept, strict=True)
        ]

    assert asyncio.run(talk()) == [["1", "2", '["0", "1"]']] * 3


def test_what_a_killed_process_remembered_is_not_begun_anew() -> None:
    async def talk() -> tuple[ToolText, ToolText]:
        tool = options(functions=("tool_functions:Notes",), time_limit_s=0.3).build()
        session = tool.open(0)
        late, after = await session.call("hang", {}), await session.call("note", {"text": "a"})
        await session.close()
        return late, after

    late, after = asyncio.run(talk())
    assert late.timed_out
    assert after.error
    assert "its state of this conversation is lost" in after.text


@pytest.mark.parametrize(
    ("name", "given", "why_not"),
    [
        ("keep", None, "tool keep changes KEPT of its module"),
        ("count", None, "tool count changes counted of its module"),
        ("put", None, "tool put changes TABLE of its module"),
        ("put", True, ""),
        ("look_up", None, ""),
        ("look_up", False, ""),
        ("Notes", None, ""),
    ],
)
@pytest.mark.parametrize("quick", [True, False])
def test_what_a_module_keeps_is_seen(
    name: str, given: bool | None, why_not: str, quick: bool
) -> None:
    places = (f"tool_functions:{name}",)
    tool: Any = FunctionTools(functions=places, deterministic=given, quick=quick).build()
    assert tool.deterministic == (not why_not if given is None else given)
    assert tool.why_not_deterministic == why_not


def test_a_cancelled_call_ends_its_process(children: Children) -> None:
    async def cancelled() -> None:
        tool = options().build()
        calling = asyncio.ensure_future(_made(tool.open(0).call("misbehave", {"how": "hang"})))
        while not children():
            await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await tool.close()

    asyncio.run(cancelled())


def test_calls_share_processes_and_an_event_loop_may_follow_another(children: Children) -> None:
    tool = options(num_processes=2).build()

    async def many() -> list[ToolText]:
        sessions = [tool.open(i) for i in range(6)]
        return await asyncio.gather(
            *(_made(one.call("add", {"a": i})) for i, one in enumerate(sessions))
        )

    for _ in range(2):
        assert asyncio.run(many()) == [ToolText(str(i + 1)) for i in range(6)]
        assert len(children()) == 2
    asyncio.run(tool.close())


def test_a_tool_that_is_forgotten_takes_its_processes_along() -> None:
    tool = options().build()
    assert asyncio.run(_made(tool.open(0).call("add", {"a": 1}))).text == "2"
    del tool
    # The fixture of every test looks for processes that are left.


def test_processes_that_cannot_import_a_function_cost_calls(tmp_path: Path) -> None:
    tool = options(functions=PLACES[1:2]).build()
    folder = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [one for one in sys.path if one != folder])
        result = asyncio.run(_made(tool.open(0).call("add", {"a": 1})))

    assert result.error
    assert result.text.startswith("add cannot be started: ModuleNotFoundError: No module named")


def test_a_quick_function_may_fail_as_well() -> None:
    async def calls() -> list[ToolText]:
        session = FunctionTool([misbehave], max_bytes=10).open(0)
        ways = ("raise", "sys.exit", "recursion", "unshown", "long text", "nan")
        return [await session.call("misbehave", {"how": way}) for way in ways]

    results = asyncio.run(calls())

    assert [one.error for one in results] == [True, True, True, True, False, False]
    assert results[0].text == "ValueError... (15 more characters)"
    assert results[4].text == "äääää... (9999995 more characters)"


def test_a_key_that_ends_the_program_ends_it_in_a_quick_function() -> None:
    async def call() -> ToolText:
        return await FunctionTool([misbehave]).open(0).call("misbehave", {"how": "raise interrupt"})

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(call())


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("tool_functions:undocumented", "has no docstring"),
        ("tool_functions:variadic", "it has arguments that cannot be named"),
        ("tool_functions:later", "it is a coroutine function"),
        ("tool_functions:nothing_there", "function 'tool_functions:nothing_there' cannot be"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(place: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FunctionTools(functions=(place,)).build()
    assert why in str(caught.value)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="num_processes is 0; expected at least 1"):
        FunctionTools(functions=PLACES, num_processes=0)
    with pytest.raises(ConfigError, match="no functions are given"):
        FunctionTools(functions=()).build()
    with pytest.raises(ConfigError, match="two functions are called 'add'"):
        FunctionTools(functions=(PLACES[1], PLACES[1])).build()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_call_whose_process_is_killed_is_made_again(
    tmp_path: Path, children: Children, *, deterministic: bool
) -> None:
    given = options(functions=("tool_functions:linger",), num_processes=1, time_limit_s=60)
    lost = ToolText("linger failed: its process ended by SIGKILL", error=True)
    mark = tmp_path / "mark"
    with closing(Loop(replace(given, deterministic=deterministic))) as loop:
        with killing(lambda: [child.pid for child in children()], mark.exists):
            found = loop.call("linger", mark=str(mark))
        assert found == (ToolText("done") if deterministic else lost)
