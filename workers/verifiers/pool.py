"""Processes that run a verifier under a time limit per call.

A process that overruns the limit is killed and replaced, so a verifier may loop for ever, fill the
memory of its process or crash it, and costs one row. Each process has one call at a time; its limit
runs from the moment the call is sent, and starting a process has a deadline of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...dataflow.errors import ConfigError, WorkerError

__all__ = ["Outcome", "VerifierPool"]

_CHILD = Path(__file__).with_name("child.py")
_STOP_S = 5.0
"""Seconds a killed process may take to vanish."""


@dataclass(frozen=True, kw_only=True)
class VerifierSpec:
    """How another process makes a task's verifier; everything in it is JSON.

    Example:
        `VerifierSpec(factory="penstock.workers.verifiers.verifiers:make_verifier",
        arguments={"reward": "math_verify"})`
    """

    factory: str
    """`module:function` that takes `arguments` by keyword and returns the verifier, a function of
    `Task.verifier_call(index, response)`'s items that returns a finite number."""
    arguments: Mapping[str, Any]
    """Keyword arguments of the factory."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call; `score` is 0 if it failed or ran out of time."""

    score: float = 0.0
    error: str | None = None
    """Traceback or description of a failure."""
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
        if num_processes < 1 or not time_limit_s > 0:
            raise ConfigError(
                f"num_processes={num_processes}, time_limit_s={time_limit_s:g}\n"
                "    a verifier needs at least 1 process and a time limit above 0"
            )
        self._spec = spec
        self._time_limit_s = time_limit_s
        self._start_limit_s = start_limit_s
        self._lock = threading.Lock()
        self._children = [_Child(spec, start_limit_s) for _ in range(num_processes)]
        self._closed = False
        # Also at garbage collection and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _stop_all, self._children)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the living processes."""
        return [child.process.pid for child in self._children if child.alive]

    def run(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Run every call and return its outcome, in order.

        Args:
            calls: Arguments of each call, as JSON.

        Raises:
            WorkerError: If the pool is closed, or a process cannot make the verifier.
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
        self._children[self._children.index(child)] = _Child(self._spec, self._start_limit_s)

    @property
    def children(self) -> tuple[_Child, ...]:
        """The current processes."""
        return tuple(self._children)

    @property
    def time_limit_s(self) -> float:
        """Seconds one call may take."""
        return self._time_limit_s

    def _replace_busy(self) -> None:
        """After an interrupted run no answer may be taken for that of a later call."""
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

    def outcomes(self) -> list[Outcome]:
        while len(self._outcomes) < len(self._calls):
            for child in self._pool.children:
                if not (child.ready and child.row is None and self._waiting):
                    continue
                if child.alive:
                    self._send(child)
                else:  # it died idle; no call is to blame
                    self._pool.replace(child)
            self._wait()
        return [self._outcomes[row] for row in range(len(self._calls))]

    def _send(self, child: _Child) -> None:
        row = self._waiting.popleft()
        child.row = row
        child.deadline = time.monotonic() + self._pool.time_limit_s
        child.send(list(self._calls[row]))

    def _wait(self) -> None:
        """Wait for any process to answer or for the nearest deadline, and deal with both."""
        working = [c for c in self._pool.children if c.row is not None or not c.ready]
        with selectors.DefaultSelector() as selector:
            for child in working:
                selector.register(child.replies, selectors.EVENT_READ, child)
            nearest = min(child.deadline for child in working)
            events = selector.select(max(0.0, nearest - time.monotonic()))
        answered = [key.data for key, _ in events]
        for child in answered:
            self._read(child)
        for child in working:
            if child not in answered and time.monotonic() >= child.deadline:
                self._expired(child)

    def _read(self, child: _Child) -> None:
        messages = child.receive()
        if messages is None:
            self._died(child)
            return
        for message in messages:
            if "fatal" in message:
                self._cannot_start(
                    child, f"the verifier cannot be made:\n{message['fatal'].rstrip()}"
                )
            if "ready" in message:
                child.ready = True
            elif child.row is not None:
                error: str | None = message.get("error")
                self._outcomes[child.row] = Outcome(message.get("score", 0.0), error)
                child.row = None

    def _died(self, child: _Child) -> None:
        code = child.exit_code()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        if child.row is None:
            self._cannot_start(child, f"the verifier's process ended {how} before it was ready")
        self._outcomes[child.row] = Outcome(error=f"the verifier's process ended {how}\n")
        self._pool.replace(child)

    def _expired(self, child: _Child) -> None:
        if child.row is None:
            self._cannot_start(
                child,
                f"the verifier's process was not ready after {child.start_limit_s:g} s\n"
                "    see what the reward's module does when it is imported",
            )
        self._outcomes[child.row] = Outcome(timed_out=True)
        self._pool.replace(child)

    def _cannot_start(self, child: _Child, message: str) -> NoReturn:
        self._pool.replace(child)  # for the next run to try again
        raise WorkerError(message)


class _Child:
    """One process, and what is known of it."""

    def __init__(self, spec: VerifierSpec, start_limit_s: float) -> None:
        # -P: the script's own folder must not stand on the path, where it would hide top-level
        # modules. Threads of numerical libraries are of no use to one small call at a time.
        lifeline, self._lifeline = os.pipe()  # closed by the system if this process is killed
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(lifeline)],
            pass_fds=[lifeline],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        )
        os.close(lifeline)
        assert self.process.stdout is not None
        self.replies = self.process.stdout
        self.ready = False
        self.row: int | None = None
        self.start_limit_s = start_limit_s
        self.deadline = time.monotonic() + start_limit_s
        self._partial = b""
        self.send({"path": sys.path, "factory": spec.factory, "arguments": dict(spec.arguments)})

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def send(self, message: Any) -> None:
        """Write a message. The child always reads, so this cannot block for long."""
        assert self.process.stdin is not None
        # If it has died, reading its replies will say so and how.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> list[dict[str, Any]] | None:
        """Complete messages that have arrived, or None if the process has closed its end."""
        data = os.read(self.replies.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def exit_code(self) -> int:
        """Exit code of a process that has closed its end, or minus the signal that ended it."""
        try:
            return self.process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:  # it closed its descriptors and went on
            self.process.kill()
            return self.process.wait(timeout=_STOP_S)

    def stop(self) -> None:
        """Kill the process with all it has started, wait for it and close the pipes."""
        if self.alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=_STOP_S)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a message it never read
            self.process.stdin.close()
        self.replies.close()
        os.close(self._lifeline)


def _stop_all(children: list[_Child]) -> None:
    for child in children:
        child.stop()
