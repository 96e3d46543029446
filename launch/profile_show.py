"""A calibration as text, for the end of `penstock profile`."""

from __future__ import annotations

from collections.abc import Sequence

from ..planner.calibration import Calibration
from ..planner.wording import bytes_text

__all__ = ["calibration_text"]


def calibration_text(calibration: Calibration) -> str:
    """What was measured, what follows from it, and how well that predicts the calls."""
    parts = [
        calibration.machine,
        _aligned([["device", ""], *_device_rows(calibration)]),
        _aligned([["constant", ""], *_constant_rows(calibration)]),
        _aligned([["width", "call", "measured", "predicted", "error"], *_call_rows(calibration)]),
        f"mean error over the calls: {calibration.error:.0%}",
        *(f"note: {note}" for note in calibration.notes),
    ]
    return "\n\n".join(parts)


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
        ["memory efficiency", f"{found.memory_efficiency:.0%}"],
        ["network efficiency", f"{found.network_efficiency:.0%}"],
        ["launches of a layer", seconds_text(found.launch_s)],
        ["software's share of a hop", seconds_text(found.hop_s)],
        [f"a call ({calibration.executor.replace('_', ' ')})", seconds_text(found.call_s)],
    ]


def _call_rows(calibration: Calibration) -> list[list[str]]:
    return [
        [
            str(call.width),
            call.name,
            seconds_text(call.measured_s),
            seconds_text(call.predicted_s),
            f"{call.error:+.0%}",
        ]
        for call in calibration.calls
    ]


def seconds_text(seconds: float) -> str:
    """Seconds for people: "1.25 s", "12.3 ms", "85 us"."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def _rate(rate: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}{unit}/s"
    return f"{rate:.3g} {unit}/s"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
