"""The desk: what is out at the executor, and when all ranks of a submission are back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import WorkerError
from .executor import Completion, Executor
from .scheduler_events import Task
from .work import Work

__all__ = ["Desk", "Submission", "describe"]

POLL_S = 1.0
"""Longest wait for completions before deadlines are looked at again."""


@dataclass
class Submission:
    """Work out on one or more ranks of a group.

    Attributes:
        task: The scheduler's task, or None for work between or beside steps.
        group: Where it is.
        waiting: Ranks that have not answered.
        completions: The answers so far, in order of arrival.
        failed: The answer that was a failure, if one was.
    """

    task: Task | None
    group: str
    waiting: set[int]
    completions: list[Completion] = field(default_factory=list[Completion])
    failed: Completion | None = None

    @property
    def first(self) -> Completion:
        """The lowest rank's answer."""
        return min(self.completions, key=lambda completion: completion.rank)


class Desk:
    """Hands work to an executor and gathers the ranks' answers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._out: dict[int, Submission] = {}
        self._last_ticket = 0

    def submit(
        self, task: Task | None, program: str, group: str, works: Mapping[int, Work]
    ) -> Submission:
        """Hand one piece of work to each of the given ranks."""
        self._last_ticket += 1
        submission = Submission(task, group, set(works))
        self._out[self._last_ticket] = submission
        for rank, work in works.items():
            self._executor.submit(self._last_ticket, program, group, rank, work)
        return submission

    def wait(self, timeout_s: float) -> list[Submission]:
        """Submissions that are complete, or failed on some rank, since the last call."""
        finished: list[Submission] = []
        for completion in self._executor.wait(min(POLL_S, timeout_s)):
            submission = self._out.get(completion.ticket)
            if submission is None:
                continue  # A rank of a submission that has failed on another one.
            submission.waiting.discard(completion.rank)
            if completion.error is not None:
                submission.failed = completion
            else:
                submission.completions.append(completion)
            if submission.failed or not submission.waiting:
                del self._out[completion.ticket]
                finished.append(submission)
        return finished

    def perform_now(
        self, program: str, group: str, works: Mapping[int, Work], deadline_s: float
    ) -> Submission:
        """Submit work and wait until all its ranks are done; nothing else may be out.

        Raises:
            WorkerError: If it fails, or a rank does not answer in time.
        """
        submission = self.submit(None, program, group, works)
        end_s = time.monotonic() + deadline_s
        while submission.waiting and submission.failed is None:
            self.wait(deadline_s)
            if time.monotonic() > end_s and submission.waiting:
                kind = type(next(iter(works.values()))).__name__
                raise WorkerError(
                    f"{kind} on group '{group}' took longer than {deadline_s:g} s "
                    f"(Schedule.deadline_s); rank(s) {sorted(submission.waiting)} did not answer"
                )
        if submission.failed is not None:
            raise WorkerError(describe(submission.failed)) from submission.failed.error
        return submission


def describe(completion: Completion) -> str:
    """What a failed completion says: the remote traceback, or the exception."""
    if completion.trace:
        return completion.trace.rstrip()
    return f"{type(completion.error).__name__}: {completion.error}"
