"""Learning curves of eight algorithms over three seeds in one plot: the task of `make run`.

Every run is `penstock run algorithm=A seed=S`, with its YAML's settings but for what `WORDS` says:
each step trains on 1,024 responses, and PPO's reward is the verifier, so that the curves show the
same thing. A run that `--runs` already holds is not made again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from bench import parser, report, table
from learning import rewards, smoothed

NUM_STEPS = 120
GROUPS_OF_16 = ("algorithm.per_step.prompts=64",)
WORDS: dict[str, Sequence[str]] = {
    "grpo": GROUPS_OF_16,
    "dapo": (),
    "gspo": GROUPS_OF_16,
    "rloo": (),
    "remax": (),
    "reinforce_pp": (),
    "ppo": ("algorithm.roles.reward.worker=rule", "~algorithm.before.reward_modelling"),
    "online_dpo": (),
}
"""Algorithm -> what differs from its YAML."""


def run_all(folder: Path, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Summaries of all runs, each with its rewards per step."""
    found: list[dict[str, Any]] = []
    for seed in seeds:
        for algorithm, words in WORDS.items():
            pattern = f"*-{algorithm}-seed{seed}/summary.json"
            if not list(folder.glob(pattern)):
                entry = [sys.executable, "-m", "penstock.launch.main", "run"]
                entry += [f"algorithm={algorithm}", f"seed={seed}", f"runs={folder}", *words]
                entry += [f"algorithm.num_steps={NUM_STEPS}", "executor.num_threads=1"]
                subprocess.run(entry, check=True, timeout=3600)
            (file,) = folder.glob(pattern)
            summary = json.loads(file.read_text())
            found.append({**summary, "algorithm": algorithm, "rewards": rewards(file.parent)})
    return found


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """For each algorithm the mean over seeds, and a band from the lowest to the highest."""
    mpl.rcParams["svg.hashsalt"] = "penstock"
    figure, axes = plt.subplots(figsize=(8, 5))
    for algorithm in WORDS:
        lines = [smoothed(run["rewards"]) for run in runs if run["algorithm"] == algorithm]
        columns = list(zip(*lines, strict=True))
        (line,) = axes.plot([mean(values) for values in columns], label=algorithm)
        low, high = [min(v) for v in columns], [max(v) for v in columns]
        axes.fill_between(range(len(columns)), low, high, color=line.get_color(), alpha=0.1)
    axes.set(
        xlabel="step (1,024 responses each)",
        ylabel="mean reward of sampled answers",
        title="penstock run algorithm=..., mean and range of three seeds",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Run what is missing, draw, and print what each seed gained."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--runs", type=Path, default=Path("runs") / "curves")
    options.add_argument("--svg", type=Path, help="where to draw the curves")
    args = options.parse_args()
    runs = run_all(args.runs, args.seeds)
    keys = "algorithm", "seed", "accuracy_before_rl", "accuracy_after_rl", "wall_time_s"
    rows: list[list[object]] = [
        [
            algorithm,
            *(
                f"{run['accuracy_before_rl']:.1%} to {run['accuracy_after_rl']:.1%}"
                for run in runs
                if run["algorithm"] == algorithm
            ),
        ]
        for algorithm in WORDS
    ]
    print(table(["algorithm", *(f"seed {seed}" for seed in args.seeds)], rows))
    if args.svg:
        draw(runs, args.svg)
    gained = [run["accuracy_after_rl"] - run["accuracy_before_rl"] for run in runs]
    report(
        {
            "num_steps": NUM_STEPS,
            "least_points_gained": 100 * min(gained),
            "runs": [{key: run[key] for key in keys} for run in runs],
        },
        args.json,
    )


if __name__ == "__main__":
    main()
