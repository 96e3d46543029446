"""Plans side by side: what each takes, uses and costs, as a table and as plain data.

The plans answer one question about a step: how others fixed its parts, how many nodes it needs, or
what faster hardware would give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dataflow.graph.graph import Graph
from ..formatting import aligned, bytes_text, change_text, hours_text, percent_text, seconds_text
from ..plan.plan import Plan, Prediction
from ..plan.simulate import Simulation
from .plan_texts import placement_text

# of the columns: `memory` is the fullest device's, `device-h/1,000` the cost of 1,000 steps
HEADS = (
    "plan", "devices", "step", "difference", "tokens/s", "memory", "device-h/1,000", "where",
)  # fmt: skip

_MOST_CALLS = 6  # of those that differ


@dataclass(frozen=True)
class Alternative:
    name: str  # what is special about it
    plan: Plan | None  # the best plan under that, with a prediction; None if none fits
    why: str = ""  # why none does
    # what happened, if it was measured; the plan is played through otherwise
    simulation: Simulation | None = None

    @property
    def step_s(self) -> float:
        found = self.plan and self.plan.prediction
        return found.step_time_s if found else float("inf")


@dataclass(frozen=True)
class PlanComparison:
    key: str  # of the configuration, that asked it: "compare"
    title: str  # of the table
    base: Alternative  # the plan with which the others are compared
    others: tuple[Alternative, ...]  # the others; `base` may be among them
    answer: str = ""  # A sentence on what they show; "" if the table says it all
    by_call: bool = False  # whether to say in which calls they differ

    @property
    def rows(self) -> tuple[Alternative, ...]:
        return self.others if self.base in self.others else (self.base, *self.others)

    @property
    def plans(self) -> list[tuple[Alternative, Plan, Prediction]]:
        return [
            (one, one.plan, one.plan.prediction)
            for one in self.rows
            if one.plan is not None and one.plan.prediction is not None
        ]


def comparison_text(graph: Graph, comparison: PlanComparison) -> str:
    """The table, and the answer; and the calls that differ, if they are asked for."""
    table = aligned([HEADS, *rows_of(graph, comparison)], right=(1, 2, 3, 4, 6))
    lines = [comparison.title, *(f"  {line}" for line in table)]
    lines += [f"  {comparison.answer}"] if comparison.answer else []
    if comparison.by_call:
        lines += ["", *_calls(graph, comparison)]
    return "\n".join(lines)


def rows_of(graph: Graph, comparison: PlanComparison) -> list[list[str]]:
    return [_row(graph, comparison.base, one) for one in comparison.rows]


def _row(graph: Graph, base: Alternative, one: Alternative) -> list[str]:
    plan, found = one.plan, one.plan and one.plan.prediction
    if plan is None or found is None:
        return [one.name, *[""] * 6, f"no plan: {one.why.partition(chr(10))[0]}"]
    held = found.fullest
    change = "" if one is base else change_text(one.step_s / base.step_s - 1)
    notes = f", max_lag {plan.max_lag}" if plan.max_lag else ""
    notes += ", search stopped at its deadline" if found.stopped_at_deadline else ""
    return [
        one.name,
        f"{plan.num_devices:,}",
        seconds_text(found.step_time_s),
        change,
        "" if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f}",
        ""
        if held is None
        else f"{bytes_text(held.peak_bytes)}, "
        f"{percent_text(held.peak_bytes / held.capacity_bytes)}",
        hours_text(1000 * plan.device_hours),
        placement_text(graph, plan) + notes,
    ]


def _calls(graph: Graph, comparison: PlanComparison) -> list[str]:
    plans = comparison.plans
    calls: list[tuple[float, list[str]]] = []
    for node in graph.nodes:
        if all(node.name in found.nodes for _, _, found in plans):
            cells = [_call(plan, found, node.name) for _, plan, found in plans]
            slowest_s = max(found.nodes[node.name].duration_s for _, _, found in plans)
            calls += [(slowest_s, [node.name, *cells])] if len(set(cells)) > 1 else []
    if not calls:
        return ["no call differs"]
    calls.sort(key=lambda call: -call[0])
    head = ["node", *(one.name for one, _, _ in plans)]
    table = aligned([head, *(cells for _, cells in calls[:_MOST_CALLS])])
    return ["slowest calls that differ", *(f"  {line}" for line in table)]


def _call(plan: Plan, found: Prediction, name: str) -> str:
    seconds, layout = seconds_text(found.nodes[name].duration_s), plan.layouts.get(name)
    return seconds if layout is None else f"{seconds} on {layout.num_devices}, {layout}"


def comparison_json(graph: Graph, comparison: PlanComparison) -> dict[str, Any]:
    return {
        "title": comparison.title,
        "answer": comparison.answer,
        "base": comparison.base.name,
        "plans": [_json(graph, one) for one in comparison.rows],
    }


def _json(graph: Graph, one: Alternative) -> dict[str, Any]:
    plan, found = one.plan, one.plan and one.plan.prediction
    if plan is None or found is None:
        return {"name": one.name, "feasible": False, "reason": one.why}
    return {
        "name": one.name,
        "feasible": True,
        "num_devices": plan.num_devices,
        "step_time_s": found.step_time_s,
        "stopped_at_deadline": found.stopped_at_deadline,
        "tokens_per_s": found.tokens_per_s,
        "peak_bytes": found.fullest and found.fullest.peak_bytes,
        "device_hours_per_step": plan.device_hours,
        "max_lag": plan.max_lag,
        "placement": placement_text(graph, plan),
    }
