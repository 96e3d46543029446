"""What a run is checked against: the plan's prediction."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from ...dataflow.graph.graph import Graph, NodeKind
from ...dataflow.runtime.executor import TaskSpan
from ...planner.formatting import aligned, bytes_text, seconds_text
from ...planner.plan.plan import Plan

_Nodes = Mapping[str, Mapping[str, float | None]]
"""Node -> "predicted_s" and "measured_s", None where nothing is known; and on GPUs as bytes what a
device held at most, "predicted_bytes" and "peak_bytes"."""


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
    graph: Graph,
    plan: Plan,
    node_times_s: Mapping[str, Sequence[float]],
    node_peaks: Mapping[str, int],
) -> dict[str, dict[str, float | None]]:
    """What was predicted of each node and what was seen, in program order; see `_Nodes`.

    Args:
        graph: The step.
        plan: Where it ran.
        node_times_s: Node -> seconds in each step, of which the median counts.
        node_peaks: Node -> bytes of a device, 0 where that is not known.
    """
    predicted = plan.prediction.durations_s if plan.prediction else {}
    return {
        node.name: {
            "predicted_s": predicted.get(node.name),
            "measured_s": _median(node_times_s.get(node.name, ())),
            **_memory(plan, node.name, node_peaks.get(node.name, 0)),
        }
        for node in graph.nodes
        if node.kind is not NodeKind.SOURCE
    }


def _memory(plan: Plan, node: str, peak_bytes: int) -> dict[str, float | None]:
    """What its group holds during the call by the plan's ledger, and what was seen."""
    if not peak_bytes:
        return {}
    groups = plan.prediction.memory.values() if plan.prediction else ()
    needed = (
        group.resident_total_bytes + sum(group.transient_bytes[node].values())
        for group in groups
        if node in group.transient_bytes
    )
    return {"predicted_bytes": next(needed, None), "peak_bytes": peak_bytes}


def memory_text(nodes: _Nodes) -> list[str]:
    """Lines of a table: the most that a GPU held during each call; empty without GPUs or a plan."""
    rows: list[list[str]] = []
    for name, node in nodes.items():
        predicted, seen = node.get("predicted_bytes"), node.get("peak_bytes")
        if predicted is not None and seen:
            sizes = [bytes_text(int(predicted)), bytes_text(int(seen))]
            rows.append([name, *sizes, f"{predicted / seen - 1:+.0%}"])
    head = ["memory of a device", "predicted", "measured", "error"]
    return aligned([head, *rows], right=(1, 2, 3)) if rows else []


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
