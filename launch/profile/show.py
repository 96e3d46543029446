"""A calibration as text, for the end of `penstock profile`."""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.cost.calibration import Calibration
from ...planner.formatting import aligned, bytes_text, percent_text, seconds_text
from ...planner.inputs.cluster import LinkSpec, NodeGroup

# of the constants that are found for each dtype
_NAMES = (
    "matmul efficiency by width",
    "attention efficiency",
    "memory efficiency",
    "of what products read",
    "launches of a layer",
    "a backward pass",
    "an optimizer step besides",
)

_MOST_ERROR = 0.2  # mean error over the calls above which a measurement should be repeated


def calibration_text(calibration: Calibration) -> str:
    parts = [
        calibration.machine,
        _table(_device_rows(calibration)),
        _table(_constant_rows(calibration)),
        _table(_common_rows(calibration)),
        _table(_call_rows(calibration), right=(1, 3, 4, 5)),
        f"mean error over the calls: {percent_text(calibration.error)}",
        *(f"note: {note}" for note in calibration.notes),
        *_warning(calibration),
    ]
    return "\n\n".join(parts)


def _warning(calibration: Calibration) -> list[str]:
    if calibration.error <= _MOST_ERROR:
        return []
    return [
        f"warning: the calls are predicted with a mean error above {percent_text(_MOST_ERROR)}, so "
        "plans will be as far off; the machine may have been busy: measure again while it does "
        "nothing else"
    ]


def _device_rows(calibration: Calibration) -> list[list[str]]:
    cluster = calibration.cluster
    several = sum(node.num_nodes for node in cluster.node_groups) > 1
    rows: list[list[str]] = []
    for node in cluster.node_groups:
        rows += [["nodes", str(node.num_nodes)]] if several else []
        rows += _node_rows(node)
    return rows + (_link_rows("link between nodes", cluster.between) if several else [])


def _node_rows(node: NodeGroup) -> list[list[str]]:
    device = node.device
    return [
        ["devices", str(node.num_devices)],
        ["memory of each", bytes_text(device.memory_bytes)],
        ["held before any model", bytes_text(device.reserved_bytes)],
        *([f"{name} products", _rate(rate, "FLOP")] for name, rate in device.flops_per_s.items()),
        ["memory bandwidth", _rate(device.memory_bytes_per_s, "B")],
        ["to host memory", _rate(device.host_bytes_per_s, "B")],
        *_link_rows("link", node.within),
    ]


def _link_rows(name: str, link: LinkSpec) -> list[list[str]]:
    return [
        [name, _rate(link.bytes_per_s, "B")],
        [f"latency of the {name}", seconds_text(link.latency_s)],
    ]


def _constant_rows(calibration: Calibration) -> list[list[str]]:
    rows = [[""], *([name] for name in _NAMES)]
    for dtype, models in calibration.dtypes.items():
        by_width = models.matmul_efficiency.items()
        found = models.constants
        column = [
            dtype,
            ", ".join(f"{share:.0%} at {width}" for width, share in by_width),
            percent_text(found.attention_efficiency or found.matmul_efficiency),
            percent_text(found.memory_efficiency),
            percent_text(found.read_efficiency or found.memory_efficiency),
            seconds_text(found.launch_s),
            f"{found.backward:.2g} forward passes",
            seconds_text(found.update_s),
        ]
        for row, value in zip(rows, column, strict=True):
            row.append(value)
    return rows


def _common_rows(calibration: Calibration) -> list[list[str]]:
    common = calibration.constants
    return [
        ["network efficiency", percent_text(common.network_efficiency)],
        ["software's share of a hop", seconds_text(common.hop_s)],
        [f"a call ({calibration.executor.replace('_', ' ')})", seconds_text(common.call_s)],
    ]


def _call_rows(calibration: Calibration) -> list[list[str]]:
    rows = [["dtype", "width", "call", "measured", "predicted", "error"]]
    for call in calibration.calls:
        measured, predicted = seconds_text(call.measured_s), seconds_text(call.predicted_s)
        rows.append(
            [call.dtype, str(call.width), call.name, measured, predicted, f"{call.error:+.0%}"]
        )
    return rows


def _rate(rate: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}{unit}/s"
    return f"{rate:.3g} {unit}/s"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    return "\n".join(aligned(rows, right))
