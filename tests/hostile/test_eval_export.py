"""What `penstock eval` and `penstock export` refuse: runs, steps, suites, folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import SMALL, Refused
from .damage import BAD, cut, remove, write

pytestmark = pytest.mark.slow

EVAL = """\
run=nowhere
run=/dev/null
run=3
run=''
run=[runs/stopped]
run=runs/stopped step=3
run=runs/stopped step=-1
run=runs/stopped step=1.5
run=runs/stopped step=latest
run=runs/stopped step=best
run=runs/stopped seed=3
run=runs/stopped task=cartpole
run=runs/stopped evaluation.every=0
run=runs/stopped evaluation.num_prompts=1.5
run=runs/stopped evaluation.num_prompts=0
run=runs/stopped evaluation.suites.a.num_prompts=3
run=runs/stopped evaluation.suites.a.task.kind=nope
run=runs/stopped evaluation.suites.a.task.kind=file
run=runs/stopped evaluation.suites.a.task={kind:file,path:/nope.jsonl}
run=runs/stopped +task@evaluation.suites.a.task=nope
run=runs/stopped +task@evaluation.suites.a.task=cartpole
run=runs/stopped evaluation.suites={'a/b':{task:{kind:file}}}
run=runs/stopped evaluation.suites=3
run=runs/stopped ~evaluation
run=runs/stopped output=/nope/file.json
run=runs/stopped output=runs
step=2
resume=runs/stopped
task=cartpole model=mlp
model=folder
model=folder model.folder=/nope
evaluation.sampling.temperature=-1
evaluation.sampling.num_samples=0
evaluation.sampling.num_samples=4
evaluation.sampling=3
evaluation.sampling.max_new_tokens=100000
""".splitlines()

EXPORT = """\
run=nowhere
run=3
run=runs/stopped step=3
run=runs/stopped step=best
run=runs/stopped step=worst
run=runs/stopped role=nobody
run=runs/stopped output=runs
run=runs/stopped output=runs/stopped/run.json
run=runs/stopped output=/nope/folder
run=runs/stopped output=/proc/folder
run=runs/stopped output=''
run=runs/stopped push=name
run=runs/stopped push=a/b/c
run=runs/stopped push=org/name
run=runs/stopped bogus=1
run=runs/stopped private=maybe
""".splitlines()

KEYS = """\
evaluation.every=0
evaluation.every=x
evaluation.keep_best=accuracy
evaluation.every=1 evaluation.num_prompts=4 evaluation.keep_best=nope/accuracy
evaluation.every=1 evaluation.keep_best=''
evaluation.every=1 evaluation.stop_after=2
evaluation.every=1 evaluation.keep_best=accuracy evaluation.stop_after=0
evaluation.suites.a.task=chain_sum
evaluation.suites.a={}
""".splitlines()


@pytest.fixture(autouse=True)
def run_folder(stopped: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped, tmp_path / "runs" / "stopped"))


@pytest.mark.parametrize("words", EVAL)
def test_eval(words: str, refused: Refused) -> None:
    small = () if "run=" in words else ("task.num_train=32", "task.num_held_out=600")
    refused(["eval", *small, *words.split(" ")])


@pytest.mark.parametrize("words", EXPORT)
def test_export(words: str, refused: Refused) -> None:
    refused(["export", *words.split(" ")])


@pytest.mark.parametrize("words", KEYS)
def test_keys_of_a_run(words: str, refused: Refused) -> None:
    refused(["run", *SMALL, *words.split(" ")])


DAMAGES = {
    "no run.json": remove("run.json"),
    "config.yaml is cut": cut("config.yaml", after=b"\nmodel:"),
    "plan.json is cut": cut("plan.json"),
    "checkpoints are gone": remove("checkpoints"),
    "a checkpoint is cut": cut("checkpoints/step-00000002/actor/weights.safetensors"),
    "checkpoints is a file": write("checkpoints", BAD["a list"]),
}


@pytest.mark.parametrize("command", ["eval", "export"])
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged(command: str, name: str, run_folder: Path, refused: Refused) -> None:
    DAMAGES[name](run_folder)
    refused([command, "run=runs/stopped"])
