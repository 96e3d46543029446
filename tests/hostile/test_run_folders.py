"""Folders of runs that are damaged, and what `resume=` may and may not change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Commands, Refused
from .damage import BAD, Damage, change, cut, flip, folder, remove, write

pytestmark = pytest.mark.slow


@pytest.fixture
def run_folder(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    folder = tmp_path / "runs" / "stopped"
    shutil.copytree(stopped, folder)
    return folder


MODEL = "stages/sft/models/actor"
CHECKPOINT = "checkpoints/step-00000002"
BEFORE = "evaluations/step-00000000.json"

DAMAGES: dict[str, Damage] = {
    "no run.json": remove("run.json"),
    "run.json is a folder": folder("run.json"),
    "run.json is cut": write("run.json", b'{"changes": [], "code":'),
    "no config.yaml": remove("config.yaml"),
    "config.yaml is a folder": folder("config.yaml"),
    "config.yaml is cut": cut("config.yaml", after=b"\nmodel:"),
    "config.yaml runs code": write("config.yaml", b"!!python/object/apply:os.system ['true']"),
    "plan.json is a folder": folder("plan.json"),
    "plan.json is cut": cut("plan.json"),
    "an evaluation is a folder": folder(BEFORE),
    "an evaluation is cut": cut(BEFORE),
    **{f"{n} {b}": write(n, BAD[b]) for n in ("run.json", "config.yaml", "plan.json") for b in BAD},
    **{f"an evaluation {b}": write(BEFORE, BAD[b]) for b in BAD},
    "config is a text": change("run.json", config="x"),
    "config is a list": change("run.json", config=[1]),
    "changes are a number": change("run.json", changes=3),
    "changes are numbers": change("run.json", changes=[3]),
    "files are a number": change("run.json", files=3),
    "models are a text": change("run.json", models="x"),
    "created is none": change("run.json", created="x"),
    "other code": change("run.json", code={"a": 1}),
    "seed is a list": change("run.json", seed=[1]),
    "other data": change("run.json", data="other"),
    "metrics of others": write("metrics.jsonl", b'{"a": 1}\n'),
    "metrics not UTF-8": write("metrics.jsonl", b"\xff\xfe\n"),
    "checkpoints is a file": write("checkpoints", b""),
    "a checkpoint is a file": write(CHECKPOINT, b""),
    "models are gone": remove("stages/sft/models"),
    "stage's summary is cut": cut("stages/sft/summary.json"),
    "stage's summary is a folder": folder("stages/sft/summary.json"),
    **{f"{n} is gone": remove(f"{MODEL}/{n}") for n in ("config.json", "model.safetensors")},
    **{f"{n} is a folder": folder(f"{MODEL}/{n}") for n in ("config.json", "tokenizer.json")},
    **{f"{n} is cut": cut(f"{MODEL}/{n}") for n in ("config.json", "model.safetensors")},
    **{f"{n} is flipped": flip(f"{MODEL}/{n}") for n in ("model.safetensors", "tokenizer.json")},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged(name: str, run_folder: Path, refused: Refused) -> None:
    DAMAGES[name](run_folder)
    refused(["run", "resume=runs/stopped"])


@pytest.mark.parametrize(
    "word",
    ["seed=3", "algorithm.num_steps=1", "algorithm.num_steps=0", "algorithm.optimizer.lr=nan",
     "executor=nope", "algorithm.num_steps=100000000000000000", "model=tiny", "~executor",
     "algorithm.roles.nobody.optimizer.lr=1", "placement=/nope", "--multirun seed=1,2"],
)  # fmt: skip
def test_changes(word: str, run_folder: Path, refused: Refused) -> None:
    assert run_folder.is_dir()
    refused(["run", "resume=runs/stopped", *word.split(" ")])


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "actor/weights.safetensors",
        "actor/state.json",
        "actor/optimizer.safetensors",
    ],
)
@pytest.mark.parametrize("damage", [remove, folder, cut, flip])
def test_a_damaged_checkpoint_is_passed_over(
    name: str, damage: Callable[[str], Damage], run_folder: Path, commands: Commands
) -> None:
    """The run begins again, and comes to the same weights."""
    damage(f"{CHECKPOINT}/{name}")(run_folder)
    answer = commands.run(["run", "resume=runs/stopped"], run_folder.parents[1])
    assert answer.code == 0, answer.err
    assert "cannot be used" in " ".join(answer.err.split())
    assert "Traceback" not in answer.err
