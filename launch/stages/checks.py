"""What a run is checked against: the plan's prediction."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from ...dataflow.graph.graph import Graph, NodeKind
from ...dataflow.runtime.executor import TaskSpan
from ...planner.formatting import aligned, seconds_text
from ...planner.plan.plan import Plan

__all__ = ["comparison_text", "node_seconds", "nodes_summary"]

_Nodes = Mapping[str, Mapping[str, float | None]]
"""Node -> "predicted_s" and "measured_s", None where nothing is known."""


def node_seconds(spans: Iterable[TaskSpan]) -> dict[str, float]:
    """Node -> how long its busiest rank worked on it in one step.

    A node's rows may come in chunks, on several ranks and with other work in between, so the time
    from its first start to its last end says less than what its ranks spent.
    """
    worked: dict[str, dict[int, float]] = {}
    for span in spans:
        ranks = worked.setdefault(span.node, {})
        ranks[span.rank] = ranks.get(span.rank, 0.0) + span.end_s - span.start_s
    return {node: max(ranks.values()) for node, ranks in worked.items()}


def nodes_summary(
    graph: Graph, plan: Plan, node_times_s: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, float | None]]:
    """Node -> `predicted_s` and `measured_s`, the median over steps; in program order."""
    predicted = plan.prediction.durations_s if plan.prediction else {}
    return {
        node.name: {
            "predicted_s": predicted.get(node.name),
            "measured_s": _median(node_times_s.get(node.name, ())),
        }
        for node in graph.nodes
        if node.kind is not NodeKind.SOURCE
    }


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def comparison_text(plan: Plan, nodes: _Nodes, step_time_s: float) -> list[str]:
    """Lines of a table: every node that takes time by the prediction, then the step.

    Empty without a prediction, or if this process took no step.
    """
    prediction = plan.prediction
    if prediction is None or not step_time_s > 0:
        return []
    rows = [["node", "group", "predicted", "measured", "error"]]
    for name, node in nodes.items():
        predicted, measured = node["predicted_s"], node["measured_s"]
        if predicted is not None and measured is not None:
            rows.append([name, plan.nodes.get(name, ""), *_cells(predicted, measured)])
    rows.append(["a step", "", *_cells(prediction.step_time_s, step_time_s)])
    return [*aligned(rows, right=(2, 3, 4)), f"predicted with: {prediction.calibration}"]


def _cells(predicted: float, measured: float) -> list[str]:
    error = f"{predicted / measured - 1:+.0%}" if measured > 0 else "-"
    return [seconds_text(predicted), seconds_text(measured), error]
