"""Parts of every report on a plan: its cluster, its workload, and the placement of roles."""

from __future__ import annotations

from html import escape

from ...dataflow.graph.graph import Graph
from ...dataflow.kinds import NodeKind
from ..formatting import hours_text, percent_text, ranges_text, seconds_text
from ..inputs.calls import Lengths, Workload, begun_before
from ..inputs.cluster import ClusterSpec
from ..plan.plan import GroupPlan, Plan


def lengths_text(lengths: Lengths) -> str:
    """A constant ("1,024 tokens"), or the range and the mean of a histogram."""
    if len(lengths.tokens) == 1:
        return f"{lengths.longest:,} tokens"
    return f"{lengths.tokens[0]:,} to {lengths.longest:,} tokens (mean {lengths.mean:,.0f})"


def workload_text(workload: Workload) -> str:
    samples = workload.samples_per_prompt
    rows = f"{workload.num_prompts:,} prompts"
    rows += "" if samples is None else f" x {samples} response{'s' if samples > 1 else ''}"
    prompt, response = lengths_text(workload.prompt), lengths_text(workload.response)
    text = f"{rows}; prompt {prompt}, response {response}"
    return text + (f", {workload.updates_per_train} updates" if workload.updates_per_train else "")


def schedule_text(max_lag: int, segment_tokens: int) -> str:
    """A schedule as its keys: "max_lag 1, segment_tokens 512"."""
    return f"max_lag {max_lag}" + (f", segment_tokens {segment_tokens}" if segment_tokens else "")


def segments_text(workload: Workload) -> str:
    segment = workload.segment_tokens or workload.response.longest
    rows = sum(begun.rows for begun in begun_before(workload.response, segment))
    steps = -(-workload.response.longest // segment)
    return (
        f"a response grows by at most {segment:,} tokens in a step: {1 + rows:.2f} steps on "
        f"average and {steps} at most, and {rows * workload.num_rows:,.0f} go on"
    )


def cluster_text(cluster: ClusterSpec | str) -> str:
    """Its nodes and devices: "h100: 16 nodes x 8 h100 = 128 devices"."""
    if isinstance(cluster, str):
        return cluster or "some cluster"
    groups = " + ".join(
        f"{g.num_nodes} node{'s' if g.num_nodes > 1 else ''} x {g.devices_per_node} {g.device.name}"
        for g in cluster.node_groups
    )
    return f"{cluster.name}: {groups} = {cluster.num_devices} devices"


def cost_text(plan: Plan) -> str:
    text = "device-hours per step"
    if plan.num_steps is None or plan.prediction is None:
        return text
    whole, hours = plan.num_steps * plan.device_hours, plan.prediction.step_time_s / 3600
    return (
        f"{text}; {hours_text(whole)} for the {plan.num_steps:,} steps of the run, which take "
        f"{hours_text(plan.num_steps * hours)} h"
    )


def roles_by_group(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """Group -> what runs there: roles, or single calls of roles that are spread over groups."""
    calls = [node for node in graph.nodes if node.role and node.kind is not NodeKind.SOURCE]
    roles: dict[str, list[str]] = {group.name: [] for group in plan.groups}
    for role in graph.roles:
        mine = [node for node in calls if node.role == role]
        homes = dict.fromkeys(plan.group_of(node) for node in mine)
        if len(homes) == 1:
            roles[next(iter(homes))].append(role)
        else:
            for node in mine:
                roles[plan.group_of(node)].append(node.name)
    return roles


def placement_text(graph: Graph, plan: Plan) -> str:
    roles = roles_by_group(graph, plan)
    return ", ".join(
        f"{{{', '.join(roles[group.name])}}} on {len(group.devices) or group.num_ranks}"
        for group in plan.groups
        if roles[group.name]
    )


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
