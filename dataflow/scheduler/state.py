"""The state of a scheduler, which it alone writes, and reports read.

A checkpoint at step c must show every trainable role at version `c * n`. So no training of step c
or later starts before it is saved. Once steps below c are complete the scheduler drains: only those
tasks of later steps start that had to read older weights than `c * n`, which a resumed run could
not make again, and what they need. Publications and loads go on; they cannot pass `c * n`.

A run that is to stop takes its last checkpoint at the first step of which no training has started.
A run that is to pause ends at a boundary like a checkpoint's, with or without writing one, and
another goes on from what it leaves in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..errors import StateError
from .events import Awaited, NodeTask, ResumeState, Task, Versions
from .rank_queues import RankPool, Running
from .schedule import Flow, Schedule
from .steps import FlowIndex, StepState, restored_steps
from .weight_versions import Weights


@dataclass(frozen=True, slots=True)
class LogEntry:
    at_s: float  # The shell's clock
    what: str  # "ready", "start", "done", "admit",
    subject: Task | str  # The task concerned, or words if it is not about a task
    step: int | None = None  # The step concerned, if any
    group: str = ""  # The group it runs on, for tasks that run
    ranks: tuple[int, ...] = ()  # Ranks of `group`
    versions: Versions = ()  # Weights read

    def __str__(self) -> str:
        where = f" on {', '.join(rank_names(self.group, self.ranks))}" if self.ranks else ""
        reads = f" with {versions_text(self.versions)}" if self.versions else ""
        return f"{self.at_s:.1f} s  {self.what} {self.subject}{where}{reads}"


def rank_names(group: str, ranks: Iterable[int]) -> list[str]:
    return [f"{group}[{rank}]" for rank in ranks]


def versions_text(versions: Versions) -> str:
    return ", ".join(f"{role}@{version}" for role, version in versions)


# A transition as it is noted, three times for every task: making a `LogEntry` costs more.
_Noted: TypeAlias = tuple[float, str, Task | str, int | None, Running | None]


class SchedulerLog:
    """The last `max_entries` transitions, and the last one of every rank."""

    def __init__(self, groups: Mapping[str, int], max_entries: int) -> None:
        self._noted: deque[_Noted] = deque(maxlen=max_entries)
        self._last_of_rank: dict[str, list[_Noted | None]] = {
            group: [None] * num_ranks for group, num_ranks in groups.items()
        }

    def __len__(self) -> int:
        return len(self._noted)

    def resize(self, group: str, num_ranks: int) -> None:
        last = self._last_of_rank[group]
        self._last_of_rank[group] = [*last, *[None] * num_ranks][:num_ranks]

    def add(
        self, at_s: float, what: str, subject: Task | str, step: int | None, run: Running | None
    ) -> None:
        noted = (at_s, what, subject, step, run)
        self._noted.append(noted)
        if run is not None:
            last = self._last_of_rank[run.group]
            for rank in run.ranks:
                last[rank] = noted

    def __iter__(self) -> Iterator[LogEntry]:
        return map(_entry, self._noted)

    def story(self, node: str | None = None, step: int | None = None) -> tuple[str, ...]:
        """The transitions of a node, of a step, or of both; all of them if neither is given.

        A node's story includes what happened to its step as a whole.
        """
        return tuple(str(entry) for entry in self if _concerns(entry, node, step))

    def rank_lines(self) -> tuple[str, ...]:
        return tuple(
            f"{group}[{rank}]  {_entry(noted) if noted else 'nothing yet'}"
            for group, last in self._last_of_rank.items()
            for rank, noted in enumerate(last)
        )


def _entry(noted: _Noted) -> LogEntry:
    at_s, what, subject, step, run = noted
    if run is None:
        return LogEntry(at_s, what, subject, step)
    return LogEntry(at_s, what, subject, step, run.group, run.ranks, run.versions)


def _concerns(entry: LogEntry, node: str | None, step: int | None) -> bool:
    if step is not None and entry.step != step:
        return False
    if node is None:
        return True
    if isinstance(entry.subject, NodeTask):
        return entry.subject.node == node
    return step is not None


def chain_sha256(history: str, lines: Iterable[str]) -> str:
    """The hash of everything before, `history`, followed by one step's sorted lines."""
    digest = hashlib.sha256(history.encode())
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


_NEVER = 1 << 62


class Checkpoints:
    def __init__(
        self,
        index: FlowIndex,
        weights: Weights,
        schedule: Schedule,
        num_steps: int,
        every: int | None,
        first_step: int,
        pauses: Collection[int] = (),
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"checkpoint_every must be at least 1 step, got {every}")
        self._index, self._num_steps, self._every = index, num_steps, every
        outside = [step for step in pauses if not 0 < step < num_steps]
        if outside:
            raise ValueError(f"cannot pause after {outside[0]} of {num_steps} steps")
        self._first_step, self._pauses = first_step, frozenset(pauses)
        self.stopping = self.stopped = False
        # Per distance d, names of the nodes that must have run in step `boundary + d`.
        self.required = tuple(
            _required(index, weights, distance) for distance in range(schedule.max_lag)
        )
        # Completed steps at which the next checkpoint or pause is due.
        self.boundary = first_step if first_step in self._pauses else self._next(first_step)
        self.draining = self.boundary == first_step  # Whether it is being prepared or written

    def _next(self, completed: int) -> int:
        due = [step for step in self._pauses if step > completed]
        if self._every is not None and completed < self._num_steps:
            due.append(min((completed // self._every + 1) * self._every, self._num_steps))
        return min(due, default=_NEVER)

    @property
    def saves(self) -> bool:
        if self._every is None or self.stopping:
            return self.stopping
        due = self.boundary % self._every == 0 or self.boundary == self._num_steps
        return due and self.boundary != self._first_step

    @property
    def pauses(self) -> bool:
        return self.boundary in self._pauses and not self.stopping

    def may_start(self, task: Task) -> bool:
        if not isinstance(task, NodeTask):
            return True  # a read of an older version may come with one of the boundary's own
        distance = task.step - self.boundary
        if distance < 0:
            return True
        if self._index.flow.nodes[self._index.index[task.node]].trains is not None:
            return False
        if not self.draining:
            return True
        return distance < len(self.required) and task.node in self.required[distance]

    def step_completed(self, completed: int) -> bool:
        self.draining = completed == self.boundary
        return self.draining

    def stop(self, completed: int, steps: Mapping[int, StepState], running: Iterable[Task]) -> None:
        """Make the first checkpoint that can still be taken the next one, and the last."""
        trains = {node.name for node in self._index.flow.nodes if node.trains is not None}
        begun = [task for task in running if isinstance(task, NodeTask)]
        begun += [task for state in steps.values() for task in state.done()]
        trained = [task.step + 1 for task in begun if task.node in trains]
        self.stopping = True
        self.boundary = max(trained, default=completed)
        self.draining = completed == self.boundary

    def saved(self) -> None:
        self.draining, self.stopped = False, self.stopping or self.pauses
        if not self.stopped:
            self.boundary = self._next(self.boundary)

    def check_drained(self, steps: Mapping[int, StepState]) -> None:
        """Everything that reads older weights is done."""
        left = self._undone(steps, self.boundary)
        if left:
            raise StateError(f"checkpoint {self.boundary} would lose {', '.join(map(str, left))}")

    def check_resumable(self, steps: Mapping[int, StepState]) -> None:
        """A run may go on from here: nothing is left that needs weights which are gone."""
        nodes = {node.name: node for node in self._index.flow.nodes}
        undone = self._undone(steps, self._first_step) if self._first_step else []
        left = [task for task in undone if nodes[task.node].reads]
        if left:
            raise ValueError(
                f"cannot resume at step {self._first_step}: '{left[0]}' reads weights older than "
                f"the checkpoint's and is not part of it. The checkpoint is the end of a shorter "
                f"run or was made with a smaller Schedule.max_lag; resume with max_lag=0, or from "
                f"a checkpoint at least max_lag steps before that run's end"
            )

    def _undone(self, steps: Mapping[int, StepState], boundary: int) -> list[NodeTask]:
        undone: list[NodeTask] = []
        for distance, names in enumerate(self.required):
            step = boundary + distance
            if step >= self._num_steps:
                break
            state = steps.get(step)
            for name in sorted(names):
                tasks = self._index.tasks(self._index.index[name], step)
                undone += [task for task in tasks if state is None or not state.is_done(task)]
        return undone


def _required(index: FlowIndex, weights: Weights, distance: int) -> frozenset[str]:
    needed: set[int] = set()
    for i in reversed(range(len(index.inputs))):
        reads_older = any(
            rule.lag > 0 and not rule.loose and rule.offset < (rule.lag - distance) * rule.per_step
            for rule in weights.rules_of[i]
        )
        if reads_older or any(consumer in needed for consumer in index.consumers[i]):
            needed.add(i)
    # Backwards over consumers marks ancestors only: a consumer of a needed node is not needed.
    return frozenset(index.flow.nodes[i].name for i in needed)


class SchedulerState:
    """The state of a run of `num_steps` steps of `flow` under `schedule`; see `Scheduler`."""

    def __init__(
        self,
        flow: Flow,
        schedule: Schedule,
        num_steps: int,
        checkpoint_every: int | None,
        pauses: Collection[int],
        resume: ResumeState,
        one_at_a_time: bool,
        max_log: int,
    ) -> None:
        if not 0 <= resume.step <= num_steps:
            raise ValueError(f"cannot resume at step {resume.step} of a run of {num_steps} steps")
        self.flow, self.schedule, self.num_steps = flow, schedule, num_steps
        self.one_at_a_time = one_at_a_time
        # The flow's nodes by name, and the readers of each.
        self.index = FlowIndex(flow, in_flight=schedule.in_flight)
        # Which copy of which weights holds which version.
        self.weights = Weights(flow, schedule, num_steps, resume.step)
        together = frozenset(node.name for node in flow.nodes if node.streams)
        in_flight = together if schedule.in_flight else frozenset[str]()
        # Ranks and the tasks that wait for them.
        self.ranks = RankPool(flow.groups, flow.sharing, together, in_flight)
        self.log = SchedulerLog(flow.groups, max_log)  # Transitions, for stories
        # When one is due, and what may still run before it.
        self.checkpoints = Checkpoints(
            self.index, self.weights, schedule, num_steps, checkpoint_every, resume.step, pauses
        )
        self.completed = resume.step  # Steps complete
        self.running: dict[Task, Running] = {}  # Tasks running, oldest first
        self.resizing: dict[str, int] = {}  # Group -> how many ranks it is to have
        self.awaited: dict[Awaited, float] = {}  # Other things asked of the shell, and when
        # Over the whole run, how many rollout reads were how many versions behind.
        self.lag_counts: Counter[int] = Counter()
        self.done = self.aborted = False
        # Progress of the steps in flight.
        self.steps: dict[int, StepState] = restored_steps(
            self.index, self.weights.rules_of, resume, num_steps
        )
        self.admitted = resume.step + len(self.steps)  # Steps admitted
