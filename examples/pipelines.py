"""Three published pipelines on SmolLM2, each with data made here, in one command.

Run it: `python pipelines.py tulu3`, `zephyr` or `tldr`; further words are keys of the run, such as
`algorithm.num_steps=5`. `make models` installs the model. What comes out is in docs/pipelines.md.

`feedback.py` makes the data once. Then `penstock run experiment=NAME` trains the stages one after
another, and what each of them gains is measured on held-out requests of the kinds trained on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as penstock does, before torch reads it

import torch
from feedback import CHAT, Feedback, make_feedback
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.main import main as penstock
from penstock.launch.placement.machine import has_fast_bfloat16
from penstock.launch.run_dir.evaluations import Change, Measured
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.sources import PairSource
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.models.hub import packaged_folder
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec

HERE = Path(__file__).resolve().parent
PIPELINES = ("tulu3", "zephyr", "tldr")
SUITE = "seen_kinds"


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """What was asked for, and keys of the run."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("pipeline", choices=PIPELINES)
    options.add_argument("--model", help="a folder; SmolLM2-135M-Instruct by default")
    options.add_argument("--folder", type=Path, default=Path("runs/pipelines"))
    options.add_argument("--prompts", type=int, default=Feedback.num_prompts)
    options.add_argument("--held-out", type=int, default=Feedback.num_held_out)
    options.add_argument("--samples", type=int, default=Feedback.sampling.num_samples)
    options.add_argument("--evaluated", type=int, default=240, help="held-out requests")
    return options.parse_known_args()


def penstock_does(*words: str) -> None:
    """One command of penstock's, which says itself what is wrong."""
    code = penstock(words)
    if code:
        sys.exit(code)


def feedback(asked: argparse.Namespace, model: str) -> Path:
    """The folder of the data, which is made if it is not there."""
    folder: Path = asked.folder / "data"
    told = folder / "feedback.json"
    if not told.exists():
        sampling = replace(Feedback.sampling, num_samples=asked.samples)
        cfg = Feedback(
            model=model, num_prompts=asked.prompts, num_held_out=asked.held_out, sampling=sampling
        )
        make_feedback(folder, cfg)
    print(told.read_text(), end="")
    return folder


def trained(asked: argparse.Namespace, model: str, data: Path, words: list[str]) -> Path:
    """Train the stages; returns the run's folder."""
    runs: Path = asked.folder / asked.pipeline
    before = set(runs.glob("*/"))
    penstock_does(
        *("run", "--config-dir", str(HERE / "configs"), f"experiment={asked.pipeline}"),
        *("model=folder", f"model.folder={model}", f"task.path={data / 'train.jsonl'}"),
        *(f"runs={runs}", *words),
    )
    (run,) = set(runs.glob("*-seed*/")) - before
    return run


def policies(run: Path, model: str) -> dict[str, str]:
    """Stage -> the policy's folder after it, in the order they were trained; first the model."""
    summary = json.loads((run / "summary.json").read_text())
    *before, last = summary["stages"]
    homes = {**{name: run / "stages" / name for name in before}, last: run}
    after = {name: home / "models" / "actor" for name, home in homes.items()}
    return {"before": model, **{name: str(path) for name, path in after.items() if path.is_dir()}}


def measured(model: str, num_prompts: int, file: Path) -> Measured:
    """Greedy answers to held-out requests, scored by the verifier."""
    penstock_does(
        *("eval", "model=folder", f"model.folder={model}", "task=instructions"),
        *(f"evaluation.num_prompts={num_prompts}", f"task.num_held_out={num_prompts}"),
        *("task.num_unseen=0", "evaluation.num_examples=1", f"output={file}"),
    )
    found: dict[str, Any] = json.loads(file.read_text())["suites"][SUITE]
    found.pop("values")
    return Measured(**found)


def pair_accuracy(model: Path, policy: str, pairs: Path) -> tuple[float, int]:
    """How often a reward model scores the right answer of a held-out pair higher; and the pairs."""
    task = FileTaskSpec(
        path=str(pairs), answer_field=None, chosen_field="chosen", rejected_field="rejected"
    ).build()
    tokenizer = TokenizerSpec(kind="folder", folder=policy).build()
    rows = PairSource(task, tokenizer, batch_size=len(task.train), seed=0, chat=CHAT).batch(0)
    dtype = "bfloat16" if has_fast_bfloat16("cpu") else "float32"
    spec = TorchRewardModelSpec(model=ModelSpec(folder=str(model), dtype=dtype))
    score = spec.build(WorkerContext("reward")).score(rows.tokens, rows.mask, rows.pair_id)
    better = score[rows.chosen] > score[~rows.chosen]
    return float(better.to(torch.float32).mean()), len(better)


def report(asked: argparse.Namespace, run: Path, model: str, data: Path) -> None:
    """Measure every stage, and print what it gained."""
    lines = [f"{asked.pipeline}: accuracy on {asked.evaluated} held-out requests, {run}"]
    found: dict[str, Measured] = {}
    for stage, folder in policies(run, model).items():
        one = measured(folder, asked.evaluated, run / f"accuracy-{stage}.json")
        change = Change.between(list(found.values())[-1], one) if found else None
        gain = f"  {change}" if change is not None else ""
        lines.append(f"  {stage:8}{one.accuracy or 0.0:6.1%}{gain}")
        found[stage] = one
    whole = Change.between(found["before"], list(found.values())[-1])
    lines.append(f"  in all          {whole}")
    rewards = run / "stages" / "reward_modelling" / "models" / "reward"
    if rewards.is_dir():
        share, count = pair_accuracy(rewards, model, data / "held_out.jsonl")
        lines.append(f"  reward model: {share:.1%} of {count} held-out pairs the right way round")
    print("\n".join(lines))


def main() -> None:
    """Make the data, train the stages, and say what they gained."""
    asked, words = arguments()
    model = asked.model or str(packaged_folder("smollm2-135m", print))
    data = feedback(asked, model)
    run = trained(asked, model, data, words)
    report(asked, run, model, data)


if __name__ == "__main__":
    main()
