"""Processes that answer calls, one at a time each, for whichever event loop asks.

A process that overruns the limit of a call, dies, or says what is no answer costs that call: it is
killed with all that it has started (see `child`), and the next call has another one. So what runs
in it may loop for ever, fill the memory of its process or crash it. What a process had that was
killed from outside, another does again, once. Each limit runs from the moment a message begins to
be sent, whether the process reads, computes or writes.

A message is a line of JSON and has a nonce, which the one answer to it has as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...dataflow.errors import no_exit
from .child import was_killed

_CHILD = Path(__file__).with_name("child.py")
STOP_S = 5.0  # seconds a killed process may take to vanish
END_S = 0.5  # between a process's closing its end and its own, so that how it ended can be told
_POLL_S = 0.005
_PIECE = 1 << 16
_MOST_KILLED = 3  # processes that are killed from outside before they are ready, for one call
_LOG = logging.getLogger("penstock.isolation")

T = TypeVar("T")


class NotSaid(Exception):
    """There is no answer, or one that cannot be believed.

    Attributes:
        timed_out: Whether it took too long.
        ended: Whether the process closed its end, as one that ends does.
        exit_code: How it ended then, or minus the signal; None if it goes on all the same.
    """

    def __init__(self, why: str, *, timed_out: bool = False, ended: bool = False) -> None:
        super().__init__(why)
        self.timed_out, self.ended = timed_out, ended
        self.exit_code: int | None = None


class NotStarted(Exception):
    """No process can be had: the system starts none, it did not become ready, or said why not."""

    def __init__(self, why: OSError | NotSaid | str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class CallResult:
    """Result of a call: a value, or an error in words."""

    value: Any = None
    error: str | None = None


class Lines:
    """Messages to a process and its answers of so many bytes, which may be anything.

    Between two messages nothing is bound to an event loop, so a process outlives the loop that
    started it, and may be used by the next one.
    """

    def __init__(self, writing: int, reading: int, most_bytes: int) -> None:
        self._writing, self._reading, self._most_bytes = writing, reading, most_bytes
        os.set_blocking(writing, False)
        os.set_blocking(reading, False)

    async def ask(self, message: Mapping[str, Any], limit_s: float) -> CallResult:
        """Send a message, and wait for its answer so many seconds in all.

        Raises:
            NotSaid: If there is no answer by then.
        """
        deadline = asyncio.get_running_loop().time() + limit_s
        # An answer to an earlier message that comes late is none to this one.
        nonce = secrets.token_hex(8)
        await self._send(json.dumps({"nonce": nonce, **message}).encode() + b"\n", deadline)
        return read_answer(await self._receive(deadline), nonce)

    @property
    def quiet(self) -> bool:
        """Whether the other side lives and has said nothing since its last answer."""
        try:
            os.read(self._reading, 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def _send(self, line: bytes, deadline: float) -> None:
        unsent = memoryview(line)
        while unsent:
            try:
                unsent = unsent[os.write(self._writing, unsent) :]
            except BlockingIOError:
                await ready(self._writing, deadline, to_write=True)
            except OSError:  # it has died; what it has answered, if anything, says more
                return

    async def _receive(self, deadline: float) -> bytes:
        received = bytearray()
        while True:
            try:
                piece = os.read(self._reading, _PIECE)
            except BlockingIOError:
                await ready(self._reading, deadline)
                continue
            if not piece:
                raise NotSaid("its process ended", ended=True)
            received += piece
            if b"\n" in piece:
                break
            if len(received) > self._most_bytes:
                raise NotSaid("it said more than it may")
        line, _, rest = bytes(received).partition(b"\n")
        if rest:
            raise NotSaid("it answered twice")
        return line


def read_answer(line: bytes, nonce: str) -> CallResult:
    try:
        said: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise NotSaid("it did not answer in JSON") from None
    match said:
        case {"nonce": own, "error": str(error)} if own == nonce and len(said) == 2:
            return CallResult(error=error)
        case {"nonce": own, "value": value} if own == nonce and len(said) == 2:
            return CallResult(value)
        case _:
            raise NotSaid("what it said is no answer")


async def ready(descriptor: int, deadline: float, *, to_write: bool = False) -> None:
    """Wait until a pipe has something, or takes something.

    Raises:
        NotSaid: If it does not by then.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not done.done():
            done.set_result(None)

    add, remove = loop.add_reader, loop.remove_reader
    if to_write:
        add, remove = loop.add_writer, loop.remove_writer
    add(descriptor, tell)
    try:
        async with asyncio.timeout_at(deadline):
            await done
    except TimeoutError:
        raise NotSaid("it took too long", timed_out=True) from None
    finally:
        remove(descriptor)


class OwnThread:
    """A thread that makes one call after another, for what cannot run in another process.

    A call that hangs cannot be stopped: its thread is left alone, ends when the call returns, and
    does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Not of an executor: Python waits for those at its end, also for one that hangs.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make a call after all others."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with no_exit():
                    result = function(*arguments)
            except BaseException as error:  # noqa: BLE001 - the caller is told, whatever it is
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        return future

    def end(self) -> None:
        """Let the thread end after what was submitted; does not wait for it."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def completed(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a loop of its own, also where another one is running."""

    def run() -> T:
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


class LoopSemaphore:
    """So many at once, in whichever event loop asks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore = asyncio.Semaphore(count)

    def here(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a semaphore belongs to the loop that waits for it
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._count)
        return self._semaphore


class ProcessPool:
    """Runs calls in at most `num_processes` processes, started as needed.

    Args:
        setup: What `child` makes of it answers the calls.
        runs: What that is, for messages: "a verifier".
        num_processes: Calls at once; further ones wait for their turn.
        time_limit_s: Seconds one call may take, once it has its turn.
        start_limit_s: Seconds a process may take to start and become ready.
        most_bytes: Of an answer.
        accepts: Whether a value can be one; a process that gives another is believed no more.
        repeats: Whether a call whose process is killed is made again, once: what has killed it
            did not mean the call.
        keeps_state: Whether calls build on each other: none is made once a process has ended.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        *,
        runs: str,
        num_processes: int,
        time_limit_s: float,
        start_limit_s: float,
        most_bytes: int,
        accepts: Callable[[Any], bool],
        repeats: bool = True,
        keeps_state: bool = False,
    ) -> None:
        self._setup, self._runs, self._turns = dict(setup), runs, LoopSemaphore(num_processes)
        self.time_limit_s, self._start_limit_s = time_limit_s, start_limit_s
        self._most_bytes, self._accepts, self._repeats = most_bytes, accepts, repeats
        self.keeps_state, self._used = keeps_state, False
        self.num_repeated = 0  # calls that were made again because their process was killed
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        # Also at garbage collection and at exit, whichever comes first.
        self.stop = weakref.finalize(self, _stop_all, self._all, runs)

    @property
    def process_ids(self) -> list[int]:
        return [one.popen.pid for one in self._all if not one.killed and one.popen.poll() is None]

    def start(self) -> None:
        """Start a process, for a later call.

        Raises:
            NotStarted: If the system starts no more.
        """
        self._idle.append(self._new())

    def drain(self, limit_s: float) -> None:
        """Have processes that serve no call end by themselves, as far as they do so in time."""
        ending = [one for one in self._idle if one.ready]
        for process in ending:
            process.end_calls()
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s and any(one.popen.poll() is None for one in ending):
            time.sleep(_POLL_S)

    async def call(self, limit_s: float | None = None, **call: Any) -> CallResult:
        """Have a process answer a call, which is JSON, within `time_limit_s` or another limit.

        Raises:
            NotSaid: If it does not.
            NotStarted: If there is no process for it.
        """
        async with self._turns.here():
            try:
                return await self._call(call, limit_s or self.time_limit_s)
            except NotSaid as error:
                if not (self._repeats and was_killed(error.exit_code)):
                    raise
            self.num_repeated += 1
            _LOG.warning("%s's process was killed; another takes its place", self._runs)
            return await self._call(call, limit_s or self.time_limit_s)

    async def close(self) -> None:
        """Kill all processes, and wait for that; may be called again."""
        for process in self._all:
            process.kill()
        for process in tuple(self._all):
            await self._gone(process)

    async def _call(self, call: Mapping[str, Any], limit_s: float) -> CallResult:
        process = await self._take()
        answer = await self._ask(process, call, limit_s)
        self._idle.append(process)
        return answer

    async def _ask(
        self, process: _Process, message: Mapping[str, Any], limit_s: float
    ) -> CallResult:
        try:
            answer = await process.lines.ask(message, limit_s)
            if answer.error is None and process.ready and not self._accepts(answer.value):
                raise NotSaid("what it said is no answer")
            return answer
        except NotSaid as error:
            if error.ended:
                await process.ends(END_S)
                error.exit_code = process.popen.poll()
            process.kill()
            await self._gone(process)
            raise
        except BaseException:  # the caller was cancelled
            process.kill()
            raise

    async def _take(self) -> _Process:
        """Return a process that serves no call, and is ready for one."""
        for process in [one for one in self._all if one.killed and one.popen.poll() is not None]:
            await self._gone(process)
        num_killed = 0
        while True:
            process = await self._quiet()
            if process is None:
                if self.keeps_state and self._used and not num_killed:
                    raise NotStarted(
                        "its process has ended, and its state of this conversation is lost"
                    )
                self._used = True
                process = self._new()
            if process.ready:
                return process
            setup = {"path": sys.path, **self._setup}
            try:
                answer = await self._ask(process, setup, self._start_limit_s)
            except NotSaid as error:
                num_killed += was_killed(error.exit_code)
                if not was_killed(error.exit_code) or num_killed > _MOST_KILLED:
                    raise NotStarted(error) from error
                _LOG.warning("%s's process was killed; another takes its place", self._runs)
                continue
            if answer.error is not None:
                process.kill()
                await self._gone(process)
                raise NotStarted(answer.error)
            process.ready = True
            return process

    async def _quiet(self) -> _Process | None:
        """Return an idle process that lives and has said nothing unasked, if there is one."""
        while self._idle:
            process = self._idle.pop()
            if process.lines.quiet and process.popen.poll() is None:
                return process
            process.kill()  # no call is to blame
            await self._gone(process)
        return None

    def _new(self) -> _Process:
        try:
            process = _Process(self._most_bytes)
        except OSError as error:
            raise NotStarted(error) from error
        self._all.add(process)
        return process

    async def _gone(self, process: _Process) -> None:
        await process.ends(STOP_S)
        process.let_go(self._runs)
        self._all.discard(process)


class _Process:
    """One process, by its supervisor, and the way to talk to it."""

    def __init__(self, most_bytes: int) -> None:
        with contextlib.ExitStack() as undo:
            reading, self._lifeline = os.pipe()  # closed by the system if we die
            undo.callback(os.close, self._lifeline)
            try:
                # -P: the script's own folder must not stand on the path, where it would hide
                # top-level modules. Threads of numerical libraries are of no use to small calls.
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
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self._pipes = (self.popen.stdin, self.popen.stdout)
        self.lines = Lines(self.popen.stdin.fileno(), self.popen.stdout.fileno(), most_bytes)
        self.ready = self.killed = False  # whether it has taken its setup, was told to end

    def kill(self) -> None:
        """Have the supervisor kill all that was started, and end."""
        if self.killed:
            return
        self.killed = True
        # Not closed alone: a copy of this process may hold the pipe open.
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._lifeline, b"x")
        os.close(self._lifeline)

    def end_calls(self) -> None:
        self._pipes[0].close()

    async def ends(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while self.popen.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)

    def let_go(self, runs: str) -> None:
        """Close what is left of it, when it has ended or should have."""
        if self.popen.poll() is None:
            _LOG.warning(
                "process %d did not end what %s has started within %g s; it is killed, and some "
                "of that may run on",
                self.popen.pid,
                runs,
                STOP_S,
            )
            self.popen.kill()
        self.popen.wait(timeout=STOP_S)
        for pipe in self._pipes:
            pipe.close()


def _stop_all(processes: set[_Process], runs: str) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(timeout=STOP_S)
        process.let_go(runs)
    processes.clear()
