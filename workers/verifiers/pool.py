"""A pool of processes that run a verifier, with a time limit per call; see `isolation.pool`."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dataflow.errors import ConfigError, WorkerError
from ..isolation.pool import STOP_S, NotSaid, NotStarted, ProcessPool, completed

SHORTEST_S, LONGEST_S = 0.001, 86_400.0
"""Seconds that a call may be given: less says nothing, and more is no limit."""
MOST_PROCESSES = 256  # processes of one pool

_MOST_REPLY = 1 << 16  # bytes
_NOT_A_REPLY = (
    "the verifier's process said something that is no reply to its call, such as a second one, so "
    "it is not believed\n    a reward must neither answer from a copy of its process nor write to "
    "descriptors that it has not opened\n"
)


@dataclass(frozen=True, kw_only=True)
class VerifierSpec:
    """Recipe for a task's verifier in another process; everything in it is JSON.

    Example:
        `VerifierSpec(factory="penstock.workers.verifiers.verifiers:make_verifier",
        arguments={"reward": "math_verify"})`
    """

    factory: str
    """`module:function` that takes `arguments` by keyword and returns the verifier, a function of
    `Task.verifier_call(index, response)`'s items that returns what `as_score` takes."""
    arguments: Mapping[str, Any]  # keyword arguments of the factory


@dataclass(frozen=True)
class Outcome:
    """The result of one call; no score is not the score 0."""

    score: float | None = None  # None if the verifier cannot say, has failed or has run out of time
    error: str | None = None  # what failed, and where
    timed_out: bool = False


class VerifierPool:
    """Runs calls of one verifier in `num_processes` processes, started at once."""

    def __init__(
        self,
        spec: VerifierSpec,
        *,
        num_processes: int = 2,
        time_limit_s: float = 5.0,  # Of one call
        start_limit_s: float = 120.0,  # Of a process, to start and make the verifier
    ) -> None:
        fits = SHORTEST_S <= time_limit_s <= LONGEST_S and 1 <= num_processes <= MOST_PROCESSES
        if not fits:
            raise ConfigError(
                f"num_processes={num_processes}, time_limit_s={time_limit_s:g}\n"
                f"    a verifier needs 1 to {MOST_PROCESSES} processes and a time limit of "
                f"{SHORTEST_S:g} to {LONGEST_S:g} s"
            )
        self._num_processes = num_processes
        self._time_limit_s, self._start_limit_s = time_limit_s, start_limit_s
        self._lock, self._closed = threading.Lock(), False
        self._pool = ProcessPool(
            {"factory": spec.factory, "arguments": dict(spec.arguments)},
            runs="a verifier",
            num_processes=num_processes,
            time_limit_s=time_limit_s,
            start_limit_s=start_limit_s,
            most_bytes=_MOST_REPLY,
            accepts=lambda value: value is None or (type(value) is float and math.isfinite(value)),
        )
        try:
            for _ in range(num_processes):
                self._pool.start()
        except NotStarted as error:
            raise self._not_started(error) from error

    @property
    def process_ids(self) -> list[int]:
        return self._pool.process_ids

    def run(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Run every call, given its arguments as JSON, and return its outcome, in order.

        Each process may take the time limit, and 5 s to be replaced, per call that is its share,
        and the limit for starting once; calls that have no outcome then have run out of time.
        """
        with self._lock:
            if self._closed:
                raise WorkerError("the verifier's processes have been stopped by close()")
            return completed(self._outcomes(calls)) if calls else []

    def close(self) -> None:
        """Stop all processes; may be called again."""
        with self._lock:
            self._closed = True
            self._pool.stop()

    def batch_limit_s(self, num_calls: int) -> float:
        """Seconds that all calls of one `run` may take."""
        rounds = -(-num_calls // self._num_processes)
        return self._start_limit_s + rounds * (self._time_limit_s + STOP_S)

    async def _outcomes(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        outcomes = [Outcome(timed_out=True)] * len(calls)
        rows = iter(range(len(calls)))

        async def work() -> None:
            for row in rows:
                outcomes[row] = await self._outcome(calls[row])

        working = [asyncio.create_task(work()) for _ in range(self._num_processes)]
        begun_s, before = time.monotonic(), self._pool.num_repeated
        try:
            while True:
                # A call that is made again takes the time of one more.
                again_s = (self._pool.num_repeated - before) * self.batch_limit_s(1)
                left_s = begun_s + self.batch_limit_s(len(calls)) + again_s - time.monotonic()
                ended, going = await asyncio.wait(
                    working, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_EXCEPTION
                )
                failed = any(task.exception() for task in ended)
                if not going or failed or left_s <= 0:
                    break
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        for task in ended:
            task.result()
        return outcomes

    async def _outcome(self, arguments: Sequence[Any]) -> Outcome:
        try:
            answer = await self._pool.call(arguments=list(arguments))
        except NotStarted as error:
            raise self._not_started(error) from error
        except NotSaid as error:
            return Outcome(
                error=None if error.timed_out else _fault(error), timed_out=error.timed_out
            )
        return Outcome(answer.value, answer.error)

    def _not_started(self, error: NotStarted) -> WorkerError:
        match error.why:
            case str(told):
                text = f"the verifier cannot be made:\n{told}"
            case OSError() as failed:
                text = (
                    f"a process for the verifier cannot be started: {failed}\n"
                    "    free what has run out, or lower num_processes"
                )
            case NotSaid(timed_out=True):
                text = (
                    f"the verifier's process was not ready after {self._start_limit_s:g} s\n"
                    "    see what the reward's module does when it is imported"
                )
            case said:
                text = _fault(said, " before it was ready")
        return WorkerError(text.rstrip())


def _fault(error: NotSaid, when: str = "") -> str:
    if not error.ended:
        return _NOT_A_REPLY
    code = error.exit_code
    if code is None:
        how = "closed its replies and went on"
    else:
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the verifier's process {how}{when}\n"
