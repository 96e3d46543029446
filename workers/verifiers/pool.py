"""A pool of processes that run a verifier, with a time limit per call; see `isolation.pool`."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...dataflow.errors import ConfigError, WorkerError
from ..isolation.pool import STOP_S, NotSaid, NotStarted, ProcessPool, completed

SHORTEST_S, LONGEST_S = 0.001, 86_400.0
"""Seconds that a call may be given: less says nothing, and more is no limit."""
MOST_PROCESSES = 256  # processes of one pool

_CLOSE_S = 3.0  # seconds that processes may take to end by themselves
_NOT_A_REPLY = (
    "the verifier's process said something that is no reply to its call, such as a second one, so "
    "it is not believed\n    a reward must neither answer from a copy of its process nor write to "
    "descriptors that it has not opened\n"
)


@dataclass(frozen=True, kw_only=True)
class VerifierSpec:
    """Recipe for a task's verifier in another process; everything in it is JSON.

    Example:
        `VerifierSpec(factory="penstock.workers.verifiers.reward_function:make_reward",
        arguments={"reward": "math_verify"}, asks=frozenset({"prompt", "response", "answer"}))`
    """

    factory: str
    """`module:function` that takes `arguments` by keyword and returns the verifier, a function of
    `Task.verifier_call(index, response)`'s items that returns what `as_score` takes."""
    arguments: Mapping[str, Any]  # keyword arguments of the factory
    asks: frozenset[str] | None = None
    """Names of what its `answers` reads of each response; None for a function that is called."""
    columns: tuple[str, ...] = ()  # of the row, which it must know as well
    together: Literal["", "async", "batch"] = ""
    """Whether it takes several responses at once, and then whether it must be all of them."""
    in_process: bool = False  # whether it is quick and safe
    closes: bool = False  # whether it does something at its end

    @property
    def reads_tokens(self) -> bool:
        """Whether it scores what a policy has sampled, and no text alone."""
        return bool((self.asks or set[str]()) & {"tokenizer", "response_token_ids"})


@dataclass(frozen=True)
class Outcome:
    """The result of one call; no score is not the score 0."""

    score: float | None = None  # None if the verifier cannot say, has failed or has run out of time
    error: str | None = None  # what failed, and where
    timed_out: bool = False
    parts: Mapping[str, float | None] = field(default_factory=dict[str, float | None])

    @staticmethod
    def of(said: Mapping[str, Any]) -> Outcome:
        """Read `{"value": ...}`, `{"error": ...}` or `{"late": True}`."""
        value: Any = said.get("value")
        if isinstance(value, dict):
            return Outcome(parts=value)  # pyright: ignore[reportUnknownArgumentType]
        return Outcome(value, said.get("error"), timed_out="late" in said)


def joined(outcomes: Mapping[str, Outcome], weights: Mapping[str, float]) -> Outcome:
    """Return one outcome of what several functions say of a response, "" being one alone.

    The score is the weighted sum of the parts that have a number; None if none has.
    """
    failed = next((o for o in outcomes.values() if o.timed_out or o.error is not None), None)
    alone = outcomes.get("")
    if failed is not None or (alone is not None and not alone.parts):
        return failed or outcomes[""]
    parts: dict[str, float | None] = {}
    for name, one in outcomes.items():
        own = one.parts or {"": one.score}
        parts |= {".".join(filter(None, (name, part))): own[part] for part in own}
    known = [weights.get(name, 1.0) * value for name, value in parts.items() if value is not None]
    return Outcome(sum(known) if known else None, parts=parts)


@dataclass(frozen=True)
class RowsCall:
    """One call of a process, about some responses."""

    arguments: Sequence[Any]  # as JSON
    num_rows: int = 1
    limit_s: float | None = None  # seconds that it may take; None for `time_limit_s`


class VerifierPool:
    """Runs calls of one verifier in `num_processes` processes, started at once."""

    def __init__(
        self,
        spec: VerifierSpec,
        *,
        num_processes: int = 2,
        time_limit_s: float = 5.0,  # Of one call
        start_limit_s: float = 120.0,  # Of a process, to start and make the verifier
        most_bytes: int = 1 << 16,  # Of a reply
        closes: bool = False,  # Whether its processes are given time to end by themselves
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
        self._lock, self._closed, self._closes = threading.Lock(), False, closes
        self._pool = ProcessPool(
            {"factory": spec.factory, "arguments": dict(spec.arguments)},
            runs="a verifier",
            num_processes=num_processes,
            time_limit_s=time_limit_s,
            start_limit_s=start_limit_s,
            most_bytes=most_bytes,
            accepts=_fits,
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
        """Run every call, given its arguments as JSON, and return its outcome, in order."""
        return [found for (found,) in self.run_rows([RowsCall(call) for call in calls])]

    def run_rows(self, calls: Sequence[RowsCall]) -> list[list[Outcome]]:
        """Run every call, and return an outcome for each of its responses, in order.

        Each process may take a call's limit, and 5 s to be replaced, per call that is its share,
        and the limit for starting once; calls that have no outcome then have run out of time.
        """
        with self._lock:
            if self._closed:
                raise WorkerError("the verifier's processes have been stopped by close()")
            return completed(self._outcomes(calls)) if calls else []

    def close(self) -> None:
        """Stop all processes; may be called again."""
        with self._lock:
            if self._closes and not self._closed:
                self._pool.drain(_CLOSE_S)
            self._closed = True
            self._pool.stop()

    def batch_limit_s(self, num_calls: int, limit_s: float | None = None) -> float:
        """Seconds that all calls of one `run` may take."""
        rounds = -(-num_calls // self._num_processes)
        return self._start_limit_s + rounds * ((limit_s or self._time_limit_s) + STOP_S)

    async def _outcomes(self, calls: Sequence[RowsCall]) -> list[list[Outcome]]:
        outcomes = [[Outcome(timed_out=True)] * call.num_rows for call in calls]
        longest_s = max(call.limit_s or self._time_limit_s for call in calls)
        rows = iter(range(len(calls)))

        async def work() -> None:
            for row in rows:
                outcomes[row] = await self._outcome(calls[row])

        working = [asyncio.create_task(work()) for _ in range(self._num_processes)]
        begun_s, before = time.monotonic(), self._pool.num_repeated
        try:
            while True:
                # A call that is made again takes the time of one more.
                again_s = (self._pool.num_repeated - before) * self.batch_limit_s(1, longest_s)
                limit_s = self.batch_limit_s(len(calls), longest_s) + again_s
                left_s = begun_s + limit_s - time.monotonic()
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

    async def _outcome(self, call: RowsCall) -> list[Outcome]:
        try:
            answer = await self._pool.call(call.limit_s, arguments=list(call.arguments))
        except NotStarted as error:
            raise self._not_started(error) from error
        except NotSaid as error:
            fault = None if error.timed_out else _fault(error)
            return [Outcome(error=fault, timed_out=error.timed_out)] * call.num_rows
        if not isinstance(answer.value, list):
            return [Outcome(answer.value, answer.error)] * call.num_rows
        if len(answer.value) != call.num_rows:
            return [Outcome(error=_NOT_A_REPLY)] * call.num_rows
        return [Outcome.of(said) for said in answer.value]

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


def _fits(value: Any) -> bool:
    """Return whether a reply is a score, or a list with a score or an error for each response."""
    return all(map(_is_said, value)) if isinstance(value, list) else _is_score(value)  # pyright: ignore[reportUnknownArgumentType]


def _is_score(value: Any) -> bool:
    return value is None or (type(value) is float and math.isfinite(value))


def _is_said(one: Any) -> bool:
    match one:
        case {"value": dict() as parts}:
            return len(one) == 1 and all(map(_is_score, parts.values()))  # pyright: ignore[reportUnknownArgumentType]
        case {"value": value}:
            return len(one) == 1 and _is_score(value)
        case {"error": str()} | {"late": True}:
            return len(one) == 1
        case _:
            return False


def _fault(error: NotSaid, when: str = "") -> str:
    if not error.ended:
        return _NOT_A_REPLY
    code = error.exit_code
    if code is None:
        how = "closed its replies and went on"
    else:
        how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the verifier's process {how}{when}\n"
