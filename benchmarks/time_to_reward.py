"""Samples and seconds until a mean reward is reached: GRPO here and with TRL, over seeds.

The work is that of `llm_step.py`: SmolLM2-135M-Instruct on `task=instructions`, 12 prompts x 8
samples x at most 40 new tokens per update, temperature 0.8, but a learning rate of 3e-5 (`--lr`),
with which the target takes a third of the updates that it takes with 1e-5. Either side has master
weights and moments in float32, the same prompts in the same order, and the same reward. A
side has reached the target at the first update where the mean reward of the last 3 updates is at
least `--target`; its seconds are those of the updates until then, so that imports, building the
model and saving do not count. Random numbers of the sampling differ, which is why the samples that
are needed are equal within noise only.

TRL's weights are in float32; with `--trl-weights autocast` its products are in bfloat16, as ours
are where the CPU is faster so.

This takes hours. Every update is written as it is taken, below `--folder`, and either side keeps a
checkpoint every `--save-every` updates: what was interrupted goes on when the same command is given
again, and what is complete is not made again. TRL ends at the target, ours after `--steps` updates.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from bench import parser, report, table
from llm_case import ROWS, RUNNING_MEAN_STEPS, reached, read_curve, write_case, write_curve
from llm_sides import Model, job_of, prompts_of, run_ours, run_trl, updates_of, words

TIMEOUT_S = 24 * 3600.0
SIDES = ("ours", "trl")
COLORS = {"ours": "tab:blue", "trl": "tab:orange"}


@dataclass(frozen=True)
class Curve:
    """What one side did with one seed.

    Attributes:
        side: Of `SIDES`.
        seed: Of the run.
        rewards: Mean reward of each update.
        seconds: Since the start, after each update.
    """

    side: str
    seed: int
    rewards: list[float]
    seconds: list[float]

    def to(self, target: float) -> dict[str, Any]:
        """How long the target took; None for what was not reached."""
        steps = reached(self.rewards, target)
        return {
            "side": self.side,
            "seed": self.seed,
            "updates": len(self.rewards),
            "samples": None if steps is None else steps * ROWS,
            "seconds": None if steps is None else self.seconds[steps - 1],
            "rewards": self.rewards,
        }


def lr_of(args: argparse.Namespace) -> list[str]:
    """The learning rate, as our side is told."""
    return [f"algorithm.optimizer.lr={args.lr}"]


def curve_file(args: argparse.Namespace, side: str, seed: int) -> Path:
    """Where the curve of one side and seed is kept."""
    name = f"ours-{args.steps}" if side == "ours" else f"trl-{args.trl_weights}"
    return args.folder / f"{name}-seed{seed}.jsonl"


def train_ours(args: argparse.Namespace, seed: int, file: Path) -> None:
    """Train with Penstock, unless that was done."""
    if file.exists():
        return
    saving = (f"checkpoint_every={args.save_every}", "keep_checkpoints=1")
    typed = words(Model(args.model), args.steps, seed, *lr_of(args), *saving)
    run = run_ours(file.with_suffix("").resolve(), typed, TIMEOUT_S)
    write_curve(file, updates_of(run))


def train_trl(args: argparse.Namespace, seed: int, file: Path) -> None:
    """Train with TRL until the target or the last step, from where it was interrupted."""
    done = [update["reward"] for update in read_curve(file)]
    if len(done) < args.steps and reached(done, args.target) is None:
        model = Model(args.model)
        case = file.with_suffix(".json")
        write_case(case, prompts_of(job_of(words(model, args.steps, seed, *lr_of(args)))))
        options = ["--weights", args.trl_weights, "--rows-at-once", str(args.rows_at_once)]
        options += ["--seed", str(seed), "--target", str(args.target), "--lr", str(args.lr)]
        options += ["--save-every", str(args.save_every)]
        run_trl(model, case.resolve(), file.resolve(), options, TIMEOUT_S)
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)  # its checkpoints


def curves_of(args: argparse.Namespace) -> list[Curve]:
    """What is there of every side and seed, complete or not."""
    found: list[Curve] = []
    for side in SIDES:
        for seed in args.seeds:
            updates = read_curve(curve_file(args, side, seed))
            if updates:
                seconds = list(accumulate(update["seconds"] for update in updates))
                rewards = [update["reward"] for update in updates]
                found.append(Curve(side, seed, rewards, seconds))
    return found


def compared(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """TRL's over ours, of medians over seeds and of each seed; empty until all have got there."""
    result: dict[str, Any] = {}
    for what in ("samples", "seconds"):
        of_side = {side: [one[what] for one in found if one["side"] == side] for side in SIDES}
        if any(not values or None in values for values in of_side.values()):
            continue
        medians = {side: statistics.median(values) for side, values in of_side.items()}
        result[f"{what}_ratio"] = medians["trl"] / medians["ours"]
        result[f"{what}_ratio_of_each_seed"] = [
            theirs / ours for ours, theirs in zip(of_side["ours"], of_side["trl"], strict=False)
        ]
    return result


def draw(curves: Sequence[Curve], target: float, file: Path) -> None:
    """The running mean of the reward by samples and by minutes, a line for each seed."""
    mpl.rcParams["svg.hashsalt"] = "penstock"
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for curve in curves:
        first = RUNNING_MEAN_STEPS - 1
        means = [
            statistics.fmean(curve.rewards[end - first : end + 1])
            for end in range(first, len(curve.rewards))
        ]
        samples = [(end + 1) * ROWS for end in range(first, len(curve.rewards))]
        minutes = [second / 60 for second in curve.seconds[first:]]
        label = {"ours": "Penstock", "trl": "TRL"}[curve.side] if curve.seed == 0 else None
        for axes, across in zip(panels, (samples, minutes), strict=True):
            axes.plot(across, means, color=COLORS[curve.side], label=label, alpha=0.8)
    for axes, label in zip(panels, ("samples", "minutes of updates"), strict=True):
        axes.axhline(target, color="gray", linestyle="--", linewidth=1)
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel=f"mean reward of {RUNNING_MEAN_STEPS} updates")
    panels[1].legend(loc="lower right")
    figure.suptitle("GRPO on SmolLM2-135M-Instruct, the same prompts and settings")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Train what is missing, draw, and print how long the target took."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--steps", type=int, default=60, help="updates at most")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--target", type=float, default=0.6, help="mean reward to reach")
    options.add_argument("--lr", type=float, default=3e-5, help="learning rate of either side")
    options.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES, help="train these")
    options.add_argument("--trl-weights", choices=("float32", "autocast"), default="float32")
    options.add_argument("--rows-at-once", type=int, default=16, help="of TRL, in training")
    options.add_argument("--save-every", type=int, default=10, help="updates between checkpoints")
    options.add_argument("--folder", type=Path, default=Path("runs") / "time_to_reward")
    options.add_argument("--svg", type=Path, help="where to draw the curves")
    options.add_argument("--model", type=Path, help="a folder of another model, to try this out")
    args = options.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for side in args.sides:
            train = train_ours if side == "ours" else train_trl
            train(args, seed, curve_file(args, side, seed))
    curves = curves_of(args)
    found = [curve.to(args.target) for curve in curves]
    keys = ("side", "seed", "updates", "samples", "seconds")
    rows = [["-" if one[key] is None else one[key] for key in keys] for one in found]
    print(table([*keys[:3], f"samples to {args.target:g}", "seconds"], rows))
    result = compared(found)
    print({key: value for key, value in result.items() if isinstance(value, float)})
    if args.svg:
        draw(curves, args.target, args.svg)
    settings = {"target": args.target, "steps": args.steps, "lr": args.lr}
    settings["trl_weights"] = args.trl_weights
    report({"compared": __doc__, **settings, **result, "runs": found}, args.json)


if __name__ == "__main__":
    main()
