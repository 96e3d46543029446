"""How `llm_step.py` and `time_to_reward.py` start either side, and read what it did."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
from llm_case import (
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    ROWS,
    TEMPERATURE,
    Prompt,
)
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import Run, resolved
from penstock.launch.stages.prepare import prepare
from penstock.workers.models.hub import packaged_folder
from vs_trl import trl_python

__all__ = ["Model", "OursRun", "job_of", "prompts_of", "run_ours", "run_trl", "updates_of", "words"]

HERE = Path(__file__).resolve().parent
PACKAGED = "smollm2-135m"
TASK = (
    "experiment=smollm2",
    f"task.max_response_tokens={MAX_NEW_TOKENS}",
    f"algorithm.per_step.prompts={NUM_PROMPTS}",
    f"algorithm.cfg.sampling.num_samples={NUM_SAMPLES}",
    f"algorithm.cfg.sampling.temperature={TEMPERATURE}",
    f"algorithm.optimizer.lr={LEARNING_RATE}",
    f"samples.max_rows={ROWS}",
    "evaluation.num_prompts=0",
    "tracker=none",
)
"""What a person types for the shared task: the run of `make smollm2`, without its evaluations."""


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        given: A folder; None for SmolLM2-135M-Instruct, which our side takes from its package.
    """

    given: Path | None

    @property
    def words(self) -> list[str]:
        """How our side is told."""
        if self.given is None:
            return [f"model={PACKAGED}"]
        return ["model=folder", f"model.folder={self.given}"]

    @property
    def folder(self) -> Path:
        """Where TRL finds it."""
        return packaged_folder(PACKAGED, print) if self.given is None else self.given


def words(model: Model, num_updates: int, seed: int, *more: str) -> list[str]:
    """The words of `penstock run`."""
    return [*model.words, *TASK, f"algorithm.num_steps={num_updates}", f"seed={seed}", *more]


def job_of(typed: Sequence[str]) -> Run:
    """The run that these words make, as it is before anything is computed."""
    composed = compose("run", list(typed))
    composed.pop("resume", None)
    return prepare(resolved(composed))


def prompts_of(job: Run) -> list[list[Prompt]]:
    """The prompts of every update of a run, in its order."""
    source, task = job.sources[job.main.name]["prompts"], job.data.task
    updates: list[list[Prompt]] = []
    for step in range(job.main.config.num_steps):
        table: Any = source.batch(step)
        sizes = (table.prompt >= 0).sum(1).tolist()
        updates.append(
            [
                Prompt(task.prompt_text(index), task.reward_answer(index) or "", size)
                for index, size in zip(table.prompt_id.tolist(), sizes, strict=True)
            ]
        )
    return updates


@dataclass(frozen=True)
class OursRun:
    """A run of our side that has ended.

    Attributes:
        folder: The run's.
        peak_rss_mib: Most memory that its process held.
    """

    folder: Path
    peak_rss_mib: float


def run_ours(runs: Path, typed: Sequence[str], timeout_s: float) -> OursRun:
    """Make a run, go on with one that was interrupted, or take the one that is there.

    Args:
        runs: A folder that has this run alone, or nothing.
        typed: The words of `penstock run`.
        timeout_s: Longest time that it may take.
    """
    measured = runs / "measured.json"
    found = sorted(runs.glob("*/run.json"))
    if not measured.exists():
        runs.mkdir(parents=True, exist_ok=True)
        given = [f"resume={found[0].parent}"] if found else [*typed, f"runs={runs}"]
        _run([sys.executable, HERE / "llm_ours_side.py", measured, *given], timeout_s)
    (file,) = runs.glob("*/run.json")
    return OursRun(file.parent, json.loads(measured.read_text())["peak_rss_mib"])


def run_trl(
    model: Model, case: Path, curve: Path, options: Sequence[str], timeout_s: float
) -> dict[str, str]:
    """Train with TRL; returns its versions.

    Args:
        model: What to train.
        case: The prompts, as `write_case` wrote them.
        curve: Where a line per update goes.
        options: Of `llm_trl_side.py`.
        timeout_s: Longest time that it may take.
    """
    package = Path(penstock.__file__).parents[1]
    side = [trl_python(), HERE / "llm_trl_side.py", model.folder, case, curve, package]
    return json.loads(_run([*side, *options], timeout_s).splitlines()[-1])


def _run(command: Sequence[Path | str], timeout_s: float) -> str:
    """What a process prints.

    Raises:
        RuntimeError: If it fails; the end of what it wrote is in the message.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def updates_of(run: OursRun) -> list[dict[str, float]]:
    """A line per update, with what TRL's have as well, and seconds of generating and training."""
    spent: dict[tuple[str, int], float] = {}
    for event in json.loads((run.folder / "trace.json").read_text()):
        if event["ph"] == "X":
            key = event["name"], event["step"]
            spent[key] = spent.get(key, 0.0) + event["dur"] / 1e6
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [
        {
            "step": update["step"],
            "seconds": update["run/step_time_s"],
            "reward": update["reward.score/reward/mean"],
            "length": update["actor.generate/response_length"],
            "longest": update["actor.generate/response_length_max"],
            "generate_s": spent["actor.generate", update["step"]],
            "train_s": spent["actor.train", update["step"]],
        }
        for update in map(json.loads, lines)
    ]
