"""Learning curves of `penstock run` over seeds, and the accuracy gained on held-out problems.

Runs every seed as a person would (`penstock run algorithm=A seed=S`), one after another, unless
`--runs` names a folder that holds such runs already, and draws reward per step into one SVG.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from bench import parser, report, table


def smoothed(values: list[float], share: float = 0.1) -> list[float]:
    """The moving mean, each new value counting `share`."""
    means: list[float] = []
    for value in values:
        means.append(value if not means else means[-1] + share * (value - means[-1]))
    return means


def rewards(run: Path) -> list[float]:
    """Mean reward of every step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scored = ("reward.score/reward/mean", "actor.converse/reward/mean")
    return [next(line[name] for name in scored if name in line) for line in lines]


def draw(runs: list[tuple[Path, dict[str, Any]]], title: str, file: Path) -> None:
    """One line per seed."""
    mpl.rcParams["svg.hashsalt"] = "penstock"
    figure, axes = plt.subplots(figsize=(7, 4))
    for run, summary in runs:
        values = rewards(run)
        before, after = summary["accuracy_before_rl"], summary["accuracy_after_rl"]
        label = f"seed {summary['seed']}: greedy accuracy {before:.1%} to {after:.1%}"
        axes.plot(smoothed(values), label=label)
    axes.set(xlabel="step", ylabel="mean reward of sampled answers", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Run what is missing, draw, and print what was gained."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--algorithm", default="grpo")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--runs", type=Path, help="folder of finished runs, or where to put them")
    options.add_argument("--svg", type=Path, help="where to draw the curves")
    options.add_argument("--words", nargs="*", default=[], help="further ones: task=calculator")
    args = options.parse_args()
    folder = args.runs or Path("runs") / f"learning-{args.algorithm}"
    for seed in args.seeds:
        if not list(folder.glob(f"*-{args.algorithm}-seed{seed}/summary.json")):
            words = [f"algorithm={args.algorithm}", f"seed={seed}", f"runs={folder}", *args.words]
            entry = [sys.executable, "-m", "penstock.launch.main", "run", *words]
            subprocess.run(entry, check=True, timeout=3600)
    found = sorted(folder.glob(f"*-{args.algorithm}-seed*/summary.json"))
    runs = [(file.parent, json.loads(file.read_text())) for file in found]
    rows: list[list[object]] = []
    seeds: list[dict[str, Any]] = []
    for _, summary in runs:
        before, after = summary["accuracy_before_rl"], summary["accuracy_after_rl"]
        seeds.append({key: summary[key] for key in (
            "seed", "accuracy_before_rl", "accuracy_after_rl", "samples_per_s", "wall_time_s",
            "peak_memory_bytes", "weights_sha256")})  # fmt: skip
        rows.append([summary["seed"], f"{before:.1%}", f"{after:.1%}",
                     f"{100 * (after - before):.1f}", f"{summary['wall_time_s']:.0f}"])  # fmt: skip
    print(table(["seed", "before RL", "after RL", "points", "wall s"], rows))
    if args.svg:
        draw(runs, f"penstock run algorithm={args.algorithm}", args.svg)
    gained = [s["accuracy_after_rl"] - s["accuracy_before_rl"] for s in seeds]
    report(
        {
            "algorithm": args.algorithm,
            "words": args.words,
            "least_points_gained": 100 * min(gained),
            "seeds": seeds,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
