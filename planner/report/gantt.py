"""The devices of a plan over time, as SVG: a lane per group, a bar per call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.messages import TaskSpan
from ..formatting import part_text, percent_text, ranges_text, seconds_text
from ..inputs.cluster import ClusterSpec
from ..plan.plan import GroupPlan, Plan
from ..plan.simulate import Simulation
from .plan_texts import roles_by_group

NUM_COLORS = 8  # colors of roles, `--c0` and so on; more roles begin again

# parts of memory with a color of their own, `--weights` and so on; others are gray
PART_COLORS = (
    "weights", "gradients", "optimizer", "activations", "logits", "kv_cache", "transfer",
)  # fmt: skip

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1a1f27; --soft: #5b6573; --line: #dfe3e9;
  --lane: #eef1f5; --on: #ffffff; --limit: #c8323e; --good: #1f7a45;
  --c0: #2f6fd6; --c1: #b85c00; --c2: #1f7a45; --c3: #7a4fc9;
  --c4: #c8323e; --c5: #0f7d8a; --c6: #b83c7d; --c7: #855a33;
  --weights: #3d5a80; --gradients: #6b8db5; --optimizer: #9db4cf; --activations: #e08e45;
  --logits: #c0503a; --kv_cache: #5f9150; --transfer: #b09a2f; --other: #8b8f96;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151a; --card: #1a1f27; --text: #e8ebf0; --soft: #9aa5b4; --line: #2d343f;
    --lane: #232a34; --on: #10141a; --limit: #ff8a8f; --good: #7fd6a2;
    --c0: #82b1ff; --c1: #ffb066; --c2: #7fd6a2; --c3: #c3a6ff;
    --c4: #ff9a9f; --c5: #6fd3de; --c6: #f3a0cc; --c7: #d9b38c;
    --weights: #7e9cc4; --gradients: #5b7699; --optimizer: #42566f; --activations: #e9a466;
    --logits: #d9705b; --kv_cache: #86b877; --transfer: #cbb85a; --other: #8b8f96;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 28px 20px 60px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 1200px; margin: 0 auto; }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0; }
.soft { color: var(--soft); }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin-top: 16px;
}
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin-top: 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650; }
.tile span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; margin-top: 10px; }
svg { display: block; min-width: 900px; width: 100%; height: auto; }
svg text { fill: var(--text); font-size: 13px; }
svg text.soft { fill: var(--soft); font-size: 12px; }
svg text.name { font-weight: 600; }
svg text.on { fill: var(--on); font-weight: 600; pointer-events: none; }
svg text.thin { font-weight: 400; font-size: 12px; }
.lane { fill: var(--lane); }
.grid { stroke: var(--line); stroke-width: 1; }
.edge { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 4; }
.limit { stroke: var(--limit); stroke-width: 2; }
.held { stroke: var(--text); stroke-width: 1; opacity: .55; }
.critical { stroke: var(--text); stroke-width: 2; }
[data-tip] { outline: none; }
.dim [data-node]:not(.hot) { opacity: .25; }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 6px 18px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
#nodes td:not(:last-child), #why td:first-child, #why td:nth-child(3) { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 8px; font-size: 13px;
  color: var(--soft); }
.path { display: flex; flex-wrap: wrap; gap: 6px; margin-top: 10px; align-items: center; }
.path span { border-radius: 6px; padding: 3px 9px; color: var(--on); font-size: 13px;
  font-weight: 600; }
.path i { color: var(--soft); font-style: normal; font-size: 13px; }
#tip {
  position: fixed; z-index: 9; display: none; max-width: 340px; padding: 9px 12px;
  white-space: pre-line; pointer-events: none; background: var(--text); color: var(--page);
  border-radius: 8px; font-size: 13px; line-height: 1.45;
}
"""

SCRIPT = """
const tip = document.getElementById("tip");
function mark(node, on) {
  document.body.classList.toggle("dim", on ? node !== null : false);
  for (const one of document.querySelectorAll("[data-node]"))
    one.classList.toggle("hot", on ? one.dataset.node === node : false);
}
function show(one, x, y) {
  tip.textContent = one.dataset.tip;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(8, Math.min(y + 16, innerHeight - box.height - 8)) + "px";
}
function hide() { tip.style.display = "none"; mark(null, false); }
for (const one of document.querySelectorAll("[data-tip]")) {
  const node = one.dataset.node ?? null;
  one.addEventListener("pointerenter", () => mark(node, true));
  one.addEventListener("pointermove", at => show(one, at.clientX, at.clientY));
  one.addEventListener("pointerleave", hide);
  one.addEventListener("focus", () => {
    const box = one.getBoundingClientRect();
    mark(node, true);
    show(one, box.left, box.bottom);
  });
  one.addEventListener("blur", hide);
}
"""


WIDTH = 1160
_LEFT, _RIGHT, _TOP, _GAP = 190, 80, 30, 12
_PLOT = WIDTH - _LEFT - _RIGHT
_LABEL = 25  # characters left of a lane
_CHARACTER = 7.4  # pixels of a character of a bar's label, more or less


def role_colors(graph: Graph) -> dict[str, str]:
    return {role: f"var(--c{i % NUM_COLORS})" for i, role in enumerate(graph.roles)}


def ticks(most: float) -> list[float]:
    """Round numbers from 0 up to `most`, about eight of them."""
    if most <= 0:
        return [0.0]
    rough = most / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def attribute(text: str) -> str:
    """Text as an attribute's value; lines stay lines for readers of HTML and XML alike."""
    return escape(text).replace("\n", "&#10;")


def round_text(text: str) -> str:
    number, blank, unit = text.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + blank + unit


def gantt(
    graph: Graph,
    plan: Plan,
    simulation: Simulation,
    *,
    cycles: int | None = None,
    axis_s: float | None = None,
    name: str = "gantt",
) -> str:
    """Lanes as high as their groups have devices, bars as wide as calls take.

    Every bar carries its seconds from the left edge as `data-start-s` and `data-end-s`, and what
    it stands for as `data-tip`.
    """
    length_s = (simulation.end_s - simulation.start_s) * (cycles or (2 if plan.max_lag else 1))
    axis_s = axis_s or length_s
    from_s = simulation.end_s - length_s
    parts: list[str] = []
    y = _TOP
    roles = roles_by_group(graph, plan)
    most = max(group.num_ranks for group in plan.groups)
    heights = {g.name: round(max(46.0, 120.0 * g.num_ranks / most)) for g in plan.groups}
    bottom = _TOP + sum(heights.values()) + _GAP * (len(heights) - 1)
    parts += [_tick(at_s, axis_s, bottom) for at_s in ticks(axis_s)]
    for group in plan.groups:
        height = heights[group.name]
        parts += _lane(plan, group, roles[group.name], simulation, y, height)
        for span in simulation.spans:
            if (
                span.group == group.name
                and span.end_s > from_s
                and span.start_s < from_s + length_s
            ):
                window = (from_s, length_s, axis_s)
                parts.append(_bar(graph, plan, simulation, span, window, y, height))
        y += height + _GAP
    for end_s in simulation.completed_s:
        at_s = end_s - from_s
        if 1e-9 * axis_s < at_s <= length_s * (1 + 1e-9) and at_s < axis_s * (1 - 1e-9):
            x = _x(at_s / axis_s)
            parts.append(
                f'<line class="edge" x1="{x}" x2="{x}" y1="{_TOP - 14}" y2="{bottom + 6}"/>'
                f'<text class="soft" x="{x}" y="{_TOP - 18}" text-anchor="middle">a step ends'
                "</text>"
            )
    return (
        f'<svg viewBox="0 0 {WIDTH} {bottom + 28}" role="img" '
        f'aria-label="Devices over time" id="{name}">{"".join(parts)}</svg>'
    )


def _x(share: float) -> float:
    return round(_LEFT + _PLOT * share, 2)


def _tick(at_s: float, length_s: float, bottom: int) -> str:
    x = _x(at_s / length_s)
    return (
        f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{bottom + 6}"/>'
        f'<text class="soft" x="{x}" y="{bottom + 22}" text-anchor="middle">'
        f"{round_text(seconds_text(at_s))}</text>"
    )


def _lane(
    plan: Plan, group: GroupPlan, roles: list[str], simulation: Simulation, y: int, height: int
) -> list[str]:
    devices = ranges_text(group.devices) or f"{group.num_ranks} {group.device}"
    idle = percent_text(simulation.idle_share.get(group.name, 1.0))
    middle = y + height / 2
    labels = [group.name, devices, ", ".join(roles)]
    if height < 60:
        labels = [f"{group.name}: {devices}", ", ".join(roles)]
    top = middle - 8 * (len(labels) - 1) + 4
    parts = [
        f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_PLOT}" height="{height}" rx="4"/>',
        *(
            f'<text class="{"soft" if i else "name"}" x="0" y="{top + 16 * i:.0f}">'
            f"{escape(_short(label))}</text>"
            for i, label in enumerate(labels)
        ),
        f'<text class="soft" x="{WIDTH}" y="{middle - 4}" text-anchor="end">{idle}</text>',
        f'<text class="soft" x="{WIDTH}" y="{middle + 12}" text-anchor="end">idle</text>',
    ]
    return parts + [
        f'<line class="grid" x1="{_LEFT}" x2="{_x(1.0)}" y1="{at:.1f}" y2="{at:.1f}"/>'
        for at in _node_edges(plan, group, y, height)
    ]


def _node_edges(plan: Plan, group: GroupPlan, y: int, height: int) -> list[float]:
    if not isinstance(plan.cluster, ClusterSpec) or not group.devices:
        return []
    nodes = [plan.cluster.node_of(device) for device in group.devices]
    edges = [i for i in range(1, len(nodes)) if nodes[i] != nodes[i - 1]]
    if height / (len(edges) + 1) < 6:
        return []
    return [y + height * i / len(nodes) for i in edges]


def _short(text: str) -> str:
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…"


def _bar(
    graph: Graph,
    plan: Plan,
    simulation: Simulation,
    span: TaskSpan,
    window: tuple[float, float, float],
    y: int,
    height: int,
) -> str:
    from_s, length_s, axis_s = window
    start_s = max(span.start_s, from_s) - from_s
    end_s = min(span.end_s, from_s + length_s) - from_s
    if end_s - start_s <= 1e-9 * length_s:
        return ""
    x, right = _x(start_s / axis_s), _x(end_s / axis_s)
    width = round(max(1.0, right - x - 1), 2)
    color = role_colors(graph)[graph[span.node].role or ""]
    on_path = any(item.node == span.node for item in simulation.critical_path)
    label = _label(span.node, width)
    whole = seconds_text(span.end_s - span.start_s) if label and height >= 60 else ""
    middle = y + height / 2 + (-4 if whole else 4)
    text = "".join(
        f'<text class="{style}" x="{x + width / 2:.1f}" y="{at:.1f}" text-anchor="middle">'
        f"{escape(line)}</text>"
        for style, at, line in (("on", middle, label), ("on thin", middle + 18, whole))
        if line
    )
    tip = _tip(plan, span, on_path)
    return (
        f'<g data-node="{escape(span.node)}" data-tip="{attribute(tip)}" '
        f'data-start-s="{start_s:.6g}" data-end-s="{end_s:.6g}" tabindex="0" role="img" '
        f'aria-label="{attribute(tip)}">'
        f"<rect {'class=' + chr(34) + 'critical' + chr(34) + ' ' if on_path else ''}"
        f'x="{x}" y="{y + 4}" width="{width}" height="{height - 8}" rx="4" '
        f'style="fill:{color}"/>{text}</g>'
    )


def _label(node: str, width: float) -> str:
    for text in (node, node.partition(".")[2] or node):
        if len(text) * _CHARACTER + 8 <= width:
            return text
    return ""


def _tip(plan: Plan, span: TaskSpan, on_path: bool) -> str:
    lines = [f"{span.node}, step {span.step}"]
    found = plan.prediction.nodes.get(span.node) if plan.prediction else None
    seconds = found.duration_s if found else span.end_s - span.start_s
    lines.append(seconds_text(seconds) + (" (on the critical path)" if on_path else ""))
    if span.node in plan.layouts:
        lines.append(f"layout {plan.layouts[span.node]}")
    parts: Mapping[str, float] = found.parts_s if found else {}
    lines += [
        f"{part_text(name)} {seconds_text(part_s)}" for name, part_s in parts.items() if part_s
    ]
    reads = [f"{role} version {version}" for role, version in span.versions]
    return "\n".join(lines + ([f"reads {', '.join(reads)}"] if reads else []))
