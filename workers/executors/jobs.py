"""The records of an executor of processes.

Work that is out, what its processes have ready for others, what it has started, and ranks of
replicas that are started while the others work: new ones, or dead ones.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...dataflow.errors import WorkerError
from ...dataflow.runtime.executor import Completion, Lost, Program, Restart
from ...dataflow.runtime.host import Host
from ...dataflow.runtime.messages import Handle, RankWork
from ..weight_sync.channel import Offer
from .process_backend import Process, ProcessBackend, Ref
from .rank_group import GroupProcesses, Started, all_results
from .rank_process import RankAnswer

_OfferKey = tuple[str, int, int]  # Group, process and number of an `Offer`

LOOK = -1
"""In place of a ticket: a call that shows whether a process lives; its result is dropped."""


@dataclass
class RankJob:
    """Work that the processes of one rank are doing."""

    ticket: int
    program: str  # Name of the program it belongs to
    group: str  # The group that does it
    rank: int  # The data-parallel rank
    work: RankWork  # What to do
    processes: set[int]  # All that must answer; none once it is over
    # Handles that its outputs will have, if they are to outlive the process.
    parts: Sequence[Handle] | None = None
    # Those that have, by process.
    answers: dict[int, RankAnswer] = field(default_factory=dict[int, RankAnswer])

    def most_parts(self, programs: Mapping[str, Program]) -> int:
        if self.work.method is Host.answer:
            return 2  # rows, and what goes on in the next step
        if self.work.method is not Host.call:
            return 0
        num_chunks = programs[self.program].placement.num_chunks
        return num_chunks if self.work.arguments[0].chunk is None else 1

    def failed(self, text: str, trace: str = "", lost: Lost = "") -> Completion | None:
        """The first failure speaks for the rank."""
        if not self.processes:
            return None
        self.processes.clear()
        error = WorkerError(text)
        return Completion(self.ticket, self.rank, None, error=error, trace=trace, lost=lost)

    def complete(self) -> Completion | None:
        """The job's completion once every process has answered; None before."""
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


class Offers:
    """Snapshots of weights in slices that processes have ready for others.

    Has each process forget an offer once nothing here can ask for its weights any more.
    """

    def __init__(self) -> None:
        self.ready: dict[_OfferKey, weakref.finalize[..., Any]] = {}

    def watch(self, offer: Offer, backend: ProcessBackend, process: Process) -> None:
        key = offer.group, offer.process, offer.number
        forget = weakref.finalize(offer, _forget, self.ready, key, backend, process)
        forget.atexit = False
        self.ready[key] = forget

    def drop(self, groups: Collection[str] | None = None) -> None:
        """The processes of some groups, or of all, have ended, and with them what was ready."""
        for key in [key for key in self.ready if groups is None or key[0] in groups]:
            self.ready.pop(key).detach()


class Books:
    """Work that is out at processes, and what they need again if they are started again."""

    def __init__(self) -> None:
        # Call of a process -> the work that it is part of, and the process.
        self.out: dict[Ref, tuple[RankJob, int]] = {}
        self._loaded: dict[tuple[str, int], dict[tuple[str, str], RankJob]] = {}
        self._begun: dict[tuple[str, int], RankJob] = {}

    @property
    def busy(self) -> set[str]:
        return {job.group for job, _ in self.out.values()}

    def note(self, job: RankJob) -> None:
        # What a rank has done that outlasts it, so that it is known what to do again.
        place = job.group, job.rank
        if job.work.lasting:
            # One for each kind and role: a later load stands in for the one before.
            self._loaded.setdefault(place, {})[job.work.lasting, job.work.arguments[0]] = job
        elif job.work.method is Host.begin_stream:
            self._begun[place] = job

    def loads(self, group: str, rank: int | None) -> list[RankJob]:
        found = [one for key, one in self._loaded.items() if _is_of(key, group, rank)]
        return [job for loaded in found for job in loaded.values()]

    def begun(self, group: str, rank: int | None) -> list[RankJob]:
        return [job for key, job in self._begun.items() if _is_of(key, group, rank)]

    def take_owed(self, died: RankJob, rank: int | None) -> list[RankJob]:
        owed = {id(died): died}
        for ref, (job, _) in list(self.out.items()):
            if _is_of((job.group, job.rank), died.group, rank):
                owed[id(job)] = job
                del self.out[ref]
        # In the order in which they were given, by which a load comes before what needs it.
        return sorted(owed.values(), key=lambda job: job.ticket)

    def take_loads(self, jobs: Sequence[RankJob]) -> list[Ref]:
        """The calls that are out of those of the jobs that load something."""
        mine = {id(job) for job in jobs if job.work.lasting}
        found = [ref for ref, (job, _) in self.out.items() if id(job) in mine]
        for ref in found:
            del self.out[ref]
        return found

    def forget(self, groups: Collection[str], beyond: int = 0) -> None:
        self.out = {
            ref: (job, process)
            for ref, (job, process) in self.out.items()
            if job.group not in groups or job.rank < beyond
        }
        for noted in (self._loaded, self._begun):
            for key in [key for key in noted if key[0] in groups and key[1] >= beyond]:
                noted.pop(key)

    def clear(self) -> None:
        self.out.clear()
        self._loaded.clear()
        self._begun.clear()


def _is_of(key: tuple[str, int], group: str, rank: int | None) -> bool:
    return key[0] == group and rank in (None, key[1])


def _forget(
    ready: dict[_OfferKey, Any], key: _OfferKey, backend: ProcessBackend, process: Process
) -> None:
    del ready[key]
    backend.call(process, "forget", key[-1:])


_SIGN_S = 1.0  # How often is said that a rank is still on its way


class _Starting:
    """Processes that start, and build what the others of their group have built."""

    def __init__(self, group: GroupProcesses, ranks: Sequence[int], here: Started) -> None:
        self._backend, self._start_s = group.backend, here.start_s
        self._end_s = time.monotonic() + here.start_s
        self.calls: list[Ref] = group.join(group.spawn(here.start_s, ranks))
        self.calls += [
            group.call(process, "build", here.hosted, here.seed)
            for rank in ranks
            for process in group.group.processes(rank)
        ]

    def is_ready(self) -> bool:
        ready = self._backend.watch(self.calls, 0.0) if self.calls else []
        all_results(self._backend, ready, "starting beside the others", self._start_s)
        self.calls = [call for call in self.calls if call not in ready]
        if self.calls and time.monotonic() > self._end_s:
            raise WorkerError(f"a rank was still starting after {self._start_s:g} s")
        return not self.calls


class Joining(_Starting):
    """Ranks that a group did not have."""

    def __init__(
        self, group: GroupProcesses, num_ranks: int, held: Sequence[object], here: Started
    ) -> None:
        self.num_ranks = num_ranks
        self.ranks = range(group.num_ranks, num_ranks)  # Those that join
        self._group = group
        group.reserve(self.ranks, held)
        super().__init__(group, self.ranks, here)

    def give_up(self) -> None:
        self._group.end(self.ranks, closing=False)


class Returning:
    """A rank that has died."""

    def __init__(
        self,
        group: GroupProcesses,
        job: RankJob,
        said: str,
        owed: list[RankJob],
        pause_s: float,
        here: Started,
    ) -> None:
        self.place = job.group, job.rank  # Group and rank
        self.job, self.said, self.owed = job, said, owed
        self._group, self._here = group, here
        self._since_s = time.monotonic()
        self._begin_s, self._next_sign_s = self._since_s + pause_s, 0.0
        self._starting: _Starting | None = None
        self.give_up()  # of several processes the others may live

    @property
    def calls(self) -> list[Ref]:
        return self._starting.calls if self._starting is not None else []

    def is_ready(self) -> bool:
        if self._starting is None:
            if time.monotonic() < self._begin_s:
                return False
            if not self._group.is_there():
                raise WorkerError("a machine that it was on is gone")
            self._starting = _Starting(self._group, [self.job.rank], self._here)
        return self._starting.is_ready()

    def sign(self) -> Restart | None:
        now_s = time.monotonic()
        if now_s < self._next_sign_s:
            return None
        self._next_sign_s = now_s + _SIGN_S
        return self._restart(is_over=False)

    def is_back(self, since_s: float) -> Restart:
        # That it is there again; the executor was busy with it since then (monotonic clock).
        return self._restart(is_over=True, held_up_s=time.monotonic() - since_s)

    def _restart(self, *, is_over: bool, held_up_s: float = 0.0) -> Restart:
        group, rank = self.place
        took_s = time.monotonic() - self._since_s
        return Restart(group, took_s, (rank,), held_up_s=held_up_s, is_over=is_over)

    def give_up(self) -> None:
        self._group.kill(self.job.rank)
