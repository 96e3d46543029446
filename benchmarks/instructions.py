"""`make smollm2` over seeds, with all weights and with adapters: what is gained, and at what cost.

Runs `penstock run experiment=smollm2 seed=S` and the same with `ADAPTERS`, one after another,
unless `--runs` holds such a run already. Accuracy is greedy, on held-out prompts with kinds of
instruction that were trained on (`seen_kinds`) and others (`unseen_kinds`). Changes are paired by
problem; all seeds together count a problem once, with the mean of its changes, and 1.96 standard
errors over problems. The time is that of the whole command, and the memory the peak of the process.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from bench import parser, report, table
from learning import rewards, smoothed

ADAPTERS = ("model.lora.rank=16", "algorithm.optimizer.lr=2e-4", "algorithm.num_steps=28")
KINDS = {"weights": (), "adapters": ADAPTERS}
SUITES = ("seen_kinds", "unseen_kinds")


def run_of(folder: Path, kind: str, seed: int) -> Path:
    """The folder of one run, which is made if it is not there."""
    runs = folder / kind
    if not list(runs.glob(f"*-seed{seed}/summary.json")):
        words = ["experiment=smollm2", f"seed={seed}", f"runs={runs}", *KINDS[kind]]
        began = time.perf_counter()
        entry = [sys.executable, "-m", "penstock.launch.main", "run", *words]
        subprocess.run(entry, check=True, timeout=3600)
        (file,) = runs.glob(f"*-seed{seed}/summary.json")
        (file.parent / "command_time_s").write_text(str(time.perf_counter() - began))
    (file,) = runs.glob(f"*-seed{seed}/summary.json")
    return file.parent


def changes(run: Path, suite: str) -> dict[str, float]:
    """Problem -> right after training less right before, -1 to 1."""
    before, after = (
        json.loads(file.read_text())["suites"][suite]["correct"]
        for file in sorted((run / "evaluations").glob("step-*.json"))
    )
    return {problem: after[problem] - before[problem] for problem in before}


def pooled(runs: Sequence[Path], suite: str) -> tuple[float, float]:
    """Mean change over problems and seeds in points, and 1.96 of its standard errors."""
    found = [changes(run, suite) for run in runs]
    means = [statistics.fmean(change[problem] for change in found) for problem in found[0]]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return 100 * statistics.fmean(means), 196 * error


def figures(run: Path) -> dict[str, Any]:
    """What one run found."""
    summary = json.loads((run / "summary.json").read_text())
    took = run / "command_time_s"
    return {
        "seed": summary["seed"],
        **{
            suite: {
                "before": summary["suites"][suite]["before"]["accuracy"],
                "after": summary["suites"][suite]["after"]["accuracy"],
                "points": 100 * summary["suites"][suite]["change"],
                "interval_95_points": [100 * x for x in summary["suites"][suite]["interval_95"]],
                "num_problems": summary["suites"][suite]["num_problems"],
            }
            for suite in SUITES
        },
        "command_time_s": float(took.read_text()) if took.exists() else None,
        "step_time_s": summary["step_time_s"],
        "samples_per_s": summary["samples_per_s"],
        "peak_memory_gib": summary["peak_memory_bytes"] / 2**30,
        "weights_sha256": summary["weights_sha256"],
    }


def draw(runs: dict[str, list[Path]], file: Path) -> None:
    """Mean reward by step, one line per seed, a color per kind."""
    mpl.rcParams["svg.hashsalt"] = "penstock"
    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, color in zip(runs, ("tab:blue", "tab:orange"), strict=False):
        for index, run in enumerate(runs[kind]):
            name = f"{kind}, {len(runs[kind])} seeds" if index == 0 else None
            axes.plot(smoothed(rewards(run), 0.3), color=color, alpha=0.8, label=name)
    axes.set(
        xlabel="step of 96 answers",
        ylabel="mean reward (moving mean)",
        title="SmolLM2-135M-Instruct follows instructions: make smollm2",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Run what is missing, draw, and print what was gained."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options.add_argument("--runs", type=Path, default=Path("runs/instructions"))
    options.add_argument("--svg", type=Path, help="where to draw the curves")
    args = options.parse_args()
    runs = {kind: [run_of(args.runs, kind, s) for s in args.seeds] for kind in args.kinds}
    found = {kind: [figures(run) for run in those] for kind, those in runs.items()}
    rows: list[list[object]] = []
    for kind, seeds in found.items():
        for one in seeds:
            rows.append([
                kind, one["seed"],
                *(f"{one[s]['before']:.1%} -> {one[s]['after']:.1%}" for s in SUITES),
                *(f"{one[s]['points']:+.1f}" for s in SUITES),
                f"{one['command_time_s'] or math.nan:.0f}", f"{one['peak_memory_gib']:.2f}",
            ])  # fmt: skip
    head = ["trained", "seed", *SUITES, "points seen", "points unseen", "wall s", "peak GiB"]
    print(table(head, rows))
    together = {kind: {s: pooled(those, s) for s in SUITES} for kind, those in runs.items()}
    for kind, suites in together.items():
        for suite, (mean, half) in suites.items():
            print(f"{kind}, {suite}, all seeds: {mean:+.1f} points, 95 % +-{half:.1f}")
    if args.svg:
        draw(runs, args.svg)
    report({"seeds": found, "pooled_points_and_half_interval": together}, args.json)


if __name__ == "__main__":
    main()
