"""Every example that is a configuration runs, tiny, from the folder of examples."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.main import main
from penstock.launch.run_dir.step_logs import read_metrics

from ..launch.cli.test_run import TINY

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = "algorithm.num_steps=2"
SFT = ("algorithm.before.sft.num_steps=2", "algorithm.before.sft.per_step.demos=8")
REWARDS = (
    "algorithm.before.reward_modelling.num_steps=2",
    "algorithm.before.reward_modelling.per_step.pairs=4",
    "algorithm.before.reward_modelling.optimizer.warmup_calls=0",
)


@pytest.fixture(autouse=True)
def in_examples(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Stand in the folder of examples; what is imported from there is forgotten again."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAMPLES)):
            del sys.modules[name]


def run(folder: Path, *words: str) -> dict[str, Any]:
    """Run the command line, and read what it left behind."""
    config = ["--config-dir", str(EXAMPLES / "configs")]
    said = main(["run", *config, *TINY, STEPS, *words, f"runs={folder}"])
    assert said == 0
    (made,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    assert len(read_metrics(made / "metrics.jsonl")) == 2
    return json.loads((made / "summary.json").read_text())


@pytest.mark.slow
def test_the_n_plus_recipe(tmp_path: Path) -> None:
    words = (*SFT, *REWARDS, "algorithm=n_plus", "algorithm.per_step.prompts=4")
    assert run(tmp_path, *words)["stages"] == ["sft", "reward_modelling", "ppo"]


@pytest.mark.slow
def test_tulu_3_s_order(tmp_path: Path) -> None:
    dpo = ("algorithm.before.dpo.num_steps=2", "algorithm.before.dpo.per_step.pairs=4")
    words = ("algorithm=tulu3", *SFT, *REWARDS, *dpo, "algorithm.per_step.prompts=4")
    made = run(tmp_path, *words, "algorithm.cfg.sampling.num_samples=2")
    assert made["stages"] == ["sft", "reward_modelling", "dpo", "ppo"]


def test_an_algorithm_of_one_s_own(tmp_path: Path) -> None:
    step = ("algorithm=own", "algorithm.step=median_baseline:median_step")
    words = (*step, *SFT, "algorithm.per_step.prompts=4", "algorithm.cfg.divide=false")
    assert run(tmp_path, *words)["stages"] == ["sft", "median"]


@pytest.mark.slow
def test_two_policies_train_each_other(tmp_path: Path) -> None:
    words = ("algorithm=proposer_solver", *SFT, "algorithm.per_step.prompts=2")
    made = run(tmp_path, *words)
    assert made["stages"] == ["sft", "proposer_solver"]
    (folder,) = (path for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert sorted(path.name for path in (folder / "models").iterdir()) == ["proposer", "solver"]
