"""What an executor of processes has in its books: work that is out, and what it has started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...dataflow.errors import WorkerError
from ...dataflow.runtime.executor import Completion, Lost
from ...dataflow.runtime.messages import Handle, Work
from ..weight_sync.channel import Offer
from .process_backend import ProcessBackend, Ref
from .rank_process import Answer

__all__ = ["LOOK", "Job", "Started"]

LOOK = -1
"""In place of a ticket: a call that shows whether a process lives, and of which nobody hears."""


@dataclass
class Job:
    """Work that the processes of one rank are doing.

    Attributes:
        ticket: See `Executor.submit`.
        program: Name of the program it belongs to.
        group: The group that does it.
        rank: The data-parallel rank.
        work: What to do.
        parts: Handles that its outputs will have, if they are to outlive the process.
        processes: All that must answer; none once it is over.
        answers: Those that have, by process.
    """

    ticket: int
    program: str
    group: str
    rank: int
    work: Work
    processes: set[int]
    parts: Sequence[Handle] | None = None
    answers: dict[int, Answer] = field(default_factory=dict[int, Answer])

    def failed(self, text: str, trace: str = "", lost: Lost = "") -> Completion | None:
        """The first failure speaks for the rank."""
        if not self.processes:
            return None
        self.processes.clear()
        error = WorkerError(text)
        return Completion(self.ticket, self.rank, None, error=error, trace=trace, lost=lost)

    def complete(self) -> Completion | None:
        """What the rank answers, if all its processes have."""
        if self.answers.keys() != self.processes:
            return None
        (lead,) = (one for one in self.answers.values() if one.leads)
        weights = lead.weights
        if isinstance(weights, Offer):  # slices: every process has its own
            weights = tuple(one.weights for _, one in sorted(self.answers.items()))
        parts = lead.parts
        if self.parts is not None and lead.report is not None:
            parts = tuple(self.parts[: len(lead.report.num_rows)])
        self.processes.clear()
        reports = [one.report for one in self.answers.values() if one.report is not None]
        answers = tuple(report.answer for report in reports)
        return Completion(self.ticket, self.rank, lead.report, parts, weights, answers=answers)


@dataclass(frozen=True)
class Started:
    """What there is between `start` and `stop`.

    Attributes:
        backend: What provides the processes.
        hosted: Programs, workers and the weight channel's name, stored.
        seed: The run's.
    """

    backend: ProcessBackend
    hosted: Ref
    seed: int
