"""Calls that ranks serve together, as the run sees them: which tasks are left, what is asked next.

The answers of a stream are all asked for at once, and a rank gives one after another. Of one that
takes newer weights in flight only the next is asked for: whatever else the rank is sent before the
one after it, new weights, comes in between. Such an answer may be none, only a pause, and is asked
for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..scheduler.events import Load, NodeTask, RunStream
from .dispatcher import Submission
from .executor import Restart
from .messages import NextAnswer


@dataclass
class OpenStream:
    """The tasks of one `RunStream`, and their answers."""

    instruction: RunStream
    group: str  # Where it runs
    in_flight: bool  # Whether it takes newer weights meanwhile
    versions: dict[str, int]  # Read from now on
    given: list[int] = field(default_factory=list[int])  # The chunks answered, in this order
    num_taken: int = 0  # Answers that were taken in, or are about to be
    # Answers that were heard of before those that the rank gave before them, by number.
    early: dict[int, Submission] = field(default_factory=dict[int, Submission])

    def asked(self) -> list[tuple[NodeTask, NextAnswer]]:
        """The answers to ask for now, each under a task that nothing is asked for under."""
        left = [task for task in self.instruction.tasks if task.chunk not in self.given]
        versions = tuple(sorted(self.versions.items()))
        first = NextAnswer(self.instruction.node, self.instruction.step, 0, versions)
        if self.in_flight:
            return [
                (task, replace(first, number=len(self.given), given=tuple(self.given)))
                for task in left[:1]
            ]
        return [(task, replace(first, number=number)) for number, task in enumerate(left)]


class OpenStreams:
    """All streams that some rank serves."""

    def __init__(self, *, in_flight: bool) -> None:
        self._in_flight = in_flight
        self._by_task: dict[NodeTask, OpenStream] = {}

    def __contains__(self, task: object) -> bool:
        return task in self._by_task

    def begin(self, instruction: RunStream, group: str) -> OpenStream:
        """Note a stream that is begun."""
        stream = OpenStream(instruction, group, self._in_flight, dict(instruction.versions))
        self._by_task.update(dict.fromkeys(instruction.tasks, stream))
        return stream

    def loads(self, load: Load) -> None:
        """Weights are sent to a group: what is asked of its ranks from now on comes after them."""
        for stream in self._by_task.values():
            if stream.group == load.group and load.role in stream.versions:
                stream.versions[load.role] = load.version

    def in_order(self, heard: Submission | Restart) -> list[Submission | Restart]:
        """Return what may be taken in now: a rank's answers in the order in which it gave them.

        Of two that are given within a millisecond a backend may tell the second first.
        """
        task = heard.task if isinstance(heard, Submission) else None
        if not isinstance(task, NodeTask) or task not in self._by_task:
            return [heard]
        stream = self._by_task[task]
        assert isinstance(heard, Submission), "nothing else has a task"
        if stream.in_flight or heard.failed is not None:
            return [heard]
        stream.early[stream.instruction.tasks.index(task)] = heard
        ready: list[Submission | Restart] = []
        while stream.num_taken in stream.early:
            ready.append(stream.early.pop(stream.num_taken))
            stream.num_taken += 1
        return ready

    def answered(
        self, asked: NodeTask, submission: Submission
    ) -> tuple[NodeTask | None, OpenStream]:
        """The task that an answer is of, and its stream; None if it was a pause.

        A failure is of the first that is left.
        """
        stream = self._by_task[asked]
        report = submission.first.report if submission.failed is None else None
        if report is None:
            return _first(stream), stream
        if report.chunk is None:
            return None, stream
        task = replace(asked, chunk=report.chunk)
        stream.given.append(report.chunk)
        # What is left is known by the tasks under which something is asked, or may be.
        del self._by_task[task if self._in_flight else asked]
        return task, stream


def _first(stream: OpenStream) -> NodeTask:
    left: Sequence[NodeTask] = stream.instruction.tasks
    return next(task for task in left if task.chunk not in stream.given)
