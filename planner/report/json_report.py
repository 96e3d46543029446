"""A plan as one JSON object for programs: what `penstock plan --json` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.messages import TaskSpan
from ..formatting import bytes_text, ranges_text
from ..inputs.cluster import ClusterSpec
from ..plan.plan import Plan, Prediction
from ..plan.simulate import Simulation, simulate_plan
from .comparison import PlanComparison, comparison_json
from .plan_texts import roles_by_group


def to_json(
    graph: Graph,
    plan: Plan,
    simulation: Simulation | None = None,
    comparisons: Sequence[PlanComparison] = (),
) -> dict[str, Any]:
    simulation = simulation or simulate_plan(graph, plan)
    found = plan.prediction
    assert found is not None, "simulate_plan refuses a plan without a prediction"
    return {
        "feasible": found.feasible,
        "step_time_s": found.step_time_s,
        "lower_bound_s": found.lower_bound_s,
        "gap": found.gap,
        "search_time_s": found.search_time_s,
        "stopped_at_deadline": found.stopped_at_deadline,
        "simulated_step_time_s": simulation.step_time_s,
        "device_hours_per_step": plan.device_hours,
        "num_steps": plan.num_steps,
        "device_hours": plan.num_steps and plan.num_steps * plan.device_hours,
        "max_lag": plan.max_lag,
        "calibration": found.calibration,
        "cluster": {
            "name": plan.cluster.name,
            "num_devices": plan.cluster.num_devices,
        }
        if isinstance(plan.cluster, ClusterSpec)
        else {"name": plan.cluster, "num_devices": plan.num_devices},
        "workload": None if found.workload is None else found.workload.model_dump(mode="json"),
        "groups": _groups(graph, plan, found, simulation),
        "nodes": _nodes(graph, plan, found),
        "memory_bytes_per_device": {
            str(device): size for device, size in plan.memory_bytes_per_device.items()
        },
        "critical_path": [
            {"node": i.node, "step": i.step, "seconds": i.seconds, "waited_for": i.waited_for}
            for i in simulation.critical_path
        ],
        "runner_up": None if found.runner_up is None else found.runner_up.model_dump(mode="json"),
        "segment_tokens": found.segment_tokens,
        "other_schedules": [
            {
                **other.model_dump(mode="json"),
                "factor": other.step_time_s and other.step_time_s / found.step_time_s,
            }
            for other in found.other_schedules
        ],
        **{one.key: comparison_json(graph, one) for one in comparisons},
    }


def infeasible(reason: str, search_time_s: float) -> dict[str, Any]:
    return {
        "feasible": False,
        "reason": reason,
        "step_time_s": None,
        "lower_bound_s": None,
        "gap": None,
        "search_time_s": search_time_s,
        "nodes": {},
        "memory_bytes_per_device": {},
        "runner_up": None,
    }


def _groups(graph: Graph, plan: Plan, found: Prediction, simulation: Simulation) -> dict[str, Any]:
    roles, memory = roles_by_group(graph, plan), found.memory
    return {
        group.name: {
            "devices": list(group.devices),
            "roles": roles[group.name],
            "idle_share": simulation.idle_share.get(group.name, 1.0),
            "memory": None
            if group.name not in memory
            else {
                **memory[group.name].model_dump(mode="json"),
                "peak_bytes": memory[group.name].peak_bytes,
                "peak_call": memory[group.name].peak_call,
            },
        }
        for group in plan.groups
    }


def _nodes(graph: Graph, plan: Plan, found: Prediction) -> dict[str, Any]:
    return {
        node.name: {
            "group": plan.group_of(node),
            "devices": list(plan.group(plan.group_of(node)).devices),
            "layout": plan.layouts[node.name].model_dump(mode="json")
            if node.name in plan.layouts
            else None,
            "model": found.models.get(node.role or ""),
            "duration_s": found.nodes[node.name].duration_s,
            "parts_s": dict(found.nodes[node.name].parts_s),
        }
        for node in graph.nodes
        if node.name in found.nodes
    }


def to_trace(
    graph: Graph, plan: Plan, simulation: Simulation | None = None, *, num_steps: int = 8
) -> str:
    """The first steps of a run under this plan, from time 0."""
    simulation = simulation or simulate_plan(graph, plan)
    pids = {group.name: i for i, group in enumerate(plan.groups, start=1)}
    events: list[dict[str, Any]] = []
    for group in plan.groups:
        devices = ranges_text(group.devices) or str(group.num_ranks)
        for what, name in (("process_name", group.name), ("thread_name", f"devices {devices}")):
            head = {"ph": "M", "name": what, "pid": pids[group.name], "tid": 0}
            events.append({**head, "args": {"name": name}})
    shown = [s for s in simulation.spans if s.step < num_steps and s.end_s > s.start_s]
    shown.sort(key=lambda span: (span.start_s, pids[span.group]))
    for span in shown:
        events.append(_slice(plan, span, pids[span.group]))
        events += _memory(plan, span, pids[span.group])
    return "[\n" + ",\n".join(json.dumps(event, allow_nan=False) for event in events) + "\n]\n"


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
