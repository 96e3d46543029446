"""Which calls a step waits for, one after another, and why each did not start earlier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...dataflow.graph.graph import Graph
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.messages import TaskSpan
from ...dataflow.runtime.placement import Placement
from ...dataflow.scheduler.events import Load, NodeTask, Publish, Task
from ...dataflow.scheduler.simulate import Span

# why a call did not start earlier: it needed another one's output, weights that were still being
# trained, the devices that another call held, or a step to be admitted
WaitedFor = Literal["input", "weights", "devices", "schedule"]

_SAME = 1e-9  # less than this share of the whole time is rounding, not work


@dataclass(frozen=True)
class PathItem:
    """A call on the critical path."""

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
