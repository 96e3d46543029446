"""The report of a completed step, put together from those of its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph.graph import Graph, NodeKind
from ..graph.role import Metric, add_metrics
from ..scheduler.events import NodeTask, StepCompleted, Versions
from .executor import TaskSpan
from .messages import Report
from .placement import Placement


@dataclass(frozen=True)
class StepResult:
    """The report of a completed step.

    Attributes:
        step: Index of the step.
        metrics: `node/name` -> value, merged over chunks and ranks.
        spans: When and where each of its tasks ran.
        lag: (versions behind, number of rollout tasks) pairs.
        num_rows: Node -> rows it made.
        controller_bytes: Bytes that passed through the controller since the step before.
        kept: Name -> column or table, of what `Engine.run` was asked to keep. Columns are dense
            tensors on the CPU, ragged ones padded on the right: ids with -1, other numbers with 0.
        weights_s: Start and end, in seconds since the epoch, of every time that new weights were
            brought from group to group since the step before.
        mirrored_bytes: Bytes that were copied to a mirror's memory since the step before.
    """

    step: int
    metrics: Mapping[str, float]
    spans: tuple[TaskSpan, ...]
    lag: tuple[tuple[int, int], ...] = ()
    num_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    controller_bytes: int = 0
    kept: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    weights_s: tuple[tuple[float, float], ...] = ()
    mirrored_bytes: int = 0


@dataclass(frozen=True)
class Done:
    """One rank's share of a finished task."""

    task: NodeTask
    rank: int
    report: Report
    versions: Versions


def step_result(
    graph: Graph,
    placement: Placement,
    completed: StepCompleted,
    done: Sequence[Done],
    controller_bytes: int,
    kept: Mapping[str, Any],
    weights_s: Sequence[tuple[float, float]] = (),
    mirrored_bytes: int = 0,
) -> StepResult:
    """Put together what ranks report of the tasks of a step."""
    rows: dict[str, int] = {}
    for one in done:
        made = one.report.num_rows if one.report.chunk is None else one.report.num_rows[:1]
        rows[one.task.node] = rows.get(one.task.node, 0) + sum(made)
    return StepResult(
        completed.step,
        {name: metric.value for name, metric in sorted(_merged(graph, done).items())},
        tuple(_span(placement, one) for one in done),
        completed.lag,
        rows,
        controller_bytes,
        kept,
        tuple(weights_s),
        mirrored_bytes,
    )


def _merged(graph: Graph, done: Sequence[Done]) -> dict[str, Metric]:
    merged: dict[str, Metric] = {}
    for one in done:
        if one.rank and graph[one.task.node].kind is NodeKind.TRAIN:
            continue
        found = one.report.metrics.items()
        add_metrics(merged, {f"{one.task.node}/{name}": metric for name, metric in found})
    return merged


def _span(placement: Placement, done: Done) -> TaskSpan:
    task, report = done.task, done.report
    return TaskSpan(
        task.node,
        task.step,
        task.chunk,
        placement.nodes[task.node],
        done.rank,
        report.start_s,
        report.end_s,
        done.versions,
        report.peak_bytes,
    )
