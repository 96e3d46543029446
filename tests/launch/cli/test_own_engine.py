"""An engine of somebody's own is chosen, planned for and run without a line of ours changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.main import main
from penstock.planner.plan.plan import Plan

from .own_engine import MEMORY_BYTES

STEP = (
    "algorithm=grpo",
    "algorithm.roles.actor.start=model",
    "algorithm.roles.reward.worker=rule",
    "algorithm.per_step.prompts=4",
    "algorithm.cfg.sampling.num_samples=2",
    "model=tiny",
    "task.num_train=32",
    "task.num_held_out=8",
)
RUN = (
    *STEP,
    "engine.kind=own_engine:ENGINE",
    "algorithm.num_steps=2",
    "evaluation.num_prompts=0",
    "tracker=none",
)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def planned(devices: int, file: Path) -> Plan:
    words = (
        *STEP,
        "engine.kind=own_engine:ENGINE",
        "rollout=same",
        "cluster=cpu",
        f"cluster.devices_per_node={devices}",
        f"output={file}",
    )
    assert main(["plan", *words]) == 0
    return Plan.read(file)


def trained(*words: str) -> tuple[str, Any]:
    assert main(["run", *RUN, *words]) == 0
    folder = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text())["weights_sha256"], rows


def test_it_is_planned_for_with_its_own_costs(tmp_path: Path) -> None:
    plan = planned(2, tmp_path / "two.json")
    assert {layout.num_devices for layout in plan.layouts.values()} == {1}
    assert plan.prediction is not None
    for memory in plan.prediction.memory.values():
        for parts in memory.transient_bytes.values():
            assert parts == {"activations": MEMORY_BYTES}


@pytest.mark.slow
def test_what_was_planned_runs_and_its_options_reach_its_workers(tmp_path: Path) -> None:
    planned(1, tmp_path / "plan.json")
    placement = f"placement={tmp_path / 'plan.json'}"
    slow, rows = trained(placement)
    assert [row["step"] for row in rows] == [0, 1]
    still, _ = trained(placement, "engine.options.lr_share=0.0")
    ours, _ = trained(placement, "engine.options.lr_share=1.0")
    assert len({slow, still, ours}) == 3


def test_what_it_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *RUN, "algorithm=ppo"]) == 2
    assert capsys.readouterr().err == (
        "penstock: engine=slow has no worker 'value'\n    it has: policy; engine=torch has: "
        "policy, value, reward_model, process_reward; engine=fsdp has: policy, value, "
        "reward_model; engine=megatron has: policy, value, reward_model\n"
    )
