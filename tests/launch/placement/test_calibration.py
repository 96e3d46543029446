"""A run as a calibration: what it measured of its own plan corrects the next prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.dataflow import build
from penstock.dataflow.errors import PlanError
from penstock.launch.placement.machine import read_calibration
from penstock.planner.cost.calibration import CPU_DEFAULTS, Calibration
from penstock.planner.inputs.calls import Lengths, Workload
from penstock.planner.inputs.model_shape import shape_of
from penstock.planner.plan.plan import Plan, one_group_plan
from penstock.planner.plan.planner import plan_step

from .test_place import calibration

GRAPH = build(grpo_step, cfg=GRPO())
SHAPE = shape_of(
    {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 64,
    },
    dtype="float32",
)  # fmt: skip


def planned(found: Calibration) -> Plan:
    return plan_step(
        GRAPH,
        dict.fromkeys(GRAPH.roles, SHAPE),
        found.cluster,
        Workload(num_prompts=8, prompt=Lengths.constant(32), response=Lengths.constant(32)),
        max_lag=0,
        constants=found.constants_for([SHAPE]),
    )


def durations(plan: Plan) -> dict[str, float]:
    assert plan.prediction is not None
    return plan.prediction.durations_s


def run_of(folder: Path, plan: Plan, measured: dict[str, float]) -> Path:
    folder.mkdir()
    (folder / "plan.json").write_text(plan.model_dump_json(exclude_defaults=True))
    nodes = {name: {"measured_s": seconds} for name, seconds in measured.items()}
    (folder / "summary.json").write_text(json.dumps({"nodes": {**nodes, "op": {}}}))
    return folder


def test_the_next_plan_predicts_what_the_last_run_measured(tmp_path: Path) -> None:
    first = planned(calibration(2))
    factors = {"generate": 3.0, "train": 0.5, "score": 2.0}
    took = {name: s * factors[name.rpartition(".")[2]] for name, s in durations(first).items()}
    found = read_calibration(run_of(tmp_path / "one", first, took))
    again = planned(found)
    assert again.layouts == first.layouts
    # Moving weights to where they generate is no part of the call, and is not corrected.
    assert durations(again) == pytest.approx(took, rel=0.01)
    assert again.prediction is not None
    assert again.prediction.calibration == "learned from one"
    # What was learned is what the next run is measured against.
    worse = {name: 2.0 * seconds for name, seconds in took.items()}
    last = read_calibration(run_of(tmp_path / "two", again, worse))
    assert durations(planned(last)) == pytest.approx(worse, rel=0.01)
    assert last.constants.corrections["generate"] == pytest.approx(6.0, rel=0.02)


def test_a_calibration_that_is_a_file_is_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(calibration(2).model_dump_json())
    assert read_calibration(tmp_path / "measured.json") == calibration(2)


def test_folders_that_say_nothing_are_refused(tmp_path: Path) -> None:
    plan = planned(calibration(2))
    empty = tmp_path / "empty"
    empty.mkdir()
    running = run_of(tmp_path / "running", plan, {})
    (running / "summary.json").unlink()
    by_hand = run_of(tmp_path / "hand", one_group_plan(), {})
    idle = run_of(tmp_path / "idle", plan, {})
    for folder, said in {
        empty: "it is no run's folder\n    give runs/ID, or the file of a profile",
        running: "the run has not ended\n    wait for it, or take another",
        by_hand: "its plan predicts nothing\n    take a run that the planner has placed",
        idle: "no predicted call was measured\n    take a run that made a step",
    }.items():
        with pytest.raises(PlanError) as caught:
            read_calibration(folder)
        assert str(caught.value) == f"calibration {folder}: {said}"


def test_constants_without_corrections_are_as_before() -> None:
    assert CPU_DEFAULTS.corrections == {}
