"""Processes that run a verifier under a time limit per call.

A process that overruns the limit is killed and replaced with all that it has started, so a verifier
may loop for ever, fill the memory of its process or crash it, and costs one row. What a process had
that was killed from outside, another does again. Each process has one call at a time; its limit
runs from the moment the call begins to be sent, whether the process reads, computes or writes, and
starting a process has a deadline of its own.

A call has a number and a nonce, and the one reply to it has both. A process that says anything else
is believed no more: the row it has is a failure, and it is replaced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError, WorkerError
from .child import was_killed

__all__ = ["LONGEST_S", "MOST_PROCESSES", "SHORTEST_S", "Outcome", "VerifierPool"]

SHORTEST_S, LONGEST_S = 0.001, 86_400.0
"""Seconds that a call may be given: less says nothing, and more is no limit."""
MOST_PROCESSES = 256
"""Processes of one pool."""

_CHILD = Path(__file__).with_name("child.py")
_STOP_S = 5.0
_END_S = 0.5
"""Between a process's closing its end and its own."""
"""Seconds a killed process may take to vanish."""
_MOST_REPLY = 1 << 16
"""Most bytes of a reply."""
_MOST_KILLED = 3
"""Processes that may be killed before they are ready, in one batch."""
_MAKING = -1
"""The row of the first message, from which the verifier is made."""
_NOT_A_REPLY = (
    "the verifier's process said something that is no reply to its call, such as a second one, so "
    "it is not believed\n    a reward must neither answer from a copy of its process nor write to "
    "descriptors that it has not opened\n"
)
_LOG = logging.getLogger("penstock.reward")


@dataclass(frozen=True, kw_only=True)
class VerifierSpec:
    """How another process makes a task's verifier; everything in it is JSON.

    Example:
        `VerifierSpec(factory="penstock.workers.verifiers.verifiers:make_verifier",
        arguments={"reward": "math_verify"})`
    """

    factory: str
    """`module:function` that takes `arguments` by keyword and returns the verifier, a function of
    `Task.verifier_call(index, response)`'s items that returns what `as_score` takes."""
    arguments: Mapping[str, Any]
    """Keyword arguments of the factory."""


@dataclass(frozen=True)
class Outcome:
    """The result of one call; no score is not the score 0."""

    score: float | None = None
    """None if the verifier cannot say, has failed or has run out of time."""
    error: str | None = None
    """What failed, and where."""
    timed_out: bool = False


class VerifierPool:
    """Runs calls of one verifier in `num_processes` processes, started at once.

    Args:
        spec: The verifier.
        num_processes: Number of processes.
        time_limit_s: Seconds one call may take.
        start_limit_s: Seconds a process may take to start and make the verifier.

    Raises:
        ConfigError: If a number is out of range.
    """

    def __init__(
        self,
        spec: VerifierSpec,
        *,
        num_processes: int = 2,
        time_limit_s: float = 5.0,
        start_limit_s: float = 120.0,
    ) -> None:
        fits = SHORTEST_S <= time_limit_s <= LONGEST_S and 1 <= num_processes <= MOST_PROCESSES
        if not fits:
            raise ConfigError(
                f"num_processes={num_processes}, time_limit_s={time_limit_s:g}\n"
                f"    a verifier needs 1 to {MOST_PROCESSES} processes and a time limit of "
                f"{SHORTEST_S:g} to {LONGEST_S:g} s"
            )
        self._spec = spec
        self._time_limit_s = time_limit_s
        self._start_limit_s = start_limit_s
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        self._closed = False
        # Also at garbage collection and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _stop_all, self._children)
        for _ in range(num_processes):
            self._children.append(_Child(spec, start_limit_s))

    @property
    def process_ids(self) -> list[int]:
        """Ids of the living processes."""
        return [child.process.pid for child in self._children if child.alive]

    def run(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Run every call and return its outcome, in order.

        Each process may take the time limit, and 5 s to be replaced, per call that is its share,
        and the limit for starting once; calls that have no outcome then have run out of time.

        Args:
            calls: Arguments of each call, as JSON.

        Raises:
            WorkerError: If the pool is closed, or a process cannot be started or cannot make the
                verifier.
        """
        with self._lock:
            if self._closed:
                raise WorkerError("the verifier's processes have been stopped by close()")
            try:
                return _Run(self, calls).outcomes()
            except BaseException:
                self._replace_busy()
                raise

    def close(self) -> None:
        """Stop all processes; may be called again."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def replace(self, child: _Child) -> None:
        """Kill a process and start another in its place."""
        child.stop()
        child.row = None
        self._children[self._children.index(child)] = _Child(self._spec, self._start_limit_s)

    @property
    def children(self) -> tuple[_Child, ...]:
        """The current processes."""
        return tuple(self._children)

    @property
    def time_limit_s(self) -> float:
        """Seconds one call may take."""
        return self._time_limit_s

    def batch_limit_s(self, num_calls: int) -> float:
        """Seconds that all calls of one `run` may take."""
        rounds = -(-num_calls // len(self._children))
        return self._start_limit_s + rounds * (self._time_limit_s + _STOP_S)

    def _replace_busy(self) -> None:
        """What was interrupted is not waited for by the next run."""
        for child in self.children:
            if child.row is not None:
                self.replace(child)


class _Run:
    """One batch of calls over the pool's processes."""

    def __init__(self, pool: VerifierPool, calls: Sequence[Sequence[Any]]) -> None:
        self._pool = pool
        self._calls = calls
        self._waiting = deque(range(len(calls)))
        self._outcomes: dict[int, Outcome] = {}
        self._deadline = time.monotonic() + pool.batch_limit_s(len(calls))
        self._killed: Counter[int] = Counter()

    def outcomes(self) -> list[Outcome]:
        while len(self._outcomes) < len(self._calls):
            for child in self._pool.children:
                if child.row is not None or not self._waiting:
                    continue
                if child.is_quiet():
                    row = self._waiting.popleft()
                    child.call(row, self._pool.time_limit_s, arguments=list(self._calls[row]))
                else:  # it died idle, or speaks unasked; no call is to blame
                    self._pool.replace(child)
            self._wait()
            if time.monotonic() >= self._deadline:
                self._give_up()
        return [self._outcomes[row] for row in range(len(self._calls))]

    def _wait(self) -> None:
        """Wait until a process can go on or for the nearest deadline, and deal with both."""
        working = [child for child in self._pool.children if child.row is not None]
        sending = [child for child in working if child.unsent]
        for child in sending:  # while another was replaced, nothing was sent to it
            child.deadline += time.monotonic() - child.tended_s
        with selectors.DefaultSelector() as selector:
            for child in working:
                selector.register(child.replies, selectors.EVENT_READ, child.receive)
            for child in sending:
                selector.register(child.calls, selectors.EVENT_WRITE, child.send)
            nearest = min([self._deadline, *(child.deadline for child in working)])
            events = selector.select(max(0.0, nearest - time.monotonic()))
        # Not looked at again below: replacing a process takes time, in which others may reply.
        now_s = time.monotonic()
        for child in sending:
            child.tended_s = now_s
        for key, _ in events:
            key.data()
        for child in working:
            if child.ended:
                self._died(child)
            elif child.has_replied:
                self._read(child)
            elif now_s >= child.deadline:
                self._expired(child)

    def _read(self, child: _Child) -> None:
        row, outcome = child.row, child.outcome()
        if outcome is None:
            self._failed(child, _NOT_A_REPLY)
        elif row == _MAKING and outcome.error is not None:
            self._failed(child, f"the verifier cannot be made:\n{outcome.error}")
        else:
            child.row = None
            if row is not None and row != _MAKING:
                self._outcomes[row] = outcome

    def _died(self, child: _Child) -> None:
        code = child.exit_code()
        if was_killed(code) and self._again(child):
            return
        if code is None:
            how = "closed its replies and went on"
        else:
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        when = " before it was ready" if child.row == _MAKING else ""
        self._failed(child, f"the verifier's process {how}{when}\n")

    def _again(self, child: _Child) -> bool:
        """Have another process do what a killed one had, unless that was killed too."""
        row = child.row
        assert row is not None
        self._killed[row] += 1
        if self._killed[row] > (_MOST_KILLED if row == _MAKING else 1):
            return False
        _LOG.warning("a verifier's process was killed; another takes its place")
        self._pool.replace(child)
        self._deadline += self._pool.batch_limit_s(1)
        if row != _MAKING:
            self._waiting.appendleft(row)
        return True

    def _expired(self, child: _Child) -> None:
        if child.row == _MAKING:
            self._failed(
                child,
                f"the verifier's process was not ready after {child.limit_s:g} s\n"
                "    see what the reward's module does when it is imported",
            )
        self._failed(child, None)

    def _failed(self, child: _Child, error: str | None) -> None:
        """Replace a process, whose call has failed, or run out of time if there is no error."""
        row = child.row
        self._pool.replace(child)
        if row == _MAKING:
            raise WorkerError((error or "").rstrip())
        assert row is not None
        self._outcomes[row] = Outcome(error=error, timed_out=error is None)

    def _give_up(self) -> None:
        """The batch has run out of time."""
        for child in self._pool.children:
            if child.row not in (None, _MAKING):
                self._failed(child, None)
        self._outcomes.update((row, Outcome(timed_out=True)) for row in self._waiting)
        self._waiting.clear()


class _Child:
    """One process, and what is known of it.

    Attributes:
        process: Its supervisor; see `child`.
        calls: Descriptor to write to.
        replies: Descriptor to read from.
        row: Of the call that it has; `_MAKING` at first, None if it is idle.
        limit_s: Seconds that this call may take.
        deadline: On the monotonic clock.
        tended_s: When it could last be sent something of the call.
        unsent: What of the call it has not read yet.
        received: What it has said since.
        ended: Whether it has closed its replies.
    """

    def __init__(self, spec: VerifierSpec, start_limit_s: float) -> None:
        # -P: the script's own folder must not stand on the path, where it would hide top-level
        # modules. Threads of numerical libraries are of no use to one small call at a time.
        with contextlib.ExitStack() as undo:
            try:
                lifeline, self._lifeline = os.pipe()  # closed by the system if this process dies
                undo.callback(os.close, self._lifeline)
                try:
                    self.process = subprocess.Popen(
                        [sys.executable, "-P", str(_CHILD), str(lifeline)],
                        bufsize=0,
                        pass_fds=[lifeline],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        start_new_session=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
                    )
                finally:
                    os.close(lifeline)
            except OSError as error:
                raise WorkerError(
                    f"a process for the verifier cannot be started: {error}\n"
                    "    free what has run out, or lower num_processes"
                ) from error
            undo.pop_all()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.calls, self.replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.calls, False)
        os.set_blocking(self.replies, False)
        self.ended = False
        arguments = dict(spec.arguments)
        self.call(_MAKING, start_limit_s, path=sys.path, factory=spec.factory, arguments=arguments)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    @property
    def has_replied(self) -> bool:
        """Whether a reply is complete, or longer than any may be."""
        return b"\n" in self.received or len(self.received) > _MOST_REPLY

    def is_quiet(self) -> bool:
        """Whether it lives and has said nothing since its last reply."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:  # stopped, and no other could be started
            return False
        try:
            os.read(self.replies, 1)
        except BlockingIOError:
            return self.alive
        return False

    def call(self, row: int, limit_s: float, **message: Any) -> None:
        """Begin to send a call, which has a time limit from now on."""
        self.row: int | None = row
        self.limit_s, self._nonce = limit_s, secrets.token_hex(8)
        line = json.dumps({"row": row, "nonce": self._nonce, **message}).encode() + b"\n"
        self.unsent = memoryview(line)
        self.received = bytearray()
        self.tended_s = time.monotonic()
        self.deadline = self.tended_s + limit_s

    def send(self) -> None:
        """Send of the call what the process takes now."""
        try:
            self.unsent = self.unsent[os.write(self.calls, self.unsent) :]
        except BrokenPipeError:  # it has died; reading its replies will say so and how
            self.unsent = memoryview(b"")

    def receive(self) -> None:
        """Take what has arrived."""
        piece = os.read(self.replies, _MOST_REPLY)
        self.ended = not piece
        self.received += piece

    def outcome(self) -> Outcome | None:
        """What it replies to its call; None if that is no reply to it."""
        if self.unsent or self.received.find(b"\n") != len(self.received) - 1:
            return None
        known = {"row": self.row, "nonce": self._nonce}
        try:
            message = json.loads(self.received)
            score, error = message.get("score"), message.get("error")
        except (ValueError, AttributeError, RecursionError):
            return None
        is_score = score is None or (type(score) is float and math.isfinite(score))
        if is_score and message == {**known, "score": score}:
            return Outcome(score)
        if isinstance(error, str) and message == {**known, "error": error}:
            return Outcome(error=error)
        return None

    def exit_code(self) -> int | None:
        """Exit code of a process that has closed its end, or minus the signal that ended it.

        None if it lives on.
        """
        try:
            return self.process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.stop()

    def stop(self) -> None:
        """Have the process and all that it has started killed, and wait for that; idempotent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.stdin.closed:
            return
        # Not closed alone: a copy of this process may hold the pipe open.
        with contextlib.suppress(BrokenPipeError):  # it has ended
            os.write(self._lifeline, b"x")
        os.close(self._lifeline)
        try:
            self.process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            _LOG.warning(
                "process %d did not end what a verifier has started within %g s; it is killed, "
                "and some of that may run on",
                self.process.pid,
                _STOP_S,
            )
            self.process.kill()
            self.process.wait(timeout=_STOP_S)
        self.process.stdin.close()
        self.process.stdout.close()


def _stop_all(children: list[_Child]) -> None:
    for child in children:
        child.stop()
