"""A plan's simulated steps as a Chrome trace, which Perfetto opens beside the trace of a run.

The format is that of a run's own trace: Chrome's array form, one event per line, a process per
group. A simulated group has one track, because its ranks work on the same call.
"""

from __future__ import annotations

import json
from typing import Any

from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.messages import TaskSpan
from ..formatting import bytes_text, ranges_text
from ..plan.plan import Plan
from ..plan.simulate import Simulation, simulate_plan


def to_trace(
    graph: Graph, plan: Plan, simulation: Simulation | None = None, *, num_steps: int = 8
) -> str:
    """The first steps of a run under this plan, from time 0."""
    simulation = simulation or simulate_plan(graph, plan)
    pids = {group.name: i for i, group in enumerate(plan.groups, start=1)}
    events: list[dict[str, Any]] = []
    for group in plan.groups:
        devices = ranges_text(group.devices) or str(group.num_ranks)
        events.append(_named("process_name", pids[group.name], group.name))
        events.append(_named("thread_name", pids[group.name], f"devices {devices}"))
    shown = [s for s in simulation.spans if s.step < num_steps and s.end_s > s.start_s]
    shown.sort(key=lambda span: (span.start_s, pids[span.group]))
    for span in shown:
        events.append(_slice(plan, span, pids[span.group]))
        events += _memory(plan, span, pids[span.group])
    return "[\n" + ",\n".join(json.dumps(event, allow_nan=False) for event in events) + "\n]\n"


def _named(what: str, pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": 0, "args": {"name": name}}


def _slice(plan: Plan, span: TaskSpan, pid: int) -> dict[str, Any]:
    start_us, end_us = round(span.start_s * 1e6), round(span.end_s * 1e6)
    layout = plan.layouts.get(span.node)
    found = plan.prediction.nodes.get(span.node) if plan.prediction else None
    return {
        "ph": "X",
        "name": span.node,
        "cat": "task",
        "pid": pid,
        "tid": 0,
        "ts": start_us,
        "dur": max(0, end_us - start_us),
        "step": span.step,
        "args": {
            "node": span.node,
            "step": span.step,
            "chunk": span.chunk,
            "versions": dict(span.versions),
            "layout": None if layout is None else str(layout),
            "parts_s": dict(found.parts_s) if found else {},
        },
    }


def _memory(plan: Plan, span: TaskSpan, pid: int) -> list[dict[str, Any]]:
    held = plan.prediction.memory.get(span.group) if plan.prediction else None
    if held is None:
        return []
    added = sum(held.transient_bytes.get(span.node, {}).values())
    rest = held.resident_total_bytes
    name = f"bytes per device, of {bytes_text(held.capacity_bytes)}"
    return [
        {
            "ph": "C", "name": name, "pid": pid, "tid": 0, "ts": round(at_s * 1e6),
            "step": span.step, "args": {"value": float(size)},
        }
        for at_s, size in ((span.start_s, rest + added), (span.end_s, rest))
    ]  # fmt: skip
