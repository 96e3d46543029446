"""A sandboxed Python that lives on between the pieces of code it is given.

It is confined as whole programs are (`process.py`, `child.py`), before the first piece runs; what
runs in it is `pieces.py`. Whoever has it talks to it over two pipes, and kills it when it does not
answer. Between two pieces it may be stopped, with whatever threads a piece has left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from ..child import was_killed
from .child import CONFINED
from .kernel import Unconfined
from .kinds import SandboxKind
from .process import (
    STOP_S,
    Limits,
    Pipe,
    bounds,
    check_nothing_left,
    ended,
    fill,
    has_used_up,
    kill,
    members,
    num_threads,
    start,
    unnamed_file,
)

_PROGRAM = Path(__file__).with_name("pieces.py")


class Interpreter:
    """One sandboxed interpreter, which starts at once.

    Args:
        kind: The sandbox.
        seed: For its module `random`; the hashes of texts are always the same.
        limits: Of all its pieces together: `time_s` is CPU time here.

    Attributes:
        writing: Descriptor of the pipe to it.
        reading: Descriptor of the pipe from it.
        verdict: Descriptor that can be read when it is confined, or cannot be; then call
            `check_confined`.
        used_up: Once it has ended: whether the kernel has, for the CPU time that it took.
        was_killed: The same: whether somebody else has.

    Raises:
        Unconfined: If there is no such sandbox here.
        OSError: If the system starts no more processes.
    """

    def __init__(self, kind: SandboxKind, seed: int, limits: Limits) -> None:
        if reason := kind.missing():
            raise Unconfined(reason)
        self._max_threads, self._limits = limits.threads, limits
        self.was_killed = self.used_up = False
        program = f"{_PROGRAM.read_text(encoding='utf-8')}\nserve({seed})\n"
        work = {"program": program, "calls": [], "asserts": [], "token": ""}
        with contextlib.ExitStack() as undo:
            self._pipes = [undo.enter_context(Pipe()) for _ in range(4)]
            calls, answers, lifeline, verdict = self._pipes
            with unnamed_file("given") as given, open(os.devnull, "wb") as nowhere:
                descriptors = {
                    "results": nowhere.fileno(),
                    "lifeline": lifeline.reading,
                    "verdict": verdict.writing,
                }
                setup: dict[str, Any] = {**kind.setup(), **descriptors, "limits": bounds(limits)}
                fill(given, json.dumps({"setup": setup, "work": work}))
                self._process: subprocess.Popen[bytes] = start(
                    kind.command(None, given.fileno(), python_environment=True),
                    {**kind.environment, "PYTHONHASHSEED": "0"},
                    (calls.reading, answers.writing, nowhere.fileno()),
                    [given.fileno(), *descriptors.values()],
                )
            undo.pop_all()
        calls.close(calls.reading)
        answers.close(answers.writing)
        verdict.close(verdict.writing)
        self.writing, self.reading, self.verdict = calls.writing, answers.reading, verdict.reading
        self._ended = False

    @property
    def process_id(self) -> int:
        """Of the process in front."""
        return self._process.pid

    def check_confined(self) -> None:
        """Read what it told of its confinement.

        Raises:
            Unconfined: If it could not be confined; then nothing ran.
        """
        told = os.read(self.verdict, 1000)
        if told != CONFINED:
            raise Unconfined(told.decode(errors="replace") or "its process ended")

    @property
    def crowded(self) -> bool:
        """Whether it has more threads than it may."""
        return any(num_threads(p) > self._max_threads for p in members(self._process.pid))

    def pause(self) -> None:
        """Let it have no CPU time until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self, wait_s: float = 0.0) -> int:
        """Kill it with all that is in it; may be called again.

        Args:
            wait_s: How long it may take to end by itself before.

        Returns:
            The exit code, or minus the signal that ended it.

        Raises:
            WorkerError: If it cannot be killed.
        """
        if not self._ended:
            self._signal(signal.SIGCONT)
            self._ended = True
            by_itself = ended(self._process, wait_s)
            try:
                cpu_s = kill(self._process)
                by_signal = by_itself and was_killed(self._process.returncode)
                self.used_up = by_signal and has_used_up(cpu_s, self._limits)
                self.was_killed = by_signal and not self.used_up
                check_nothing_left(self._process.pid, STOP_S)
            finally:
                for pipe in self._pipes:
                    pipe.__exit__()
        code = self._process.returncode
        return code if code <= 128 else 128 - code

    def _signal(self, number: signal.Signals) -> None:
        if self._ended:  # its number may be another's
            return
        for process in members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
