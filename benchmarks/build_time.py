"""How long recording the PPO graph and importing `penstock.dataflow` take in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from bench import parser, report, spread, table

BUILD = """
import time
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.dataflow.graph.tracer import build
start = time.perf_counter()
build(ppo_step, cfg=PPO())
print(time.perf_counter() - start)
"""
IMPORT = """
import sys, time
start = time.perf_counter()
import penstock.dataflow.engine, penstock.dataflow.record
print(time.perf_counter() - start)
assert "ray" not in sys.modules
"""


def seconds(program: str) -> float:
    """What a program run by a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)


def main() -> None:
    """Measure and print both."""
    options = parser(__doc__ or "")
    options.add_argument("--repeats", type=int, default=9)
    args = options.parse_args()
    result: dict[str, Any] = {}
    for name, program in {"build_ppo_s": BUILD, "import_dataflow_s": IMPORT}.items():
        result[name] = spread([seconds(program) for _ in range(args.repeats)])
    rows = [[name, f"{v['median'] * 1e3:.1f} ms"] for name, v in result.items()]
    print(table(["what", "median"], rows))
    report(result, args.json)


if __name__ == "__main__":
    main()
