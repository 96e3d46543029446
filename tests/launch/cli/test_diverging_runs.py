"""A run whose training diverges ends, and leaves what was good."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ..conftest import Penstock

WORDS = [
    "algorithm=sft",
    "algorithm.num_steps=2",
    "algorithm.per_step.demos=8",
    "task.num_train=64",
    "task.num_held_out=4",
    "evaluation.num_prompts=4",
    "model.architecture.hidden_size=32",
    "model.architecture.num_hidden_layers=1",
    "tracker=none",
]
ADVICE = (
    "nothing of this step is published or saved; go on from the last checkpoint with a lower "
    "optimizer.lr, or correct what made the numbers"
)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.slow
def test_a_ruined_model_is_neither_saved_nor_exported(penstock: Penstock) -> None:
    said = penstock("run", *WORDS, "algorithm.optimizer.lr=1e30")
    assert said.code == 1
    assert "Traceback" not in said.err
    assert "WorkerError: step 0: 'actor' cannot be trained on: its weights or its loss" in said.err
    assert ADVICE in said.err
    (run,) = Path("runs").iterdir()
    assert f"\n    to continue: penstock run resume={run}" in said.err
    assert not list(run.rglob("*.safetensors"))


@pytest.mark.slow
def test_the_last_good_checkpoint_stays_and_a_run_goes_on_from_it(penstock: Penstock) -> None:
    assert penstock("run", *WORDS).code == 0
    (run,) = Path("runs").iterdir()
    kept = {name: tree(run / name) for name in ("checkpoints", "models")}
    more = ["run", f"resume={run}", "algorithm.num_steps=4"]
    said = penstock(*more, "algorithm.optimizer.lr=1e30")
    assert said.code == 1
    assert "WorkerError: step 2: 'actor' cannot be trained on: " in said.err
    assert {name: tree(run / name) for name in kept} == kept
    assert penstock(*more, "algorithm.optimizer.lr=1e-4").code == 0
    assert tree(run / "models") != kept["models"]
