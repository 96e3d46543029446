"""Evaluations during a run and on demand, whole or interrupted, and what they change: nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.step_logs import read_metrics

from ..conftest import Penstock

TINY = (
    "algorithm.num_steps=8",
    "algorithm.per_step.prompts=4",
    "algorithm.roles.actor.start=model",
    "algorithm.optimizer.lr=0.003",
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=16",
    "model.architecture.num_hidden_layers=1",
    "task.num_train=64",
    "task.num_held_out=64",
    "tracker=none",
)
SAMPLED = "evaluation.sampling={num_samples: 4, temperature: 1.0}"
LONG_SUITE = (
    "+task@evaluation.suites.long.task=chain_sum",
    "evaluation.suites.long.task.num_train=1",
    "evaluation.suites.long.task.num_held_out=12",
    "evaluation.suites.long.task.config={min_terms: 4, max_terms: 4}",
    "evaluation.suites.long.sampling={num_samples: 2}",
)


def only_run(runs: str) -> Path:
    (run,) = Path(runs).iterdir()
    return run


def json_of(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_is_the_same_with_and_without_evaluations(penstock: Penstock, max_lag: int) -> None:
    words = (*TINY, "checkpoint_every=4", f"schedule.max_lag={max_lag}")
    assert penstock("run", *words, "runs=plain", "evaluation.num_prompts=0").code == 0
    said = penstock(
        "run",
        *words,
        *LONG_SUITE,
        SAMPLED,
        "runs=measured",
        "evaluation.num_prompts=16",
        "evaluation.every=3",
        "evaluation.keep_best=long/pass@2",
        "keep_checkpoints=1",
    )
    assert said.code == 0, said.err
    plain, run = only_run("plain"), only_run("measured")
    summary = json_of(run / "summary.json")
    assert summary["weights_sha256"] == json_of(plain / "summary.json")["weights_sha256"]
    before, after = (json_of(plain / "summary.json"), summary)
    assert before["suites"] == {}
    assert after["suites"]["long"]["num_problems"] == 12
    assert after["suites"][""]["num_samples"] == 4
    lines = said.err.splitlines()
    (held_out,) = [line for line in lines if line.startswith("held out: 16 problems, accuracy ")]
    assert "pass@4" in held_out
    (long,) = [line for line in lines if line.startswith("long: 12 problems, accuracy ")]
    assert "points (95 % interval " in long
    names = {"evaluation/accuracy", "evaluation/pass@4", "evaluation/long/pass@2"}
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["step"] for row in rows if names <= set(row)] == [0, 3, 6, 8]
    found = sorted(file.name for file in (run / "evaluations").iterdir())
    assert found == [f"step-{step:08d}.json" for step in (0, 3, 6, 8)]
    kept = {file.name for file in (run / "checkpoints").iterdir()}
    assert "step-00000008" in kept
    assert len(kept) == 2, "the newest, and the best"


@pytest.mark.slow
def test_a_plain_run_says_what_it_said(penstock: Penstock) -> None:
    said = penstock("run", *TINY, "evaluation.num_prompts=16", "algorithm.num_steps=2")
    assert said.code == 0, said.err
    assert "held-out loss" not in said.err
    assert " on 16 held-out problems, " in said.err.splitlines()[-1]
    assert "held-out reward" not in said.err, "it is the accuracy"
    run = only_run("runs")
    rows = read_metrics(run / "metrics.jsonl")
    assert not any(name.startswith("evaluation/") for row in rows for name in row)


@pytest.mark.slow
def test_a_reward_that_is_no_share_of_right_answers_is_said_beside_the_accuracy(
    penstock: Penstock,
) -> None:
    Path("low.py").write_text("def low(prompt, response, answer):\n    return -0.5\n")
    words = (*TINY, "evaluation.num_prompts=16", "algorithm.num_steps=2")
    said = penstock("run", *words, "algorithm.roles.reward.options.verifier=low.py:low")
    assert said.code == 0, said.err
    assert (
        "accuracy 0.0% -> 0.0% on 16 held-out problems, held-out reward -0.5 -> -0.5, "
        in said.err.splitlines()[-1]
    )
    summary = json_of(only_run("runs") / "summary.json")
    assert (summary["reward_before_rl"], summary["reward_after_rl"]) == (-0.5, -0.5)


@pytest.mark.slow
def test_a_run_ends_when_it_no_longer_improves(penstock: Penstock) -> None:
    said = penstock(
        "run",
        *TINY,
        "evaluation.num_prompts=16",
        "evaluation.every=2",
        "evaluation.keep_best=accuracy",
        "evaluation.stop_after=2",
        "algorithm.optimizer.lr=1e-9",
    )
    assert said.code == 0, said.err
    sentence = "stopped after 4 of 8 steps: evaluation/accuracy has not improved in 2 evaluations"
    assert sentence in said.err.splitlines()
    run = only_run("runs")
    summary = json_of(run / "summary.json")
    assert (summary["num_steps"], summary["stopped"]) == (4, sentence)
    assert (run / "models" / "actor" / "model.safetensors").is_file()
    # A process that is killed before it has written its summary comes to the same end.
    (run / "summary.json").unlink()
    again = penstock("run", f"resume={run}")
    assert again.code == 0, again.err
    assert sentence in again.err.splitlines()
    assert json_of(run / "summary.json")["weights_sha256"] == summary["weights_sha256"]


@pytest.mark.slow
def test_on_demand_a_run_is_measured_as_it_measured_itself(penstock: Penstock) -> None:
    words = (*TINY, *LONG_SUITE, SAMPLED, "evaluation.num_prompts=16", "evaluation.every=4")
    assert penstock("run", *words, "checkpoint_every=4").code == 0
    run = only_run("runs")
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    for step in (4, None):
        which = () if step is None else (f"step={step}",)
        said = penstock("eval", f"run={run}", *which, "output=found.json")
        assert said.code == 0, said.err
        found = json_of(Path("found.json"))
        assert found["step"] == (step or 8)
        recorded = json_of(run / "evaluations" / f"step-{found['step']:08d}.json")["suites"]
        for name, suite in recorded.items():
            assert found["suites"][name]["scores"] == suite["scores"]
            assert found["suites"][name]["correct"] == suite["correct"]
            assert found["suites"][name]["accuracy"] == suite["accuracy"]
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()} == before
    assert said.out.count("    since before training: accuracy ") == 2
    said = penstock("eval", f"run={run}", "evaluation.num_prompts=5", "evaluation.suites={}")
    assert said.out.splitlines()[-1].startswith("held out: 5 problems, accuracy "), said.err
    model = (f"model.folder={run / 'models' / 'actor'}", "model=folder")
    said = penstock("eval", *model, *TINY[-3:], "evaluation.num_prompts=5", "output=model.json")
    assert said.code == 0, said.err
    assert said.out.splitlines()[-3] == "model:"


# --- refusals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluation.keep_best=accuracy"],
         "'evaluation': keep_best is set, but every is null, so no step is evaluated"),
        (["evaluation.every=2", "evaluation.stop_after=2"],
         "'evaluation': stop_after is set, but keep_best does not say which metric improves"),
        (["evaluation.every=2", "evaluation.keep_best=acuracy"],
         "'evaluation.keep_best': 'acuracy' is not measured; did you mean 'accuracy'?\n    what "
         "is: accuracy"),
        (["evaluation.sampling.num_samples=4"],
         "'evaluation.sampling.num_samples' is 4, but at temperature 0 all samples of a prompt "
         "are the same\n    set temperature above 0 as well"),
        ([*LONG_SUITE, "evaluation.suites.long.num_prompts=13"],
         "'evaluation.suites.long.num_prompts' is 13, but task 'chain_sum' has 12 problems to "
         "ask\n    ask for fewer"),
        (["evaluation.suites.long.task.kind=cartpole"],
         "'evaluation.suites.long.task': 'task.kind': there is no task kind 'cartpole'\n    task "
         "kinds are: reasoning_gym, file, hf, instructions, calculator, maze, twenty_questions, "
         "search, table_questions, gymnasium_text, verifiers, openenv, tools, program, mixture, "
         "gymnasium, board_game, library_game, or module:name for your own"),
        (["+task@evaluation.suites.pole.task=cartpole"],
         "'evaluation.suites.pole.task': a 'gymnasium' task has no prompts\n    give one of "
         "problems"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(
    penstock: Penstock, words: list[str], expected: str
) -> None:
    said = penstock("run", *TINY, "evaluation.num_prompts=8", *words)
    assert (said.code, said.err) == (2, f"penstock: {expected}\n")
    assert not Path("runs").exists()


# --- killed


def wait_for_evaluation(run_parent: Path, step: int, *, deadline_s: float = 120.0) -> None:
    """Wait until the evaluation after so many steps is under way."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        for file in run_parent.glob("*/metrics.jsonl"):
            if any(row["step"] == step - 1 for row in read_metrics(file)):
                time.sleep(0.4)  # the checkpoint of that step is written first
                return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached within {deadline_s} s")


@pytest.mark.nightly
@pytest.mark.parametrize(("checkpoint_every", "max_lag"), [(4, 0), (3, 1)])
def test_a_run_killed_while_it_evaluates_evaluates_again(
    penstock: Penstock, tmp_path: Path, checkpoint_every: int, max_lag: int
) -> None:
    words = (
        *TINY,
        "task.num_held_out=512",
        f"checkpoint_every={checkpoint_every}",
        f"schedule.max_lag={max_lag}",
    )
    measured = (*words, "evaluation.every=4", "evaluation.sampling={num_samples:24,temperature:1}")
    assert penstock("run", *words, "runs=plain", "evaluation.num_prompts=0").code == 0
    assert penstock("run", *measured, "runs=whole").code == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.launch.main", "run", *measured],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_evaluation(tmp_path / "runs", 4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    run, whole = only_run("runs"), only_run("whole")
    file = Path("evaluations/step-00000004.json")
    assert (run / "evaluations" / "step-00000000.json").is_file()
    assert not (run / file).exists(), "it was killed in the middle of the evaluation"
    said = penstock("run", f"resume={run}")
    assert said.code == 0, said.err
    summary = json_of(run / "summary.json")
    assert summary["first_step"] == checkpoint_every
    assert (
        summary["weights_sha256"] == json_of(only_run("plain") / "summary.json")["weights_sha256"]
    )
    assert json_of(run / file) == json_of(whole / file)
    assert summary["suites"] == json_of(whole / "summary.json")["suites"]
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "evaluation/accuracy" in row] == [0, 4, 8]
