"""A calibration as text, for the end of `penstock profile`."""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.cost.calibration import Calibration
from ...planner.formatting import aligned, bytes_text, percent_text, seconds_text

__all__ = ["calibration_text"]

_MOST_ERROR = 0.2
"""Mean error over the calls above which a measurement should be repeated."""


def calibration_text(calibration: Calibration) -> str:
    """What was measured, what follows from it, and how well that predicts the calls."""
    parts = [
        calibration.machine,
        _table(_device_rows(calibration)),
        _table(_constant_rows(calibration)),
        _table(_call_rows(calibration), right=(0, 2, 3, 4)),
        f"mean error over the calls: {percent_text(calibration.error)}",
        *(f"note: {note}" for note in calibration.notes),
        *_warning(calibration),
    ]
    return "\n\n".join(parts)


def _warning(calibration: Calibration) -> list[str]:
    """Calls that are predicted badly were mostly measured while something else was running."""
    if calibration.error <= _MOST_ERROR:
        return []
    return [
        f"warning: the calls are predicted with a mean error above {percent_text(_MOST_ERROR)}, so "
        "plans will be as far off; the machine may have been busy: measure again while it does "
        "nothing else"
    ]


def _device_rows(calibration: Calibration) -> list[list[str]]:
    node = calibration.cluster.node_groups[0]
    device = node.device
    return [
        ["devices", str(node.num_devices)],
        ["memory of each", bytes_text(device.memory_bytes)],
        ["held before any model", bytes_text(device.reserved_bytes)],
        *([f"{name} products", _rate(rate, "FLOP")] for name, rate in device.flops_per_s.items()),
        ["memory bandwidth", _rate(device.memory_bytes_per_s, "B")],
        ["to host memory", _rate(device.host_bytes_per_s, "B")],
        ["link", _rate(node.within.bytes_per_s, "B")],
        ["link latency", seconds_text(node.within.latency_s)],
    ]


def _constant_rows(calibration: Calibration) -> list[list[str]]:
    found = calibration.constants
    by_width = ", ".join(
        f"{efficiency:.0%} at {width}"
        for width, efficiency in calibration.matmul_efficiency.items()
    )
    return [
        ["matmul efficiency by width", by_width],
        ["memory efficiency", percent_text(found.memory_efficiency)],
        ["network efficiency", percent_text(found.network_efficiency)],
        ["launches of a layer", seconds_text(found.launch_s)],
        ["software's share of a hop", seconds_text(found.hop_s)],
        [f"a call ({calibration.executor.replace('_', ' ')})", seconds_text(found.call_s)],
    ]


def _call_rows(calibration: Calibration) -> list[list[str]]:
    rows = [["width", "call", "measured", "predicted", "error"]]
    for call in calibration.calls:
        measured, predicted = seconds_text(call.measured_s), seconds_text(call.predicted_s)
        rows.append([str(call.width), call.name, measured, predicted, f"{call.error:+.0%}"])
    return rows


def _rate(rate: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}{unit}/s"
    return f"{rate:.3g} {unit}/s"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    return "\n".join(aligned(rows, right))
