"""What the page says of one run, and what it says where files lack something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.evaluations import Evaluations, Measured
from penstock.launch.run_dir.step_logs import EVENTS, EventLog

from .conftest import Ask
from .folders import add_steps, new_run


def test_a_run_that_has_not_begun_says_what_is_missing(runs: Path, ask: Ask) -> None:
    run = new_run(runs, plan={"groups": [{"name": "all"}]})
    said = ask("overview", run=run.id)
    assert said["about"]["state"] == "not running"
    assert (said["about"]["seed"], said["about"]["code"]) == (3, "0.1.0 (abc)")
    absent = {name: part["absent"] for name, part in said.items() if "absent" in part}
    assert absent == {
        "last_step": "metrics.jsonl: there is none",
        "evaluations": "nothing has been evaluated yet, or evaluation is switched off",
        "results": "there is no summary.json: it is written at the end",
        "suites": "they are compared at the end",
        "warnings": "it has warned of nothing",
        "memory": "its plan was not predicted, and what was used is written at the end",
    }


def test_everything_its_files_hold(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_steps(run.path, range(3))
    kept = Evaluations(run.path)
    right = {"": Measured({}, 0.5, scores={"1": [1.0, 0.0]}, correct={"1": 1})}
    kept.write(0, right)
    kept.write(2, right)
    suites = {"": {"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5}}}
    run.write_summary({"num_steps": 3, "suites": suites, "peak_memory_bytes": 600, "resumed": True})
    said = ask("overview", run=run.id)
    assert said["last_step"]["rewards"] == {"reward/mean": 0.838}
    assert said["last_step"]["lag"] == {"run/lag_max": 1.0}
    assert said["placement"]["groups"] == [{"name": "all"}]
    rows = said["evaluations"]["rows"]
    assert [row["step"] for row in rows] == [0, 2]
    assert rows[0]["suites"] == {"": {"accuracy": 0.5, "pass@2": 1.0}}
    assert said["suites"] == suites
    assert said["events"]["resumed"] is True
    assert said["results"] == {"num_steps": 3, "peak_memory_bytes": 600, "resumed": True}
    assert said["memory"]["peak_memory_bytes"] == 600
    group = said["memory"]["groups"]["all"]
    assert (group["peak_bytes"], group["capacity_bytes"]) == (350, 1000)
    assert group["resident_bytes"] == {"actor": 300}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "[" * 10_000])
@pytest.mark.parametrize("name", ["plan.json", "summary.json", "run.json", "metrics.jsonl"])
def test_no_damaged_file_ends_the_page(runs: Path, ask: Ask, name: str, text: str) -> None:
    run = new_run(runs)
    (run.path / name).write_text(text)
    for view in ("overview", "timeline", "runs", "metrics"):
        assert isinstance(ask(view, run=run.id), dict)


@pytest.mark.parametrize(
    "plan",
    [
        {"prediction": 3},
        {"prediction": {"memory": 3, "nodes": [], "step_time_s": "x"}},
        {"prediction": {"memory": {"all": None}, "nodes": {"a": 3}}},
        {"prediction": {"memory": {"all": {"resident_bytes": {"a": 3}}}}},
        {"groups": 3, "nodes": 3},
    ],
)
def test_no_damaged_plan_ends_the_page(runs: Path, ask: Ask, plan: dict[str, Any]) -> None:
    run = new_run(runs)
    run.plan.write_text(json.dumps(plan))
    said = ask("overview", run=run.id)
    assert said["about"]["name"] == "grpo"
    assert isinstance(ask("timeline", run=run.id), dict)


def test_a_damaged_evaluation_leaves_the_others(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    kept = Evaluations(run.path)
    kept.write(1, {"": Measured({}, 0.5)})
    kept.write(2, {"": Measured({}, 0.75)})
    (run.path / "evaluations" / "step-00000001.json").write_text("{")
    (run.path / "evaluations" / "step-none.json").write_text("{")
    first, second = ask("overview", run=run.id)["evaluations"]["rows"]
    assert "cannot be read" in first["absent"]
    assert second["suites"] == {"": {"accuracy": 0.75}}


def test_what_a_run_warned_of_comes_with_what_to_do(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    assert ask("overview", run=run.id)["warnings"] == {"absent": "it has warned of nothing"}
    sign = {"kind": "cut_off", "node": "a.b", "seen": "all", "means": "bad", "remedy": "more"}
    log = EventLog(run.path / EVENTS)
    for step in range(60):
        log.write({**sign, "first_step": step - 2, "step": step})
    said = ask("overview", run=run.id)["warnings"]
    assert (len(said["rows"]), said["num_warnings"]) == (50, 60)
    assert said["rows"][-1] == {
        "stage": "",
        "node": "a.b",
        "seen": "all",
        "means": "bad",
        "remedy": "more",
        "first_step": 57,
        "step": 59,
    }
    (run.path / EVENTS).write_text("{\n")
    assert "expected a JSON object" in ask("overview", run=run.id)["warnings"]["absent"]
