"""Python as a tool: what it remembers of a conversation, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest
from killer import killing
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.tools.python_tool import PythonTools
from penstock.workers.agents.tools.tool import ToolSession, ToolText
from penstock.workers.isolation.sandbox import best_kind

GONE = "; the interpreter was ended, and all that it had defined is gone"

Children = Callable[[], list[psutil.Process]]


class Conversation:
    def __init__(self, **options: Any) -> None:
        self.runner = asyncio.Runner()
        every: dict[str, Any] = {"time_limit_s": 60, **options}
        self.tool = PythonTools(**every).build()
        self.session: ToolSession = self.tool.open(0)

    def run(self, code: object, **more: Any) -> ToolText:
        async def call() -> ToolText:
            return await self.session.call("python", {"code": code, **more})

        return self.runner.run(call())

    def close(self) -> None:
        self.runner.run(self.tool.close())
        self.runner.close()


@pytest.fixture
def conversation() -> Iterator[Conversation]:
    with closing(Conversation(minimum=best_kind().name)) as made:
        yield made


def test_names_stay_defined_and_the_last_value_is_shown(conversation: Conversation) -> None:
    assert conversation.run("x = 3\nprint('hi')\nx * 2") == ToolText("hi\n6\n")
    assert conversation.run("def f(n): return n + x") == ToolText("")
    assert conversation.run("f(4)") == ToolText("7\n")
    assert conversation.run("None") == ToolText("")


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("(", "SyntaxError: '(' was never closed"),
        ("import sys; sys.exit(2)", "SystemExit: 2"),
        ("raise BaseException('all')", "BaseException: all"),
        ("def g(): g()\ng()", "RecursionError: maximum recursion depth exceeded"),
        ("import socket; socket.socket()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os; os.fork()", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os; os.kill(os.getppid(), 9)", None),
        ("open('/etc/passwd')", None),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("class R:\n  def __repr__(self): raise ValueError('no')\nR()", "ValueError: no"),
        ("class E(Exception):\n  def __str__(self): raise SystemExit\nraise E", None),
    ],
)
def test_code_that_fails_says_so_and_the_interpreter_lives(
    conversation: Conversation, code: str, last_line: str | None
) -> None:
    conversation.run("kept = 1")

    result = conversation.run(code)

    assert result.error
    assert not result.timed_out
    assert last_line is None or result.text.rstrip().splitlines()[-1] == last_line
    assert conversation.run("kept") == ToolText("1\n")


def test_a_traceback_shows_the_code_and_none_of_our_files(conversation: Conversation) -> None:
    text = conversation.run("def f():\n    return 1 / 0\nf()").text

    assert text.startswith("Traceback (most recent call last):\n")
    assert "    return 1 / 0\n" in text
    assert "pieces.py" not in text
    assert "program.py" not in text


def test_what_is_printed_is_cut_and_has_no_half_characters(conversation: Conversation) -> None:
    long = conversation.run("print('a' * 100_000_000, end='')").text

    assert long == "a" * 16_384 + "... (99983616 more characters)"
    assert conversation.run("print('half \\ud800', end='')") == ToolText("half ?")
    assert conversation.run("import sys; print('e', file=sys.stderr)") == ToolText("e\n")
    assert conversation.run("import os; os.write(1, b'raw')") == ToolText("3\n")


def test_a_piece_without_end_costs_the_state() -> None:
    with closing(Conversation(time_limit_s=0.5)) as made:
        made.run("x = 1")
        late = ToolText(f"the code took longer than 0.5 s{GONE}", error=True, timed_out=True)
        assert made.run("while True: pass") == late
        assert made.run("try: x\nexcept NameError: print('gone')") == ToolText("gone\n")


@pytest.mark.slow
def test_cpu_time_is_limited_over_all_pieces() -> None:
    with closing(Conversation(cpu_limit_s=1)) as made:
        result = made.run("while True: pass")
    assert result.error
    assert result.text.endswith(GONE)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(3)",
        "import os; os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.closerange(0, 64)",
        "import sys; f = sys._getframe(2).f_locals['answers']; import os; os.write(f, b'x\\n')",
    ],
)
def test_an_interpreter_that_dies_or_lies_is_replaced(
    conversation: Conversation, code: str
) -> None:
    assert conversation.run(code).error
    assert conversation.run("1 + 1") == ToolText("2\n")


def test_too_many_threads_end_the_interpreter(conversation: Conversation) -> None:
    result = conversation.run(
        "import threading, time\nthreading.stack_size(65536)\n"
        "for _ in range(100): threading.Thread(target=time.sleep, args=(50,)).start()\n"
        "time.sleep(50)"
    )

    assert result == ToolText(f"it started too many threads{GONE}", error=True)


def test_between_two_calls_an_interpreter_has_no_time(
    conversation: Conversation, children: Children
) -> None:
    conversation.run(
        "import threading\nn = 0\ndef count():\n  global n\n  while True: n += 1\n"
        "threading.Thread(target=count, daemon=True).start()"
    )
    (front,) = children()

    def stopped() -> bool:
        family = (front, *front.children(recursive=True))
        return all(one.status() == psutil.STATUS_STOPPED for one in family)

    deadline = time.monotonic() + 30
    while not stopped():  # the kernel takes its time
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not conversation.run("n > 0").error


def test_conversations_share_no_names_and_begin_with_their_seed(conversation: Conversation) -> None:
    code = "import random; (random.random(), hash('a'))"

    async def calls() -> list[ToolText]:
        results: list[ToolText] = []
        for seed in (1, 1, 2):
            session = conversation.tool.open(seed)
            results.append(await session.call("python", {"code": code}))
            results.append(await session.call("python", {"code": "dir()"}))
            await session.close()
        return results

    first, names, again, _, other, _ = conversation.runner.run(calls())
    assert first == again
    assert first != other
    assert names.text == "['__builtins__', '__name__', 'random']\n"


@pytest.mark.parametrize("arguments", [{}, {"code": 3}, {"code": "1", "more": 2}, {"text": "1"}])
def test_wrong_arguments_start_nothing(
    conversation: Conversation, arguments: dict[str, object], children: Children
) -> None:
    async def call() -> ToolText:
        return await conversation.session.call("python", arguments)

    expected = ToolText("python needs one argument, 'code', which is a text", error=True)
    assert conversation.runner.run(call()) == expected
    assert children() == []


def test_a_cancelled_call_ends_the_interpreter(
    conversation: Conversation, children: Children
) -> None:
    async def cancelled() -> None:
        running = conversation.session.call("python", {"code": "import time; time.sleep(100)"})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await running

    conversation.runner.run(cancelled())

    assert children() == []


def test_a_forgotten_conversation_takes_its_interpreter_along(
    conversation: Conversation, children: Children
) -> None:
    conversation.run("1")
    assert children()

    conversation.session = conversation.tool.open(1)
    gc.collect()

    assert children() == []


def test_a_machine_or_name_that_does_not_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="minimum=fort is no kind of sandbox"):
        PythonTools(minimum="fort").build()
    with pytest.raises(ConfigError, match="name 'my tool' is no name"):
        PythonTools(name="my tool").build()
    with pytest.raises(ValueError, match="memory_mb is 1; expected at least 64"):
        PythonTools(memory_mb=1)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during"])
def test_an_interpreter_that_is_killed_from_outside_is_made_again(
    conversation: Conversation, children: Children, when: str
) -> None:
    conversation.run("import random\nx = [random.random()]")
    expected = conversation.run("x")
    (front,) = children()

    if when == "before":
        with killing(lambda: _family(front), lambda: True):
            pass
        found = conversation.run("x")
    else:
        used_s = _cpu_s(front)
        code = "n = 0\nwhile n < 20_000_000: n += 1\nx"
        with killing(lambda: [front.pid], lambda: _cpu_s(front) > used_s + 0.3):
            found = conversation.run(code)
    assert found == expected
    assert front not in children()
    assert conversation.run("x") == expected


def _family(front: psutil.Process) -> list[int]:
    return [one.pid for one in (front, *front.children(recursive=True))]


def _cpu_s(front: psutil.Process) -> float:
    try:
        times = [one.cpu_times() for one in (front, *front.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0.0
    return sum(one.user + one.system for one in times)


def test_one_that_says_something_else_is_none(
    conversation: Conversation, children: Children
) -> None:
    assert conversation.run("import os; os.urandom(8)").text.startswith("b")
    (front,) = children()
    with killing(lambda: _family(front), lambda: True):
        pass
    lost = ToolText(f"it ended or spoke between two calls{GONE}", error=True)
    assert conversation.run("1") == lost
    assert conversation.run("1") == ToolText("1\n")
