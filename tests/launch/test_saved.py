"""What earlier code has written is still read: half of a run, an adapter, a calibration.

`saved/` was written at commit dc6949f0 on a processor with AVX-512, by the commands that begin with
`RUN` and `ADAPTED`, `penstock export adapter=true` and `penstock profile`; `saved/hashes.json` has
the weights that the same code made of it on an Intel processor, and commit 6143ad33, which equals
it there, on one by AMD: products of matrices add up in another order on each. It is never written
anew: code that reads it otherwise breaks the runs of users.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Penstock

SAVED = Path(__file__).with_name("saved")
HASHES: dict[str, Any] = json.loads((SAVED / "hashes.json").read_text())
RUN = (
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=32",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=1",
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=8",
    "algorithm.num_steps=4",
    "checkpoint_every=2",
    "algorithm.per_step.prompts=4",
    "algorithm.cfg.sampling.num_samples=4",
    "algorithm.optimizer.lr=0.01",
    "algorithm.before.sft.num_steps=3",
    "algorithm.before.sft.per_step.demos=8",
    "tracker=none",
)
ADAPTED = (
    "algorithm=reference_grpo",
    "~algorithm.before",
    "algorithm.roles.actor.start=model",
    "model=folder",
    "model.folder=grpo/stages/sft/models/actor",
    "model.dtype=float32",
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=0",
    "algorithm.num_steps=1",
    "algorithm.per_step.prompts=4",
    "algorithm.optimizer.lr=0.01",
    "tracker=none",
)


def weights_of(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


def check(name: str, run: Path) -> None:
    """The weights are the same where the processor computes as one does that was recorded."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        found = re.search(r"vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text())
        recorded = found and HASHES[name].get(found[1])
        assert not recorded or weights_of(run) == recorded


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(penstock: Penstock, saved: Path) -> None:
    said = penstock("run", "resume=grpo", "executor.num_threads=1")
    assert said.code == 0, said.err
    assert json.loads((saved / "grpo" / "summary.json").read_text())["first_step"] == 2
    check("grpo", saved / "grpo")


@pytest.mark.slow
def test_a_run_is_measured_and_exported_at_its_checkpoint(penstock: Penstock, saved: Path) -> None:
    said = penstock("eval", "run=grpo", "output=found.json")
    assert said.code == 0, said.err
    said = penstock("export", "run=grpo", "output=model")
    assert said.code == 0, said.err
    exported = (saved / "model" / "model.safetensors").read_bytes()
    assert len(exported) == 12008
    card = (saved / "model" / "README.md").read_text()
    assert HASHES["grpo at step 2"] in card


@pytest.mark.slow
def test_a_run_goes_on_from_an_adapter(penstock: Penstock, saved: Path) -> None:
    words = (*ADAPTED, "model.lora.folder=adapter", "executor.num_threads=1")
    said = penstock("run", *words, "runs=adapted")
    assert said.code == 0, said.err
    (run,) = (saved / "adapted").iterdir()
    check("adapter", run)


@pytest.mark.slow
@pytest.mark.usefixtures("saved")
def test_a_plan_reads_a_calibration(penstock: Penstock) -> None:
    words = ("algorithm=ppo", "model=tiny", "cluster=measured", "plan.calibration=calibration.json")
    said = penstock("plan", *words, "--json")
    assert said.code == 0, said.err
    plan: dict[str, Any] = json.loads(said.out)
    assert plan["step_time_s"] == pytest.approx(float(HASHES["planned step_time_s"]))
