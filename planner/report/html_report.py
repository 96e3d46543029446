"""A plan as one self-contained page: a timeline of devices, memory, a table, and why this plan."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...dataflow.graph.graph import Graph
from ..formatting import bytes_text, hours_text, part_text, percent_text, seconds_text
from ..plan.plan import GroupMemory, Plan, Prediction
from ..plan.simulate import Simulation, simulate_plan
from .comparison import HEADS, PlanComparison, rows_of
from .gantt import (
    PART_COLORS,
    SCRIPT,
    STYLE,
    WIDTH,
    attribute,
    gantt,
    role_colors,
    round_text,
    ticks,
)
from .plan_texts import (
    cluster_text,
    cost_text,
    placement_text,
    schedule_text,
    segments_text,
    workload_text,
)

_LEFT, _RIGHT, _ROW, _BAR, _HEAD = 190, 80, 26, 18, 30
_PLOT = WIDTH - _LEFT - _RIGHT


def part_color(part: str) -> str:
    return f"var(--{part if part in PART_COLORS else 'other'})"


def memory_bars(plan: Plan) -> str:
    """Return stacked bars against each group's capacity; nothing without predicted memory.

    For each group there is a bar of what is always held, and one for each call with what the call
    adds. Every piece carries its bytes as `data-bytes`.
    """
    memory = plan.prediction.memory if plan.prediction else {}
    if not memory:
        return ""
    most = max(max(held.capacity_bytes, held.peak_bytes) for held in memory.values())
    scale = _PLOT / (1.04 * most)
    parts: list[str] = []
    y = 0
    for name, held in memory.items():
        parts += _group(plan, name, held, y, scale)
        y += _HEAD + _ROW * (1 + len(held.transient_bytes)) + 14
    unit = next(u for u in (2**40, 2**30, 2**20, 2**10, 1) if most >= u or u == 1)
    axis = [at * unit for at in ticks(most / unit)]
    grid = [
        f'<line class="grid" x1="{_LEFT + at * scale:.1f}" x2="{_LEFT + at * scale:.1f}" '
        f'y1="{_HEAD - 6}" y2="{y}"/><text class="soft" x="{_LEFT + at * scale:.1f}" '
        f'y="{y + 16}" text-anchor="middle">{round_text(bytes_text(at))}</text>'
        for at in axis
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {y + 22}" role="img" aria-label="Memory per device" '
        f'id="memory">{"".join(grid + parts)}</svg>'
    )


def memory_legend(plan: Plan) -> str:
    memory = plan.prediction.memory if plan.prediction else {}
    used = dict.fromkeys(
        part
        for held in memory.values()
        for row in (*held.resident_bytes.values(), *held.transient_bytes.values())
        for part, size in row.items()
        if size
    )
    keys = "".join(
        f'<span><i class="key" style="background:{part_color(part)}"></i>'
        f"{escape(part_text(part))}</span>"
        for part in used
    )
    return f'<div class="legend">{keys}</div>'


def _group(plan: Plan, name: str, held: GroupMemory, y: int, scale: float) -> list[str]:
    number = next((g.num_ranks for g in plan.groups if g.name == name), 1)
    share = held.peak_bytes / held.capacity_bytes if held.capacity_bytes else 0.0
    each = "its device" if number == 1 else f"each of its {number} devices"
    parts = [
        f'<text x="0" y="{y + 18}" font-weight="600">{escape(name)}: {each}, at most '
        f"{bytes_text(held.peak_bytes)} of {bytes_text(held.capacity_bytes)} "
        f"({percent_text(share)})</text>"
    ]
    top = y + _HEAD
    resident = [
        (f"{call_group}: {part_text(part)}, always", part, size)
        for call_group, row in held.resident_bytes.items()
        for part, size in row.items()
    ]
    parts += _row("always", None, resident, top, scale)
    for i, (call, row) in enumerate(held.transient_bytes.items(), start=1):
        added = [(f"{part_text(p)}, while {call} runs", p, size) for p, size in row.items()]
        parts += _row(call, call, resident + added, top + i * _ROW, scale)
    bottom = top + _ROW * (1 + len(held.transient_bytes)) - 4
    at = _LEFT + held.resident_total_bytes * scale
    limit = _LEFT + held.capacity_bytes * scale
    parts.append(
        f'<line class="held" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 2}" y2="{bottom}"/>'
        f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{top - 4}" y2="{bottom + 2}" '
        f'data-capacity-bytes="{held.capacity_bytes}"/>'
    )
    return parts


def _row(
    label: str, call: str | None, pieces: list[tuple[str, str, int]], y: int, scale: float
) -> list[str]:
    total = sum(size for *_, size in pieces)
    parts = [
        f'<text class="soft" x="{_LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
    ]
    x = float(_LEFT)
    for what, part, size in _joined(pieces):
        if not size:
            continue
        tip = f"{what}\n{bytes_text(size)} of {bytes_text(total)}"
        node = "" if call is None else f'data-node="{escape(call)}" '
        parts.append(
            f'<rect {node}data-tip="{attribute(tip)}" data-bytes="{size}" x="{x:.2f}" y="{y}" '
            f'width="{max(size * scale - 1, 0.5):.2f}" height="{_BAR}" rx="2" '
            f'style="fill:{part_color(part)}"/>'
        )
        x += size * scale
    parts.append(
        f'<text class="soft" x="{WIDTH}" y="{y + 13}" text-anchor="end">{bytes_text(total)}</text>'
    )
    return parts


def _joined(pieces: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    sizes: dict[tuple[str, str], int] = {}
    for what, part, size in pieces:
        sizes[what, part] = sizes.get((what, part), 0) + size
    return [(what, part, size) for (what, part), size in sizes.items()]


_NUMBERS = range(1, 7)  # columns of numbers, which are aligned at their end


def _section(graph: Graph, comparison: PlanComparison) -> str:
    head = "".join(_cell("th", i, name) for i, name in enumerate(HEADS))
    rows = "".join(
        f"<tr>{''.join(_cell('td', i, cell) for i, cell in enumerate(cells))}</tr>"
        for cells in rows_of(graph, comparison)
    )
    answer = f'<p class="soft">{escape(comparison.answer)}</p>' if comparison.answer else ""
    return (
        f'<section class="card"><h2>{escape(comparison.title.capitalize())}</h2>{answer}'
        f'<div class="scroll"><table id="{comparison.key}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f"{_timelines(graph, comparison) if comparison.by_call else ''}</section>"
    )


def _cell(tag: str, column: int, text: str) -> str:
    mark = ' class="number"' if column in _NUMBERS else ""
    return f"<{tag}{mark}>{escape(text)}</{tag}>"


def _timelines(graph: Graph, comparison: PlanComparison) -> str:
    played = [
        (one.name, plan, one.simulation or simulate_plan(graph, plan))
        for one, plan, _ in comparison.plans
    ]
    cycles = 2 if any(plan.max_lag for _, plan, _ in played) else 1
    axis_s = cycles * max(simulation.end_s - simulation.start_s for _, _, simulation in played)
    return "".join(
        f'<p style="margin-top:14px"><b>{escape(name)}</b></p><div class="scroll">'
        f"{gantt(graph, plan, simulation, cycles=cycles, axis_s=axis_s, name=f'gantt-{i}')}</div>"
        for i, (name, plan, simulation) in enumerate(played)
    )


_WAITED = {
    "input": "its input",
    "weights": "new weights",
    "devices": "its devices",
    "schedule": "its step",
}


def to_html(
    graph: Graph,
    plan: Plan,
    simulation: Simulation | None = None,
    comparisons: Sequence[PlanComparison] = (),
) -> str:
    """Return the page as well-formed XML that loads nothing and follows the reader's theme."""
    simulation = simulation or simulate_plan(graph, plan)
    found = plan.prediction
    assert found is not None, "simulate_plan refuses a plan without a prediction"
    body = [
        _head(graph, plan, found),
        _tiles(plan, found, simulation),
        _timeline(graph, plan, simulation),
        *(_section(graph, one) for one in comparisons),
        _memory(plan),
        _nodes(graph, plan, found),
        _why(graph, plan, found),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>Plan of {escape(graph.name)}</title><style>{STYLE}</style></head><body><main>"
        f'{"".join(body)}</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _head(graph: Graph, plan: Plan, found: Prediction) -> str:
    lines = [cluster_text(plan.cluster)]
    if found.workload is not None:
        lines.append(workload_text(found.workload))
    lag = plan.max_lag or 0
    lines.append("synchronous" if lag == 0 else f"generation up to {lag} step(s) ahead of training")
    if found.segment_tokens and found.workload is not None:
        lines.append(segments_text(found.workload))
    text = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines)
    return f"<h1>Plan of {escape(graph.name)}</h1>{text}"


def _tiles(plan: Plan, found: Prediction, simulation: Simulation) -> str:
    tiles = [(seconds_text(found.step_time_s), "per step")]
    if found.tokens_per_s is not None:
        tiles.append((f"{found.tokens_per_s:,.0f}", "tokens per second"))
    if found.gap < 5e-5:
        tiles.append(("best", "proved: no plan is faster"))
    elif not found.lower_bound_s:
        tiles.append(("?", "could be gained; the search had too little time to prove anything"))
    else:
        bound = seconds_text(found.lower_bound_s)
        tiles.append((percent_text(found.gap), f"could be gained at most; no plan beats {bound}"))
    total = sum(group.num_ranks for group in plan.groups)
    idle = sum(simulation.idle_share.get(g.name, 1.0) * g.num_ranks for g in plan.groups) / total
    tiles.append((percent_text(idle), f"of device time idle, {total} devices"))
    if (held := found.fullest) is not None:
        share = percent_text(held.peak_bytes / held.capacity_bytes)
        tiles.append((share, "of memory used on the fullest device"))
    tiles.append((hours_text(plan.device_hours), cost_text(plan)))
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
    )
    return f'<div class="tiles">{shown}</div>'


def _timeline(graph: Graph, plan: Plan, simulation: Simulation) -> str:
    colors = role_colors(graph)
    used = {graph[span.node].role for span in simulation.window()}
    keys = "".join(
        f'<span><i class="key" style="background:{color}"></i>{escape(role)}</span>'
        for role, color in colors.items()
        if role in used
    )
    path = "<i>then</i>".join(
        f'<span style="background:{colors[graph[i.node].role or ""]}" data-node="{escape(i.node)}" '
        f'data-tip="{escape(f"waited for {_WAITED[i.waited_for]}")}">'
        f"{escape(i.node)} {seconds_text(i.seconds)}</span>"
        for i in simulation.critical_path
    )
    over = simulation.critical_steps
    steps = "A step waits for" if over == 1 else f"{over} steps wait for"
    return (
        '<section class="card"><h2>Devices over time</h2><p class="soft">A lane is a group of '
        "devices, as high as it has many; a bar is a call of a model on all of them. Outlined "
        f'calls decide how long a step takes.</p><div class="legend">{keys}</div>'
        f'<div class="scroll">{gantt(graph, plan, simulation)}</div>'
        f'<div class="path"><i>{steps}</i>{path}</div></section>'
    )


def _memory(plan: Plan) -> str:
    bars = memory_bars(plan)
    if not bars:
        return ""
    return (
        '<section class="card"><h2>Memory of a device</h2><p class="soft">What is always held, and '
        "what each call adds while it runs; calls of a group never run at once. The red line is "
        f'all that roles may use.</p>{memory_legend(plan)}<div class="scroll">{bars}</div>'
        "</section>"
    )


def _nodes(graph: Graph, plan: Plan, found: Prediction) -> str:
    colors = role_colors(graph)
    rows: list[str] = []
    for node in graph.nodes:
        if node.name not in found.nodes:
            continue
        call = found.nodes[node.name]
        parts = sorted(call.parts_s.items(), key=lambda item: -item[1])
        text = ", ".join(f"{part_text(p)} {seconds_text(s)}" for p, s in parts if s > 0)
        layout = plan.layouts.get(node.name)
        rows.append(
            f'<tr data-node="{escape(node.name)}"><td><i class="key" '
            f'style="background:{colors[node.role or ""]}"></i>{escape(node.name)}</td>'
            f"<td>{escape(plan.group_of(node))}</td>"
            f"<td>{escape(found.models.get(node.role or '', ''))}</td>"
            f"<td><code>{escape('' if layout is None else str(layout))}</code></td>"
            f'<td class="number">{seconds_text(call.duration_s)}</td>'
            f'<td class="soft">{escape(text)}</td></tr>'
        )
    return (
        '<section class="card"><h2>Calls</h2><div class="scroll"><table id="nodes"><thead><tr>'
        "<th>node</th><th>group</th><th>model</th><th>layout</th>"
        '<th class="number">time</th><th>of which</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _why(graph: Graph, plan: Plan, found: Prediction) -> str:
    rows = [("This plan", placement_text(graph, plan), seconds_text(found.step_time_s), "")]
    if found.runner_up is not None:
        lost = found.runner_up
        rows.append(("Runner-up", lost.description, _against(lost.step_time_s, found), lost.why))
    for other in found.other_schedules:
        said = schedule_text(other.max_lag, other.segment_tokens)
        rows.append(("Other schedule", said, _against(other.step_time_s, found), ""))
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    stopped = " It was stopped at its deadline." if found.stopped_at_deadline else ""
    return (
        '<section class="card"><h2>Why this plan</h2>'
        f'<table id="why"><tbody>{body}</tbody></table><p class="soft" style="margin-top:10px">'
        f"The search took {seconds_text(found.search_time_s)}.{stopped} Times come from a model "
        f"with these constants: {escape(found.calibration)}.</p></section>"
    )


def _against(other_s: float | None, found: Prediction) -> str:
    if other_s is None:
        return "no plan fits"
    return f"{seconds_text(other_s)} ({other_s / found.step_time_s:.2f} x)"
