"""Scores in environments over three seeds, beside published ones, and the curves in one plot.

Every run is `penstock run`, with its YAML's settings but for what `CASES` says. The score is the
mean return of the last 100 episodes of training, in which actions are sampled, as CleanRL counts;
Stable-Baselines3's published score is of greedy actions after training. A run that `--runs` already
holds is not made again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from bench import parser, report, table


@dataclass(frozen=True)
class Case:
    """One algorithm on one task.

    Attributes:
        words: Of `penstock run`.
        frames: Steps of environments.
        wanted: The least mean score.
        published: What others report, and after how many steps.
    """

    words: tuple[str, ...]
    frames: int
    wanted: float
    published: str


CASES = {
    "ppo-cartpole": Case(
        ("algorithm=env_ppo", "task=cartpole"), 500_000, 490, "CleanRL 490 ± 6, 500k"
    ),
    "ppo-acrobot": Case(
        ("algorithm=env_ppo", "task=acrobot"), 500_000, -90, "CleanRL -86 ± 1, 500k"
    ),
    "ppo-pendulum": Case(
        (
            "algorithm=env_ppo",
            "task=pendulum",
            "algorithm.cfg.horizon=1024",
            "algorithm.cfg.discount=0.9",
            "algorithm.cfg.epochs=10",
            "algorithm.cfg.num_minibatches=64",
            "algorithm.optimizer.lr=1e-3",
            "task.normalization.discount=0.9",
            "task.normalization.observations=false",
            "algorithm.num_steps=37",
        ),
        151_552,
        -276,
        "Stable-Baselines3 zoo -172 ± 104, 100k",
    ),
    "impala-cartpole": Case(
        ("algorithm=impala", "task=cartpole", "schedule=one_step_off"), 500_000, 475, "none"
    ),
    "dqn-cartpole": Case(
        (
            "algorithm=dqn",
            "task=cartpole",
            "model.architecture.hidden_sizes=[120,84]",
            "model.architecture.activation=relu",
        ),
        250_000,
        475,
        "CleanRL 489 ± 16, 500k",
    ),
}


def run(name: str, case: Case, seed: int, folder: Path) -> Path:
    """The run's folder; made if it is not there."""
    home = folder / f"{name}-seed{seed}"
    if not list(home.glob("*/summary.json")):
        entry = [sys.executable, "-m", "penstock.launch.main", "run", *case.words, "model=mlp"]
        entry += [f"seed={seed}", f"runs={home}", "executor.num_threads=1"]
        entry += ["checkpoint_every=100000"]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(entry, check=True, timeout=3600, env=alone, stdout=subprocess.DEVNULL)
    (summary,) = home.glob("*/summary.json")
    return summary.parent


def episodes(run: Path) -> list[tuple[int, float, float]]:
    """Per update: its number, episodes that ended, and their mean return."""
    found: list[tuple[int, float, float]] = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["env.rollout/episodes"]:
            ended = row["env.rollout/episodes"], row["env.rollout/episode_return"]
            found.append((row["step"], *ended))
    return found


def last_return(run: Path, count: int = 100) -> float:
    """Mean return of at least the last so many episodes."""
    total = taken = 0.0
    for _, ended, value in reversed(episodes(run)):
        total, taken = total + ended * value, taken + ended
        if taken >= count:
            break
    return total / taken


def curve(run: Path, frames: int, bins: int = 50) -> list[tuple[float, float]]:
    """Steps of environments and the mean return around them."""
    rows = episodes(run)
    num_updates = len((run / "metrics.jsonl").read_text().splitlines())
    width = num_updates / bins
    points: list[tuple[float, float]] = []
    for at in range(bins):
        inside = [(n, v) for step, n, v in rows if at * width <= step < (at + 1) * width]
        if inside:
            value = sum(n * v for n, v in inside) / sum(n for n, _ in inside)
            points.append(((at + 0.5) / bins * frames, value))
    return points


def draw(runs: dict[str, list[Path]], file: Path) -> None:
    """A panel per case, a line per seed."""
    mpl.rcParams["svg.hashsalt"] = "penstock"
    figure, panels = plt.subplots(1, len(runs), figsize=(3.2 * len(runs), 3), squeeze=False)
    for axes, (name, folders) in zip(panels[0], runs.items(), strict=True):
        for folder in folders:
            xs, ys = zip(*curve(folder, CASES[name].frames), strict=True)
            axes.plot([x / 1000 for x in xs], ys, linewidth=1)
        axes.axhline(CASES[name].wanted, color="black", linewidth=0.6, linestyle=":")
        axes.set(title=name, xlabel="thousand steps")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("episode return")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Run what is missing, draw, and print scores beside published ones."""
    options = parser(__doc__ or "")
    options.add_argument("--runs", type=Path, default=Path("runs/env_scores"))
    options.add_argument("--svg", type=Path, help="where to draw the curves")
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = options.parse_args()
    seeds: Sequence[int] = args.seeds
    runs = {
        name: [run(name, CASES[name], seed, args.runs) for seed in seeds] for name in args.cases
    }
    rows: list[dict[str, Any]] = []
    for name, folders in runs.items():
        scores = [last_return(folder) for folder in folders]
        seconds = [
            json.loads((folder / "summary.json").read_text())["main_stage_wall_time_s"]
            for folder in folders
        ]
        rows.append({"case": name, "scores": scores, "seconds": seconds})
    if args.svg:
        draw(runs, args.svg)
    head = ("case", "steps", *(f"seed {seed}" for seed in seeds), "mean", "spread", "published")
    cells = [
        (
            row["case"],
            f"{CASES[row['case']].frames:,}",
            *(f"{score:.1f}" for score in row["scores"]),
            f"{mean(row['scores']):.1f}",
            f"{pstdev(row['scores']):.1f}",
            CASES[row["case"]].published,
        )
        for row in rows
    ]
    print(table(head, cells))
    report({"seeds": seeds, "cases": rows}, args.json)


if __name__ == "__main__":
    main()
