"""Numbers, devices and tables as people read them; shared by everything that shows a plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..dataflow.graph.graph import Graph, NodeKind
from .inputs.cluster import ClusterSpec
from .inputs.workload import Lengths, Workload
from .plan.plan import Plan

__all__ = [
    "aligned",
    "bytes_text",
    "bytes_unit",
    "cluster_text",
    "lengths_text",
    "part_text",
    "percent_text",
    "placement_text",
    "ranges_text",
    "seconds_text",
    "units_by_group",
    "workload_text",
]


def seconds_text(seconds: float) -> str:
    """Three digits with a unit: "12.3 s", "450 ms", "1,234 s"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        # Whatever rounds to 1000 of a unit is written in the next one.
        if seconds >= 0.9995 * factor:
            return f"{_digits(seconds / factor)} {unit}"
    return "0 s"


def bytes_unit(size: float) -> tuple[str, int]:
    """The unit in which a size is written, and its bytes."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return unit, factor
    return "B", 1


def bytes_text(size: float, *, like: float | None = None, unit: bool = True) -> str:
    """Bytes in powers of 1024: "61.5 GiB", "410 MiB".

    Args:
        size: The bytes.
        like: Use the unit of this size instead.
        unit: Whether the unit is written.
    """
    name, factor = bytes_unit(size if like is None else like)
    number = f"{size:.0f}" if factor == 1 else _digits(size / factor)
    if 0 < size < 0.005 * factor:
        number = "<0.01"
    return f"{number} {name}" if unit else number


def percent_text(share: float) -> str:
    """A share of 1: "3.2 %", "57 %"."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.95 or percent < 0.05 else f"{percent:.1f} %"


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def ranges_text(devices: Sequence[int]) -> str:
    """Device ids, neighbors together: "0-7, 16, 24-31"."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def part_text(part: str) -> str:
    """A part of a time or a size: "kv cache"."""
    return part.replace("_", " ")


def lengths_text(lengths: Lengths) -> str:
    """A constant ("1,024 tokens"), or the range and the mean of a histogram."""
    if len(lengths.tokens) == 1:
        return f"{lengths.longest:,} tokens"
    return f"{lengths.tokens[0]:,} to {lengths.longest:,} tokens (mean {lengths.mean:,.0f})"


def workload_text(workload: Workload) -> str:
    """Rows and tokens of a step in one line."""
    samples = workload.samples_per_prompt
    rows = f"{workload.num_prompts:,} prompts"
    rows += "" if samples is None else f" x {samples} response{'s' if samples > 1 else ''}"
    prompt, response = lengths_text(workload.prompt), lengths_text(workload.response)
    text = f"{rows}; prompt {prompt}, response {response}"
    return text + (f", {workload.updates_per_train} updates" if workload.updates_per_train else "")


def cluster_text(cluster: ClusterSpec | str) -> str:
    """Its nodes and devices: "h100: 16 nodes x 8 h100 = 128 devices"."""
    if isinstance(cluster, str):
        return cluster or "some cluster"
    groups = " + ".join(
        f"{g.num_nodes} node{'s' if g.num_nodes > 1 else ''} x {g.devices_per_node} {g.device.name}"
        for g in cluster.node_groups
    )
    return f"{cluster.name}: {groups} = {cluster.num_devices} devices"


def units_by_group(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """Group -> what runs there: roles, or single calls of roles that are spread over groups."""
    calls = [node for node in graph.nodes if node.role and node.kind is not NodeKind.SOURCE]
    units: dict[str, list[str]] = {group.name: [] for group in plan.groups}
    for role in graph.roles:
        mine = [node for node in calls if node.role == role]
        homes = dict.fromkeys(plan.group_of(node) for node in mine)
        if len(homes) == 1:
            units[next(iter(homes))].append(role)
        else:
            for node in mine:
                units[plan.group_of(node)].append(node.name)
    return units


def placement_text(graph: Graph, plan: Plan) -> str:
    """Who shares how many devices: "{actor, ref} on 64, {critic, reward} on 64"."""
    units = units_by_group(graph, plan)
    return ", ".join(
        f"{{{', '.join(units[group.name])}}} on {len(group.devices) or group.num_ranks}"
        for group in plan.groups
        if units[group.name]
    )


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with columns under each other; those in `right` end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
