"""An environment of plain methods in a thread of its own, with a limit on how long each takes.

All calls of a conversation are made in the same thread, because some environments ask for that. An
environment that raises or takes too long ends its conversation, which has no score, and is counted
as `env_errors`. A thread that hangs cannot be stopped: it is left alone, ends when its call
returns, and does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ....dataflow.errors import no_exit
from ..environment import Reply, TurnResult
from ..tasks.generated_task import PlainEnvironment

_log = logging.getLogger(__name__)

T = TypeVar("T")

FAILED = TurnResult(reward=None, done=True, counts={"env_errors": 1.0})
"""What a conversation ends with whose environment went wrong."""


class _Job(Generic[T]):
    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        self.future: Future[T] = Future()
        self._function, self._arguments = function, arguments

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            with no_exit():
                result = self._function(*self._arguments)
        except BaseException as error:  # the caller is told, whatever it is
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class OwnThread:
    """A thread that makes one call after another.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        # Not of an executor: Python waits for those at its end, also for one that hangs.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make a call after all others."""
        job = _Job(function, arguments)
        self._jobs.put(job)
        return job.future

    def end(self) -> None:
        """Let the thread end after what was submitted; does not wait for it."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class ThreadedEnvironment:
    """An `Environment` whose methods are called in a thread.

    Args:
        make: Makes the environment; called in the thread.
        timeout_s: Longest time of a call.
    """

    def __init__(self, make: Callable[[], PlainEnvironment], timeout_s: float) -> None:
        self._make, self._timeout_s = make, timeout_s
        self._thread: OwnThread | None = None
        self._inner: PlainEnvironment | None = None
        self._failed = False

    async def reset(self, problem: int, seed: int) -> None:
        """Make the environment and begin. What goes wrong is told with the first turn."""
        self._thread = OwnThread(f"environment of problem {problem}")
        try:
            await self._call(self._thread, self._begin, problem, seed)
        except Exception as error:  # an environment is a program: it may fail in any way
            self._fail("reset", error)

    async def step(self, reply: Reply) -> TurnResult:
        """Answer a turn, or end the conversation because the environment went wrong."""
        if self._failed or self._inner is None or self._thread is None:
            return FAILED
        try:
            return await self._call(self._thread, self._inner.step, reply)
        except Exception as error:  # an environment is a program: it may fail in any way
            self._fail("step", error)
            return FAILED

    async def close(self) -> None:
        """Close the environment; one that hangs is closed when its call returns."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        closed = thread.submit(self._end)
        thread.end()
        if self._failed:
            return
        try:
            await asyncio.wait_for(asyncio.wrap_future(closed), self._timeout_s)
        except Exception as error:  # as above; the conversation is over
            self._fail("close", error)

    async def _call(self, thread: OwnThread, function: Callable[..., T], *arguments: Any) -> T:
        future = asyncio.wrap_future(thread.submit(function, *arguments))
        return await asyncio.wait_for(future, self._timeout_s)

    def _begin(self, problem: int, seed: int) -> None:
        self._inner = self._make()
        self._inner.reset(problem, seed)

    def _end(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _fail(self, what: str, error: Exception) -> None:
        self._failed = True
        late = isinstance(error, TimeoutError)
        why = f"took longer than {self._timeout_s:g} s" if late else repr(error)
        _log.warning("an environment failed in %s: %s", what, why)
