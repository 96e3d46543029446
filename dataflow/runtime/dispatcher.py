"""The dispatcher: which work is at the executor, for which task, and when all ranks are done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PenstockError, StateError, WorkerError, raised_at
from ..files import file_error
from ..scheduler.events import Task
from ..scheduler.schedule import Deadline
from .executor import Completion, Executor, Restart, Told, WorkerLost
from .messages import RankWork

POLL_S = 1.0
"""Longest wait for completions before deadlines are looked at again."""

_IDLE_S = 0.02  # Pause where nothing is out


@dataclass
class Submission:
    task: Task | None  # The task of the run that is open, or None for work between or beside steps
    group: str  # The group that does it
    waiting: set[int]  # Ranks that have not answered
    # The answers so far, in order of arrival.
    completions: list[Completion] = field(default_factory=list[Completion])
    failed: Completion | None = None  # The answer that was a failure, if one was
    # When it was handed over, on the monotonic clock.
    since_s: float = field(default_factory=time.monotonic)
    # Whether the run that goes on may ask for the same, if this one goes back.
    carried: bool = False

    @property
    def first(self) -> Completion:
        """The lowest rank's answer."""
        return min(self.completions, key=lambda completion: completion.rank)

    @property
    def answers(self) -> list[Any]:
        """`Report.answer` of every process of every rank."""
        return [
            answer
            for one in self.completions
            for answer in one.answers or (one.report.answer if one.report else None,)
        ]


class Dispatcher:
    """Hands work to an executor and gathers the ranks' answers.

    One run at a time may have tasks out. `perform_now` may be called whenever the caller has the
    control, between runs and during one: what the run had out is kept for it.
    """

    def __init__(self, executor: Executor, told: Told | None = None) -> None:
        self._executor, self._told = executor, told
        self._out: dict[int, Submission] = {}
        self._answers: list[Submission | Restart] = []
        # The clock of the run that is open: how long `wait` has waited for workers to do their
        # work. What starting a group again takes is not counted.
        self.waited_s = 0.0
        self._last_ticket = 0
        self._heard_s = 0.0
        self._run: str | None = None
        self._closed = False

    @contextlib.contextmanager
    def run(self, program: str) -> Generator[None]:
        """While it is entered a run of `program` may submit tasks and wait for them.

        What is out when it is left will be carried out, but its results are dropped, except for
        what was marked as `carried`: that the next run may ask for.
        """
        if self._run is not None:
            raise StateError(
                f"a run of program '{self._run}' is not over, and an engine does one at a time; "
                "take the rest of its steps, or call close() on what Engine.run returned"
            )
        self._run, self.waited_s = program, 0.0
        try:
            yield
        finally:
            self._run = None
            self._answers.clear()
            for ticket, submission in list(self._out.items()):
                if submission.task is not None and not submission.carried:
                    del self._out[ticket]

    def out(self) -> list[Submission]:
        return [submission for submission in self._out.values() if submission.task is not None]

    def drop(self, groups: Collection[str]) -> None:
        """Forget what was out at groups that were started again: there will be no answer."""
        for ticket, submission in list(self._out.items()):
            if submission.group in groups:
                del self._out[ticket]

    def close(self) -> None:
        """The workers are gone: a run that is still open cannot go on."""
        self._closed = True

    def submit(
        self, task: Task | None, program: str, group: str, works: Mapping[int, RankWork]
    ) -> Submission:
        self._check_open()
        self._last_ticket += 1
        submission = Submission(task, group, set(works))
        self._out[self._last_ticket] = submission
        for rank, work in works.items():
            self._executor.submit(self._last_ticket, program, group, rank, work)
        return submission

    def oldest(self) -> tuple[Task | None, float] | None:
        """The oldest work that is out, and for how many seconds it has been worked on at most.

        None if nothing is out. May be called from any thread, and waits for nothing.
        """
        out = list(self._out.values())
        if not out:
            return None
        since_s = out[0].since_s
        if self._executor.one_at_a_time:
            since_s = max(since_s, self._heard_s)
        return out[0].task, time.monotonic() - since_s

    def wait(self, timeout_s: float) -> list[Submission | Restart]:
        """Wait for answers to the run since the last call, in order of arrival.

        Its tasks that are complete, or failed on some rank, and groups that were started again.
        """
        self._check_open()
        if not self._answers:
            since_s = time.monotonic()
            if not self._gather(timeout_s) and not self._out:
                time.sleep(min(_IDLE_S, timeout_s))  # else who waits for nothing has no deadline
            self.waited_s += time.monotonic() - since_s
            restarts = [one for one in self._answers if isinstance(one, Restart)]
            self.waited_s -= sum(one.held_up_s for one in restarts)
        answers, self._answers = self._answers, []
        return answers

    def perform_now(
        self, program: str, group: str, works: Mapping[int, RankWork], deadline: Deadline
    ) -> Submission:
        """Submit work and wait until all its ranks are done.

        Ranks first finish what they have. The deadline counts from the last sign of life of any, or
        from when a group was started again.
        """
        submission = self.submit(None, program, group, works)
        ticket, end_s = self._last_ticket, time.monotonic() + deadline.limit_s
        while submission.waiting and submission.failed is None:
            if self._gather(deadline.limit_s):
                end_s = time.monotonic() + deadline.limit_s
            elif time.monotonic() > end_s:
                del self._out[ticket]
                method = next(iter(works.values())).name
                raise self.loss() or WorkerError(
                    f"{method} on group '{group}' took longer than {deadline}; rank(s) "
                    f"{sorted(submission.waiting)} did not answer"
                )
        if submission.failed is not None:
            raise self.failure(submission.failed) from submission.failed.error
        return submission

    def failure(self, failed: Completion) -> WorkerError:
        """The error to raise for work that failed: a `WorkerLost`, if processes have died.

        A peer of a process that dies fails too, and its failure may arrive first.
        """
        return self.loss(failed) or WorkerError(describe(failed))

    def loss(self, failed: Completion | None = None) -> WorkerLost | None:
        lost = failed.lost if failed is not None else ""
        if failed is not None and lost == "process":  # it says more than who is found dead
            return WorkerLost(str(failed.error))
        if lost == "for good":
            return None
        said = self._executor.died()
        if not said and not lost:
            return None
        return WorkerLost(said or (describe(failed) if failed else ""), stored=lost == "stored")

    def _gather(self, timeout_s: float) -> bool:
        # Note what happened since the last call; returns whether anything did.
        answers = self._executor.wait(min(POLL_S, timeout_s))
        if answers:
            self._heard_s = time.monotonic()
        for answer in answers:
            if isinstance(answer, Completion):
                self._note(answer)
                continue
            if self._told is not None and answer.is_over:
                self._told(answer)
            if self._run is not None:
                self._answers.append(answer)
        return bool(answers)

    def _note(self, completion: Completion) -> None:
        submission = self._out.get(completion.ticket)
        if submission is None:
            return  # The run is over, or its submission failed on another rank.
        submission.waiting.discard(completion.rank)
        if completion.error is not None:
            submission.failed = completion
        else:
            submission.completions.append(completion)
        if submission.failed or not submission.waiting:
            del self._out[completion.ticket]
            # A carried answer waits until it is asked for: it is not this run's task yet.
            if submission.task is not None and not submission.carried:
                self._answers.append(submission)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this run cannot go on: its engine has been closed")


def describe(completion: Completion) -> str:
    error = completion.error
    if completion.trace:
        return completion.trace.rstrip()
    if (said := file_error(error)) is not None:
        return said
    text = f"{type(error).__name__}: {error}"
    if error is None or error.__traceback__ is None or isinstance(error, PenstockError):
        return text
    return f"{text}\nraised at {raised_at(error)}"
