"""Does the torch engine need as much memory as the planner says?

    python benchmarks/planner_memory.py --json benchmarks/results/planner_memory_cpu_2026-11-21.json

Every case runs in processes of its own; `planner_memory_case.py` says what is measured and why. The
target is a prediction within 10 % of the measured peak in every case.

On the CPU the growth of resident pages is measured too, twice: with the C library told to give
freed blocks back, which checks the account of tensors by another witness, and by default, where
glibc keeps freed blocks of up to 32 MB and what a process occupies can be half as much again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import parser, report, table
from planner_memory_case import CASES

TARGET = 0.1
SCRIPT = Path(__file__).with_name("planner_memory_case.py")
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""Has the C library give every large block back to the system as soon as it is freed."""


def measured(name: str, *options: str, environment: Mapping[str, str] | None = None) -> Any:
    """One case's figures, from a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(SCRIPT), "--case", name, "--json", str(file), *options]
        variables = os.environ | dict(environment or {})
        subprocess.run(command, check=True, timeout=600, capture_output=True, env=variables)
        return json.loads(file.read_text())


def figures_of(name: str) -> dict[str, Any]:
    """Predicted and measured bytes of a case."""
    figures: dict[str, Any] = measured(name)
    figures["error"] = figures["predicted_bytes"] / figures["measured_bytes"] - 1
    if figures["device"] == "cpu":
        returned = measured(name, "--rss", environment=RETURNED)
        figures["rss_growth_bytes"] = returned["rss_growth_bytes"]
        figures["rss_growth_default_bytes"] = measured(name, "--rss")["rss_growth_bytes"]
    return figures


def main() -> None:
    """Run all cases, print the table, write the result."""
    arguments = parser("Measured against predicted peak memory of the torch engine.")
    arguments.add_argument("--only", choices=list(CASES), action="append", help="these cases only")
    options = arguments.parse_args()
    names = options.only or [name for name in CASES if not name.startswith("small")]
    cases = {name: figures_of(name) for name in names}
    head = ["case", "measured MB", "predicted MB", "error", "pages MB", "pages by default MB"]
    keys = ("measured_bytes", "predicted_bytes", "rss_growth_bytes", "rss_growth_default_bytes")
    rows: list[list[str]] = []
    for name, figures in cases.items():
        sizes = [f"{figures[key] / 1e6:.1f}" if key in figures else "-" for key in keys]
        rows.append([name, *sizes[:2], f"{figures['error']:+.1%}", *sizes[2:]])
    print(table(head, rows))
    worst = max(abs(figures["error"]) for figures in cases.values())
    print(
        f"largest error {worst:.1%}; target {TARGET:.0%}: {'met' if worst <= TARGET else 'missed'}"
    )
    report({"target": TARGET, "max_abs_error": worst, "cases": cases}, options.json)
    if worst > TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
