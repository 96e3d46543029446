"""Playing a plan through: the engine's own scheduler, with predicted seconds instead of work.

The scheduler decides here exactly as it does in a run, so what is found is what the engine would do
if every call took what was predicted. A group of ranks counts as one, because all ranks of a mesh
work on the same call. Moving weights is part of the durations of calls; publishing and loading
them take no time of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.messages import TaskSpan
from ...dataflow.runtime.placement import DeviceGroup, Placement, flow_of
from ...dataflow.scheduler.events import NodeTask, RunCall, RunStream, RunTrain
from ...dataflow.scheduler.schedule import Schedule
from ...dataflow.scheduler.scheduler import Scheduler
from ...dataflow.scheduler.simulate import Span, dry_run
from .critical_path import PathItem, critical_path
from .plan import Plan

_Begun: TypeAlias = tuple[str, int | None, int]

# two durations that differ by less than this share are equal: sums of floats in other orders
_SAME = 1e-9


@dataclass(frozen=True)
class Simulation:
    """What a plan does once its steps repeat."""

    step_time_s: float  # seconds from the end of one step to the end of the next, in steady state
    cycle_steps: int  # after how many steps the same timing comes again; usually 1
    start_s: float  # beginning of the cycle looked at: the end of a step
    end_s: float  # end of that cycle, `cycle_steps * step_time_s` later
    completed_s: tuple[float, ...]  # when each step was complete
    # every task of a node, in the order in which they ended; ops take no time
    spans: tuple[TaskSpan, ...]
    idle_share: Mapping[str, float]  # group -> share of the cycle in which its devices wait
    # calls without a hole between them that decide how long steps take
    critical_path: tuple[PathItem, ...]

    def busy_s(self, group: str) -> float:
        return (1.0 - self.idle_share[group]) * self.step_time_s

    @property
    def critical_steps(self) -> int:
        return round(sum(item.seconds for item in self.critical_path) / self.step_time_s)

    @property
    def busiest(self) -> str:
        return min(self.idle_share, key=lambda group: self.idle_share[group])

    def window(self) -> tuple[TaskSpan, ...]:
        cut = [
            TaskSpan(
                s.node, s.step, s.chunk, s.group, s.rank,
                max(s.start_s, self.start_s), min(s.end_s, self.end_s), s.versions,
            )
            for s in self.spans
            if s.end_s > self.start_s and s.start_s < self.end_s and s.end_s > s.start_s
        ]  # fmt: skip
        shown = [s for s in cut if s.end_s - s.start_s > _SAME * self.end_s]
        return tuple(sorted(shown, key=lambda s: (s.group, s.start_s)))


def simulate_plan(graph: Graph, plan: Plan, *, num_steps: int = 24) -> Simulation:
    """Play a plan through with its own predicted durations and lag."""
    if plan.prediction is None:
        raise PlanError("the plan has no prediction, so nothing says how long its calls take")
    return simulate(
        graph,
        plan.placement(graph).nodes,
        plan.prediction.durations_s,
        max_lag=plan.max_lag or 0,
        num_steps=num_steps,
    )


def simulate(
    graph: Graph,
    nodes: Mapping[str, str],
    durations_s: Mapping[str, float],
    *,
    max_lag: int = 0,
    parts_s: Mapping[str, Sequence[float]] | None = None,
    num_steps: int = 24,
) -> Simulation:
    """Play some steps through the scheduler."""
    unknown = sorted(durations_s.keys() - nodes.keys())
    if unknown:
        raise PlanError(f"there is a duration for '{unknown[0]}', which is no node of the step")
    names = dict.fromkeys(nodes.values())
    num_parts = max((len(parts) for parts in (parts_s or {}).values()), default=0)
    schedule = Schedule(max_lag=max_lag, streaming=num_parts)
    placement = Placement(tuple(DeviceGroup(name) for name in names), nodes).streamed(num_parts)
    for played in (num_steps, 4 * num_steps, 16 * num_steps):
        spans, completed = _play(
            graph, placement, _seconds(durations_s, parts_s or {}), schedule, played
        )
        if completed[-1] <= 0:
            raise PlanError(f"no node of '{graph.name}' takes any time, so a step has no length")
        first, cycle_steps = _cycle(spans, completed)
        if first + 3 * cycle_steps + max_lag < played:
            break
    start_s, end_s = completed[-1 - cycle_steps], completed[-1]
    tasks = tuple(_task_span(s, nodes) for s in spans if isinstance(s.task, NodeTask))
    return Simulation(
        step_time_s=(end_s - start_s) / cycle_steps,
        cycle_steps=cycle_steps,
        start_s=start_s,
        end_s=end_s,
        completed_s=tuple(completed),
        spans=tasks,
        idle_share={name: idle_of(tasks, name, start_s, end_s) for name in names},
        critical_path=critical_path(
            graph,
            placement,
            spans,
            from_s=completed[min(first, len(completed) // 3)],
            until_s=end_s,
            step_time_s=(end_s - start_s) / cycle_steps,
        ),
    )


def _seconds(
    durations_s: Mapping[str, float], parts_s: Mapping[str, Sequence[float]]
) -> Callable[[object], float]:
    answered: dict[tuple[str, int], int] = {}

    def seconds(work: object) -> float:
        match work:
            case RunStream():
                at = work.node, work.step
                part = answered[at] = answered.get(at, -1) + 1
            case RunCall():
                part = work.chunk
            case RunTrain():
                part = work.part
            case _:
                return 0.0
        own = parts_s.get(work.node)
        return durations_s.get(work.node, 0.0) if own is None or part is None else own[part]

    return seconds


def _play(
    graph: Graph,
    placement: Placement,
    seconds: Callable[[object], float],
    schedule: Schedule,
    num_steps: int,
) -> tuple[list[Span], list[float]]:
    # A run's last steps have the devices to themselves, so some more are played and not looked at.
    played = num_steps + 2 * (schedule.max_lag + 1)
    flow = flow_of(graph, placement, schedule)
    scheduler = Scheduler(flow, schedule, played, max_log=1)
    spans = dry_run(scheduler, seconds, size=lambda task: task.chunk or 0).spans
    return spans, _completed(spans, played)[:num_steps]


def _task_span(span: Span, nodes: Mapping[str, str]) -> TaskSpan:
    assert isinstance(span.task, NodeTask)
    task, group = span.task, nodes[span.task.node]
    return TaskSpan(
        task.node, task.step, task.chunk, group, 0, span.start_s, span.end_s, span.versions
    )


def _completed(spans: list[Span], num_steps: int) -> list[float]:
    ends = [0.0] * num_steps
    for span in spans:
        if isinstance(span.task, NodeTask):
            ends[span.task.step] = max(ends[span.task.step], span.end_s)
    for step in range(1, num_steps):
        ends[step] = max(ends[step], ends[step - 1])
    return ends


def _cycle(spans: list[Span], completed: list[float]) -> tuple[int, int]:
    # `(step after which it repeats, steps of a cycle)`; the second half if nothing repeats.
    # Two steps end alike if the calls of later steps that run by then have the same time left, and
    # the same ones are done: what happens next depends on nothing else.
    begun: list[list[Span]] = [[] for _ in completed]
    for span in spans:
        if isinstance(span.task, NodeTask):
            step = bisect_left(completed, span.start_s)
            for at in range(step, min(span.task.step, len(completed))):
                begun[at].append(span)
    states = [_state(begun[at], at, completed[at]) for at in range(len(completed))]
    same_s = _SAME * completed[-1]
    for at in range(1, len(states)):
        for before in range(at - 1, -1, -1):
            if _alike(states[before], states[at], same_s):
                return before, at - before
    return len(states) // 2, max(1, (len(states) - 1) // 2)


def _state(begun: list[Span], step: int, now_s: float) -> dict[_Begun, float]:
    return {
        (span.task.node, span.task.chunk, span.task.step - step): max(0.0, span.end_s - now_s)
        for span in begun
        if isinstance(span.task, NodeTask)
    }


def _alike(one: Mapping[_Begun, float], other: Mapping[_Begun, float], same_s: float) -> bool:
    return one.keys() == other.keys() and all(abs(one[k] - other[k]) <= same_s for k in one)


def idle_of(spans: Sequence[TaskSpan], group: str, start_s: float, end_s: float) -> float:
    """The share of some seconds in which a group computes nothing."""
    busy = sum(
        max(0.0, min(span.end_s, end_s) - max(span.start_s, start_s))
        for span in spans
        if span.group == group
    )
    return min(1.0, max(0.0, 1.0 - busy / (end_s - start_s)))
