"""Warm processes that run functions, one call at a time each, for whichever event loop asks.

A process that overruns the limit of a call, dies, or says what is no answer costs that call: it is
killed with all that it has started, and the next call has another one. How it is killed is
`verifiers/child.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...verifiers.child import was_killed
from .lines import Lines, NotSaid
from .tool import ToolText

_CHILD = Path(__file__).with_name("function_child.py")
_STOP_S = 5.0
"""Seconds a killed process may take to vanish."""
_END_S = 0.5
"""Between a process's closing its end and its own, so that how it ended can be told."""
_POLL_S = 0.005


class FunctionPool:
    """Runs calls of some functions in at most `num_processes` processes, started as needed.

    Args:
        functions: Name of a tool -> its function, `module:function`, or `module:Class.method` of a
            class that each process makes once.
        num_processes: Calls at once; further ones wait for their turn.
        time_limit_s: Seconds one call may take, once it has its turn.
        start_limit_s: Seconds a process may take to start and import the functions.
        max_bytes: Of a result.
        repeats: Whether a call whose process is killed is made again, once: whoever has killed it
            did not mean the call.
        keeps_state: Whether calls build on each other: none is made once a process has ended.
    """

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        num_processes: int,
        time_limit_s: float,
        start_limit_s: float,
        max_bytes: int,
        repeats: bool = False,
        keeps_state: bool = False,
    ) -> None:
        self._functions = dict(functions)
        self._num_processes = num_processes
        self._time_limit_s, self._start_limit_s = time_limit_s, start_limit_s
        self._max_bytes, self._repeats = max_bytes, repeats
        self._keeps_state, self._started = keeps_state, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(num_processes)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        # Also at garbage collection and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _stop_all, self._all)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that have not been killed."""
        return [process.popen.pid for process in self._all if not process.killed]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        """Run a function, and tell what came of it.

        Args:
            name: One of the functions.
            arguments: By keyword, as JSON.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a semaphore belongs to the loop that waits for it
            self._loop, self._turns = loop, asyncio.Semaphore(self._num_processes)
        async with self._turns:
            try:
                return await self._run(name, arguments, is_last=not self._repeats)
            except _Killed:
                return await self._run(name, arguments, is_last=True)

    async def close(self) -> None:
        """Kill all processes, and wait for that; may be called again."""
        for process in self._all:
            process.kill()
        for process in tuple(self._all):
            await self._gone(process)

    async def _run(self, name: str, arguments: Mapping[str, Any], *, is_last: bool) -> ToolText:
        """Make a call once."""
        try:
            process = await self._take(is_last=is_last)
        except NotSaid as error:
            return ToolText(f"{name} cannot be started: {error}", error=True)
        message = {"nonce": secrets.token_hex(8), "name": name, "arguments": dict(arguments)}
        try:
            answer = await process.lines.ask(message, self._time_limit_s)
            result = ToolText(str(answer.get("text")), error=answer.get("error") is not False)
            self._idle.append(process)
            return result
        except NotSaid as error:
            if error.ended:
                await _ends(process, _END_S)
            process.kill()
            code = await self._gone(process)
            if error.ended and was_killed(code) and not is_last:
                raise _Killed from error
            how = _ended_how(code) if error.ended else ""
            if error.timed_out:
                limit = f"{self._time_limit_s:g}"
                text = f"{name} took longer than {limit} s and was stopped"
                return ToolText(text, error=True, timed_out=True)
            return ToolText(f"{name} failed: {error}{how}", error=True)
        except BaseException:  # whoever waits for the call has given up
            process.kill()
            raise

    async def _take(self, *, is_last: bool) -> _Process:
        """Return a process that serves no call."""
        while self._idle:
            process = self._idle.pop()
            if process.lines.quiet:
                return process
            process.kill()  # it died idle, or speaks unasked; no call is to blame
            await self._gone(process)
        if self._keeps_state and self._started:
            raise NotSaid("its process has ended, and its state of this conversation is lost")
        self._started = True
        process = _Process(_most_bytes(self._max_bytes))
        self._all.add(process)
        setup = {"path": sys.path, "functions": self._functions, "max_bytes": self._max_bytes}
        try:
            message = {"nonce": secrets.token_hex(8), **setup}
            answer = await process.lines.ask(message, self._start_limit_s)
            if answer.get("error") is not False:
                raise NotSaid(str(answer.get("text")))
        except NotSaid as error:
            if error.ended:
                await _ends(process, _END_S)
            process.kill()
            code = await self._gone(process)
            if error.ended and was_killed(code) and not is_last:
                raise _Killed from error
            raise
        except BaseException:
            process.kill()
            raise
        return process

    async def _gone(self, process: _Process) -> int:
        """Wait for a killed process; its exit code."""
        await _ends(process, _STOP_S)
        process.let_go()
        self._all.discard(process)
        return process.popen.returncode


class _Killed(Exception):
    """The process that had a call was killed."""


class _Process:
    """One process and the way to talk to it.

    Attributes:
        popen: Its supervisor.
        lines: What is said to and by it.
        killed: Whether it has been told to end.

    Raises:
        NotSaid: If the system starts no more processes.
    """

    def __init__(self, most_bytes: int) -> None:
        try:
            with contextlib.ExitStack() as undo:
                reading, self._lifeline = os.pipe()  # closed by the system if we die
                undo.callback(os.close, self._lifeline)
                try:
                    self.popen = subprocess.Popen(
                        [sys.executable, "-P", str(_CHILD), str(reading)],
                        bufsize=0,
                        pass_fds=[reading],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        start_new_session=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
                    )
                finally:
                    os.close(reading)
                undo.pop_all()
        except OSError as error:
            raise NotSaid(f"no more processes can be started: {error.strerror}") from error
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.lines = Lines(self.popen.stdin.fileno(), self.popen.stdout.fileno(), most_bytes)
        self.killed = False

    def kill(self) -> None:
        """Have the supervisor kill all that was started, and end."""
        if self.killed:
            return
        self.killed = True
        # Not closed alone: a copy of this process may hold the pipe open.
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._lifeline, b"x")
        os.close(self._lifeline)

    def let_go(self) -> None:
        """Close what is left of it, when it has ended or should have."""
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(timeout=_STOP_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()


def _ended_how(code: int) -> str:
    """How a process ended by itself, for messages."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f" by {signal.Signals(-code).name}"
    return f" with exit code {code}"


async def _ends(process: _Process, wait_s: float) -> None:
    """Wait until a process ends, for so many seconds at most."""
    deadline = time.monotonic() + wait_s
    while process.popen.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)


def _most_bytes(max_bytes: int) -> int:
    """Of an answer: each byte of a text takes 6 in JSON at most, and the note and nonce some."""
    return 6 * max_bytes + len(json.dumps({"nonce": "", "text": "", "error": False})) + 1000


def _stop_all(processes: set[_Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(timeout=_STOP_S)
        process.let_go()
