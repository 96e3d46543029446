"""The memory of a plan as SVG: what a device of each group holds at rest and during every call."""

from __future__ import annotations

from html import escape

from ..formatting import bytes_text, part_text, percent_text
from ..plan.plan import Plan
from ..plan.prediction import GroupMemory
from .gantt import WIDTH, attribute, round_text, ticks
from .style import PART_COLORS

_LEFT, _RIGHT, _ROW, _BAR, _HEAD = 190, 80, 26, 18, 30
_PLOT = WIDTH - _LEFT - _RIGHT


def part_color(part: str) -> str:
    """CSS color of a part of memory."""
    return f"var(--{part if part in PART_COLORS else 'other'})"


def memory_bars(plan: Plan) -> str:
    """Stacked bars against each group's capacity; nothing if the plan predicts no memory.

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
    """A key for each part that some device holds."""
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
    """The pieces as they are; equal descriptions are added up."""
    sizes: dict[tuple[str, str], int] = {}
    for what, part, size in pieces:
        sizes[what, part] = sizes.get((what, part), 0) + size
    return [(what, part, size) for (what, part), size in sizes.items()]
