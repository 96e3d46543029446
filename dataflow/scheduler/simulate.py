"""Running a scheduler against imagined workers: no processes, no tensors, only durations.

It shows what a flow under a schedule will do (which weights every task reads, what overlaps, how
busy each rank is) before anything is built, and it is how the tests drive the scheduler.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import StateError
from .describe import describe
from .events import (
    Abort,
    AdmitStep,
    CheckpointSaved,
    Event,
    Finished,
    Instruction,
    Load,
    NodeTask,
    Pause,
    Publish,
    Resized,
    ResizeGroup,
    RunCall,
    RunStream,
    RunTrain,
    SaveCheckpoint,
    SourceReady,
    Task,
    TaskDone,
    Versions,
)
from .scheduler import Scheduler

_Work: TypeAlias = (
    RunCall | RunStream | RunTrain | Publish | Load | AdmitStep | SaveCheckpoint | ResizeGroup
)


@dataclass(frozen=True, slots=True)
class Span:
    task: Task
    start_s: float
    end_s: float
    versions: Versions = ()


@dataclass
class FlowSimulation:
    # Everything the scheduler asked for, in order.
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    spans: list[Span] = field(default_factory=list[Span])  # Tasks in the order they ended
    end_s: float = 0.0  # When the last event came

    @property
    def reads(self) -> dict[NodeTask, Versions]:
        return {s.task: s.versions for s in self.spans if isinstance(s.task, NodeTask)}

    @property
    def checkpoints(self) -> list[SaveCheckpoint]:
        return [i for i in self.instructions if isinstance(i, SaveCheckpoint)]


def dry_run(
    scheduler: Scheduler,
    duration_s: Callable[[_Work], float],
    *,
    after_event: Callable[[Scheduler, Event], None] | None = None,
    replace: Callable[[Event], Event] = lambda event: event,
    size: Callable[[NodeTask], int] = lambda task: 0,
    within_s: float = 0.0,
    keep: bool = True,
) -> FlowSimulation:
    """Run `scheduler` to its end with every piece of work taking `duration_s(work)` seconds."""
    simulation, pending, count = FlowSimulation(), list[tuple[float, int, _Work, float]](), 0
    instructions = scheduler.start(0.0)
    while True:
        if keep:
            simulation.instructions += instructions
        for instruction in instructions:
            if isinstance(instruction, _Work):
                begin_s = simulation.end_s
                for work in _one_by_one(instruction, size):
                    count += 1
                    end_s = begin_s + duration_s(instruction)
                    heapq.heappush(pending, (end_s, count, work, begin_s))
                    begin_s = end_s
        if any(isinstance(i, Finished | Pause | Abort) for i in instructions):
            return simulation
        if not pending:
            raise StateError(f"nothing is pending\n{describe(scheduler)}", scheduler.log.story())
        events, until_s = list[Event](), pending[0][0] + within_s
        while pending and (not events or (within_s and pending[0][0] <= until_s)):
            end_s, _, work, start_s = heapq.heappop(pending)
            simulation.end_s = end_s
            event = replace(_event(work, end_s, size))
            events.append(event)
            if keep and isinstance(event, TaskDone):
                versions = work.versions if isinstance(work, RunCall | RunTrain) else ()
                simulation.spans.append(Span(event.task, start_s, end_s, versions))
        instructions = scheduler.handle(*events)
        if after_event is not None:
            after_event(scheduler, events[-1])


def _one_by_one(work: _Work, size: Callable[[NodeTask], int]) -> list[_Work]:
    if not isinstance(work, RunStream):
        return [work]
    tasks = sorted(work.tasks, key=lambda task: (size(task), task.chunk or 0))
    return [RunCall(t.node, t.step, t.chunk, work.rank, work.versions) for t in tasks]


def _event(work: _Work, at_s: float, size: Callable[[NodeTask], int]) -> Event:
    match work:
        case AdmitStep():
            return SourceReady(work.step, at_s)
        case SaveCheckpoint():
            return CheckpointSaved(work.step, at_s)
        case ResizeGroup():
            return Resized(work.group, work.num_ranks, at_s)
        case RunCall():
            return TaskDone(work.task, at_s, size=size(work.task))
        case RunTrain():
            return TaskDone(work.task, at_s)
        case RunStream():
            raise StateError(f"{work} ends one chunk after another")
        case _:
            return TaskDone(work, at_s)
