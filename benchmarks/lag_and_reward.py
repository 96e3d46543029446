"""What a lag costs in reward: k = 0, 1, 4 and 16 on the task of `make run`, and on SmolLM2.

GRPO, PPO and online DPO with `schedule.max_lag=k`, three seeds each, with their YAML's settings but
for `TINY`: every step trains on 512 responses, PPO's on 256, and PPO's reward is the verifier. What
a run learns depends on its seed and k, not on timing, so `--jobs` of them may run at once, and a
run that `--runs` already holds is not made again.

For each are given the mean reward of the last tenth of the steps, the greedy accuracy on held-out
problems, and how far the policy has moved: the Kullback-Leibler divergence from the policy before,
per response, estimated by the mean of log p - log p_before over responses at temperature 1. The
figure is that of Asynchronous RLHF (Noukhovitch et al. 2024, section 3): reward and KL against how
old samples are.

`--smollm2` runs GRPO on SmolLM2-135M-Instruct instead, for k = 0 and 1 and one seed, on two
processes of one thread each, one after another: equal reward, and the time that is saved. Nothing
else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import torch
from bench import parser, report, table
from learning import rewards
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.run_dir.samples import read_samples
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from transformers import AutoTokenizer

LAGS = (0, 1, 4, 16)
NUM_STEPS = 100
TINY: dict[str, Sequence[str]] = {
    "grpo": ("algorithm.per_step.prompts=32",),
    "online_dpo": ("algorithm.per_step.prompts=64",),
    "ppo": (
        "algorithm.per_step.prompts=32",
        "algorithm.roles.reward.worker=rule",
        "~algorithm.before.reward_modelling",
    ),
}
"""Algorithm -> what differs from its YAML."""
IN_PROCESS = ("executor=in_process",)
SMOLLM2 = ("experiment=smollm2", "executor=ray_split", "evaluation.num_prompts=240")
KL_SAMPLES = 8
"""Of each prompt, to estimate the divergence."""


def make(folder: Path, words: Sequence[str]) -> Path:
    """The folder of a run, made unless it is there and has ended."""
    if not (found := list(folder.glob("*/summary.json"))):
        folder.mkdir(parents=True, exist_ok=True)
        entry = [sys.executable, "-m", "penstock.launch.main", "run", f"runs={folder}", *words]
        entry += ["executor.num_threads=1", "tracker=none"]
        with (folder / "output.txt").open("w") as output:
            subprocess.run(
                entry,
                check=True,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_one_thread(),
                timeout=7200,
            )
        found = list(folder.glob("*/summary.json"))
    (file,) = found
    return file.parent


def _one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def divergence(run: Path, start: Path) -> float:
    """KL of a run's policy from the one it began with, in nats per response; see the top."""
    policy, before = _policy(run / "models" / "actor"), _policy(start)
    written = sorted({sample.prompt for sample in read_samples(run)})
    tokenizer: Any = AutoTokenizer.from_pretrained(start)
    rows = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in written]
    prompt = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    with step_scope(0):
        sampling = Sampling(num_samples=KL_SAMPLES, max_new_tokens=5)
        made = policy.generate(prompt, torch.arange(len(prompt)), sampling)
        moved = made.behavior_logprob - before.logprob(made.tokens, made.mask)
    return float(moved.where(made.mask, 0.0).sum(1).mean())


def _policy(folder: Path) -> Any:
    spec = TorchPolicySpec(model=ModelSpec(folder=str(folder)), end_ids=(2,))
    return spec.build(WorkerContext("actor"))


def result_of(run: Path) -> dict[str, Any]:
    """What a run came to."""
    summary, earned = json.loads((run / "summary.json").read_text()), rewards(run)
    return {
        "reward": fmean(earned[-max(1, len(earned) // 10) :]),
        "accuracy_before": summary["accuracy_before_rl"],
        "accuracy": summary["accuracy_after_rl"],
        "weights_sha256": summary["weights_sha256"],
    }


def tiny(
    folder: Path, lags: Sequence[int], seeds: Sequence[int], jobs: int, num_steps: int
) -> list[dict[str, Any]]:
    """All runs of the small model, `jobs` at once; those of a seed begin with the same warm-up."""

    def warm_up(seed: int) -> Path:
        run = make(folder / f"sft-seed{seed}", ["algorithm=sft", f"seed={seed}", *IN_PROCESS])
        return run / "models" / "actor"

    def one(algorithm: str, lag: int, seed: int) -> Path:
        words = [f"algorithm={algorithm}", f"seed={seed}", f"schedule.max_lag={lag}"]
        words += [f"algorithm.num_steps={num_steps}", *IN_PROCESS, *TINY[algorithm]]
        words += [f"model={starts[seed]}", "~algorithm.before.sft"]
        run = make(folder / f"{algorithm}-lag{lag}-seed{seed}", words)
        print(f"{run.name}, k={lag}", flush=True)
        return run

    cases = [(a, lag, seed) for a in TINY for seed in seeds for lag in lags]
    with ThreadPoolExecutor(jobs) as pool:
        starts = dict(zip(seeds, pool.map(warm_up, seeds), strict=True))
        made = list(pool.map(one, *zip(*cases, strict=True)))
    # One after another: models cannot be read in two threads at once.
    return [
        {"algorithm": algorithm, "lag": lag, "seed": seed, **result_of(run),
         "kl": divergence(run, starts[seed])}
        for (algorithm, lag, seed), run in zip(cases, made, strict=True)
    ]  # fmt: skip


def summed_up(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each algorithm and lag, the mean over seeds with the lowest and the highest."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["algorithm"], run["lag"]), []).append(run)
    found: list[dict[str, Any]] = []
    for (algorithm, lag), own in groups.items():
        row: dict[str, Any] = {"algorithm": algorithm, "lag": lag}
        for key in ("reward", "accuracy", "kl"):
            values = [run[key] for run in own]
            row[key] = {"mean": fmean(values), "low": min(values), "high": max(values)}
        found.append(row)
    return found


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""

    def cell(one: Mapping[str, float], scale: float = 1.0, digits: int = 3) -> str:
        low, high = f"{scale * one['low']:.{digits}f}", f"{scale * one['high']:.{digits}f}"
        return f"{scale * one['mean']:.{digits}f} ({low}-{high})"

    cells = [
        [row["algorithm"], row["lag"], cell(row["reward"]), cell(row["accuracy"], 100, 1),
         cell(row["kl"], digits=2)]
        for row in rows
    ]  # fmt: skip
    print(table(["algorithm", "k", "reward at the end", "accuracy %", "KL, nats"], cells))


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Reward and divergence against k: the mean over seeds, and the range."""
    mpl.rcParams["svg.hashsalt"] = "penstock"
    figure, panels = plt.subplots(1, 2, figsize=(9, 4))
    says = {"reward": "mean reward of the last tenth", "kl": "KL from the policy before, nats"}
    for panel, (key, label) in zip(panels, says.items(), strict=True):
        for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
            own = [row for row in rows if row["algorithm"] == algorithm]
            at = range(len(own))
            (line,) = panel.plot(at, [row[key]["mean"] for row in own], "o-", label=algorithm)
            low, high = [row[key]["low"] for row in own], [row[key]["high"] for row in own]
            panel.fill_between(at, low, high, color=line.get_color(), alpha=0.15)
            panel.set_xticks(list(at), [str(row["lag"]) for row in own])
        panel.set(xlabel="schedule.max_lag", ylabel=label, ylim=(0, None))
        panel.grid(alpha=0.3)
    panels[0].legend(loc="lower left")
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def smollm2(folder: Path, seed: int, num_steps: int) -> dict[str, Any]:
    """GRPO on the instruct model with and without a lag of one, one after another."""
    found: dict[str, Any] = {}
    for lag in (0, 1):
        words = [*SMOLLM2, f"seed={seed}", f"schedule.max_lag={lag}"]
        run = make(
            folder / f"smollm2-lag{lag}-seed{seed}", [*words, f"algorithm.num_steps={num_steps}"]
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        step_s = [line["run/step_time_s"] for line in lines[2:]]
        found[f"lag {lag}"] = {**result_of(run), "median_step_s": median(step_s), "step_s": step_s}
    before, after = (found[f"lag {lag}"] for lag in (0, 1))
    found["time_saved"] = 1 - sum(after["step_s"]) / sum(before["step_s"])
    rows = [
        [name, f"{one['median_step_s']:.2f}", f"{one['reward']:.3f}", f"{one['accuracy']:.1%}"]
        for name, one in found.items()
        if name != "time_saved"
    ]
    print(table(["SmolLM2", "s/step", "reward at the end", "accuracy"], rows))
    print(f"time saved: {found['time_saved']:.1%}")
    return found


def main() -> None:
    """Make what is missing, and print what it came to."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--lags", type=int, nargs="+", default=list(LAGS))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--steps", type=int, help="of a run; 100, and 34 on SmolLM2")
    options.add_argument("--jobs", type=int, default=2, help="runs at once")
    options.add_argument("--runs", type=Path, default=Path("runs") / "lag_and_reward")
    options.add_argument("--svg", type=Path, help="where to draw the figure")
    options.add_argument("--smollm2", action="store_true", help="the instruct model instead")
    args: argparse.Namespace = options.parse_args()
    torch.set_num_threads(1)
    if args.smollm2:
        report({"smollm2": smollm2(args.runs, args.seeds[0], args.steps or 34)}, args.json)
        return
    num_steps = args.steps or NUM_STEPS
    runs = tiny(args.runs, args.lags, args.seeds, args.jobs, num_steps)
    rows = summed_up(runs)
    show(rows)
    if args.svg:
        draw(rows, args.svg)
    report({"num_steps": num_steps, "summary": rows, "runs": runs}, args.json)


if __name__ == "__main__":
    main()
