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
from typing import Literal, TypeAlias

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.messages import TaskSpan
from ...dataflow.runtime.placement import DeviceGroup, Placement, flow_of
from ...dataflow.scheduler.events import Load, NodeTask, Publish, RunCall, RunStream, RunTrain, Task
from ...dataflow.scheduler.schedule import Schedule
from ...dataflow.scheduler.scheduler import Scheduler
from ...dataflow.scheduler.simulate import Span, dry_run
from .plan import Plan

_Begun: TypeAlias = tuple[str, int | None, int]

# two durations that differ by less than this share are equal: sums of floats in other orders
_SAME = 1e-9


@dataclass(frozen=True)
class Simulation:
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

    @property
    def critical_steps(self) -> int:
        return round(sum(item.seconds for item in self.critical_path) / self.step_time_s)

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
        served={group.name: group.served for group in plan.groups},
    )


def simulate(
    graph: Graph,
    nodes: Mapping[str, str],
    durations_s: Mapping[str, float],
    *,
    max_lag: int = 0,
    parts_s: Mapping[str, Sequence[float]] | None = None,
    num_steps: int = 24,
    served: Mapping[str, Mapping[str, str]] | None = None,
) -> Simulation:
    """Play a placement through; `served` says for each group which groups serve it which roles."""
    unknown = sorted(durations_s.keys() - nodes.keys())
    if unknown:
        raise PlanError(f"there is a duration for '{unknown[0]}', which is no node of the step")
    served = served or {}
    names = dict.fromkeys(nodes.values())
    names |= dict.fromkeys(server for name in names for server in served.get(name, {}).values())
    num_parts = max((len(parts) for parts in (parts_s or {}).values()), default=0)
    schedule = Schedule(max_lag=max_lag, streaming=num_parts)
    groups = tuple(DeviceGroup(name, served=served.get(name, {})) for name in names)
    placement = Placement(groups, nodes).streamed(num_parts)
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
    tasks = tuple(
        TaskSpan(
            task.node, task.step, task.chunk, nodes[task.node], 0, s.start_s, s.end_s, s.versions
        )
        for s in spans
        if isinstance(task := s.task, NodeTask)
    )
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


# why a call did not start earlier: it needed another one's output, weights that were still being
# trained, the devices that another call held, or a step to be admitted
WaitedFor = Literal["input", "weights", "devices", "schedule"]


@dataclass(frozen=True)
class PathItem:
    node: str  # name of the node
    step: int  # which step it belongs to; 0 is the first step of the path
    group: str  # the group it runs on
    start_s: float  # when it starts, counted from the path's beginning
    seconds: float  # how long it takes
    waited_for: WaitedFor  # why it did not start earlier


def critical_path(
    graph: Graph,
    placement: Placement,
    spans: Sequence[Span],
    *,
    from_s: float,
    until_s: float,
    step_time_s: float,
) -> tuple[PathItem, ...]:
    """The calls that decide how long a step takes, each begun the moment the one before it ended.

    Followed back from the end of some step, the chain of what was waited for soon goes in a circle
    that repeats every so many steps. One round of that circle is returned; its calls take exactly
    as long as those steps. With lag it may be one group's own work, or go through several steps.
    """
    chain = _chain(graph, placement, spans, from_s, until_s)
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    begin, end = _round(chain, step_time_s, _SAME * until_s)
    first = min(range(begin, end), key=lambda i: order[chain[i][0].node])
    # The chain repeats itself, so a round may begin anywhere in it.
    if first + end - begin <= len(chain):
        begin, end = first, first + end - begin
    shown = chain[begin:end]
    earliest = min(span.step for span, _ in shown)
    return tuple(
        PathItem(
            node=span.node,
            step=span.step - earliest,
            group=span.group,
            start_s=span.start_s - shown[0][0].start_s,
            seconds=span.end_s - span.start_s,
            waited_for=why,
        )
        for span, why in shown
    )


_Chain: TypeAlias = list[tuple[TaskSpan, WaitedFor]]


def _chain(
    graph: Graph, placement: Placement, spans: Sequence[Span], from_s: float, until_s: float
) -> _Chain:
    at: int | None = max(i for i, span in enumerate(spans) if span.end_s <= until_s)
    chain: _Chain = []
    while at is not None and spans[at].end_s > from_s:
        span = spans[at]
        at, why = _cause(graph, placement, spans, at)
        if isinstance(span.task, NodeTask) and span.end_s - span.start_s > _SAME * until_s:
            node, step, group = span.task.node, span.task.step, placement.nodes[span.task.node]
            task = TaskSpan(node, step, None, group, 0, span.start_s, span.end_s)
            chain.append((task, why))
        elif chain:
            chain[-1] = (chain[-1][0], why)
    # Why the earliest one started may lie before `from_s`.
    return chain[-2::-1] if len(chain) > 1 else chain


def _round(chain: _Chain, step_time_s: float, same_s: float) -> tuple[int, int]:
    for begin, (first, _) in enumerate(chain):
        for end in range(begin + 1, len(chain)):
            again = chain[end][0]
            steps = again.step - first.step
            late_s = again.start_s - first.start_s - steps * step_time_s
            if again.node == first.node and steps > 0 and abs(late_s) <= same_s:
                return begin, end
    return 0, len(chain)


def _cause(
    graph: Graph, placement: Placement, spans: Sequence[Span], at: int
) -> tuple[int | None, WaitedFor]:
    # The task whose end let `spans[at]` start, and what of it was needed.
    # Several may end at that moment; an input explains more than weights, and those more than
    # devices. If none of them is needed, the last one completed the step that made room for this
    # one.
    task, start_s = spans[at].task, spans[at].start_s
    found: dict[WaitedFor, int] = {}
    for i in range(at - 1, -1, -1):
        if spans[i].end_s < start_s:
            break
        if spans[i].end_s == start_s:
            found.setdefault(_relation(graph, placement, spans[i].task, task), i)
    for why in ("input", "weights", "devices", "schedule"):
        if why in found:
            return found[why], why
    return None, "schedule"


def _relation(graph: Graph, placement: Placement, ended: Task, started: Task) -> WaitedFor:
    if isinstance(ended, NodeTask) and isinstance(started, NodeTask):
        inputs = {ref.node for _, ref in graph[started.node].inputs}
        if ended.step == started.step and ended.node in inputs:
            return "input"
    if _made(graph, ended) in _read(graph, started):
        return "weights"
    same = _group(graph, placement, ended) == _group(graph, placement, started)
    return "devices" if same else "schedule"


def _made(graph: Graph, task: Task) -> str | None:
    if isinstance(task, NodeTask):
        node = graph[task.node]
        return node.role if node.kind is NodeKind.TRAIN else None
    return task.role


def _read(graph: Graph, task: Task) -> set[str]:
    if isinstance(task, NodeTask):
        return {read.role for read in graph[task.node].reads}
    return {task.role}


def _group(graph: Graph, placement: Placement, task: Task) -> str | None:
    match task:
        case NodeTask():
            return placement.nodes[task.node]
        case Load():
            return task.group
        case Publish():
            return placement.home(graph, task.role)
