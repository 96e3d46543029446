"""What the tests of trackers log, and how they compare it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.launch.run_dir.samples import Sample
from penstock.launch.run_dir.trackers import RunInfo

ODD = [0.1, 1 / 3, 1e-310, 1.7976931348623157e308, -0.0, 123456789.123456789, 5e-324]
"""Numbers that a decimal of few digits, or a float of 32 bits, does not hold."""

SUMMARY: Mapping[str, Any] = {
    "accuracy": 0.1,
    "suites": {"": {"change": 0.25}},
    "examples": [1],
    "weights_sha256": "ab12",
    "ended": True,
    "no": None,
}

SAMPLES = [
    Sample(2, 1, "1+1=", "<b>2</b>", 3, True, 1.0, 0.5, 7, parts={"rule.score": 1.0}),
    Sample(2, 1, "2+2=", "5,\n'no'", 4, False, None),
]


def info(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *,
    name: str = "20261121-031454-grpo-seed0",
    resumed: bool = False,
) -> RunInfo:
    folders = {"sft": folder / "stages" / "sft", "grpo": folder}
    return RunInfo(name, folders, config or {}, resumed)


def odd_rows(num_steps: int) -> list[dict[str, float]]:
    """Of each step, with other numbers in each."""
    return [
        {f"actor.train#2/m{i}": value * (step + 1) for i, value in enumerate(ODD)}
        for step in range(num_steps)
    ]


def bits(row: Mapping[str, float]) -> dict[str, bytes]:
    """Floats as their bytes: 0.0 is not -0.0."""
    return {name: struct.pack("<d", value) for name, value in row.items()}
