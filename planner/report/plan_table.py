"""A plan by itself as a small table: which group of devices makes which calls, and how long.

A plan alone does not say in which order its calls follow; with the graph `html_report` shows them
over time.
"""

from __future__ import annotations

from html import escape

from ..formatting import percent_text, ranges_text, seconds_text
from ..plan.plan import GroupPlan, Plan
from .plan_texts import cluster_text, schedule_text

_BAR = 160  # pixels of the longest call

_CELL = 'style="text-align: left"'


def plan_table(plan: Plan) -> str:
    """The table as HTML that takes its colors and letters from the page around it."""
    lines = [cluster_text(plan.cluster)] if plan.cluster else []
    if plan.max_lag is not None:
        segment_tokens = plan.prediction.segment_tokens if plan.prediction else 0
        lines.append(schedule_text(plan.max_lag, segment_tokens or 0))
    if plan.prediction is not None:
        lines.append(f"{seconds_text(plan.prediction.step_time_s)} per step")
    head = "".join(
        f"<th {_CELL}>{title}</th>" for title in ("group", "devices", "call", "layout", "time", "")
    )
    rows = "".join(_rows(plan, group) for group in plan.groups)
    return (
        f"<div><p>{escape('; '.join(lines))}</p><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _rows(plan: Plan, group: GroupPlan) -> str:
    default = plan.default_group or plan.groups[0].name
    named = [name for name, where in plan.nodes.items() if where == group.name]
    rest = f"every {'other ' if plan.nodes else ''}call" if group.name == default else "no call"
    devices = ranges_text(group.devices) or f"{group.num_ranks} {group.device}"
    memory = plan.prediction.memory.get(group.name) if plan.prediction else None
    if memory is not None:
        devices += f", {percent_text(memory.peak_bytes / memory.capacity_bytes)} of memory"
    rows: list[str] = []
    for number, name in enumerate(named or [rest]):
        first = (group.name, devices) if number == 0 else ("", "")
        layout = plan.layouts.get(name)
        cells = (*first, name, "" if layout is None else str(layout))
        texts = "".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr>{texts}{_time(plan, name)}</tr>")
    return "".join(rows)


def _time(plan: Plan, name: str) -> str:
    nodes = plan.prediction.nodes if plan.prediction else {}
    if name not in nodes:
        return "<td></td><td></td>"
    duration_s = nodes[name].duration_s
    longest_s = max(node.duration_s for node in nodes.values())
    width = round(_BAR * duration_s / longest_s) if longest_s else 0
    return (
        f"<td {_CELL}>{seconds_text(duration_s)}</td>"
        f'<td {_CELL}><svg width="{_BAR}" height="12"><rect width="{width}" height="12" '
        'fill="#2f6fd6"/></svg></td>'
    )
