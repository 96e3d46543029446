"""Suites that a task names, and those that are configured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.configs.schema import EvaluationConfig
from penstock.configs.validate import validated
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.data import load_data
from penstock.launch.inputs.run import resolved
from penstock.launch.inputs.suites import Suite, suites_of
from penstock.launch.stages.prepare import metrics_of

from ..conftest import Penstock

KINDS = """
from dataclasses import dataclass
from penstock.workers.data.reasoning_task import ReasoningTask, ReasoningTaskSpec

class Kinds(ReasoningTask):
    def suites(self):
        return {"seen": self.held_out[::2], "unseen": self.held_out[1::2]}

@dataclass(frozen=True, kw_only=True)
class KindsSpec(ReasoningTaskSpec):
    def build(self):
        return Kinds(self)
"""
TASK = ("task.num_train=32", "task.num_held_out=10")


@pytest.fixture
def kinds(penstock: Penstock) -> tuple[str, ...]:
    """Words that choose a task of two kinds of problems, in the working directory."""
    del penstock  # which makes the working directory
    Path("kinds.py").write_text(KINDS)
    return (*TASK, "task.kind=kinds:KindsSpec")


def suites(*words: str, **evaluation: Any) -> tuple[Suite, ...]:
    composed = compose("run", [*words])
    composed.pop("resume")
    run = resolved(composed)
    config = validated(EvaluationConfig, evaluation, "evaluation")
    return suites_of(config, load_data(run.config.task, run.model))


@pytest.mark.slow
def test_a_task_without_suites_is_one_that_has_no_name() -> None:
    (whole,) = suites(*TASK, num_prompts=6)
    assert (whole.name, whole.is_own) == ("", True)
    assert whole.prompts.batch(0).prompt_id.tolist() == list(range(32, 38))
    assert (whole.sampling.temperature, whole.sampling.max_new_tokens) == (0.0, 5)


def test_a_tasks_own_suites_are_evaluated_apart(kinds: tuple[str, ...]) -> None:
    seen, unseen = suites(*kinds, num_prompts=4)
    assert (seen.name, unseen.name) == ("seen", "unseen")
    assert seen.prompts.batch(0).prompt_id.tolist() == [32, 34, 36, 38]
    assert unseen.prompts.batch(3).prompt_id.tolist() == [33, 35, 37, 39]


def test_a_configured_suite_has_its_own_problems_and_its_own_sampling() -> None:
    hard = {
        "kind": "reasoning_gym",
        "name": "chain_sum",
        "prompt_template": "{expression}=",
        "strip_spaces": True,
        "num_train": 3,
        "num_held_out": 7,
    }
    own, added = suites(
        *TASK,
        num_prompts=4,
        sampling={"temperature": 0.5, "num_samples": 2},
        suites={"hard": {"task": hard, "num_prompts": 5, "sampling": {"num_samples": 8}}},
    )
    assert added.prompts.batch(0).prompt_id.tolist() == [3, 4, 5, 6, 7]
    assert not added.is_own
    assert (added.sampling.temperature, added.sampling.num_samples) == (0.5, 8)
    assert (added.sampling.max_new_tokens, own.sampling.max_new_tokens) == (16, 5)
    assert metrics_of([own, added]) == [
        "accuracy",
        "pass@2",
        "hard/accuracy",
        "hard/pass@2",
        "hard/pass@4",
        "hard/pass@8",
    ]


def test_a_task_that_holds_out_nothing_is_asked_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "exam.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{n}=", "answer": str(n)}) + "\n" for n in "123")
    )
    exam = {"kind": "file", "path": str(file)}
    (_, added) = suites(*TASK, num_prompts=4, suites={"exam": {"task": exam}})
    assert added.prompts.num_prompts == 3


def test_a_suite_is_not_named_twice(kinds: tuple[str, ...]) -> None:
    exam = {"kind": "file", "path": "exam.jsonl"}
    with pytest.raises(ConfigError) as raised:
        suites(*kinds, num_prompts=4, suites={"seen": {"task": exam}})
    assert str(raised.value) == (
        "'evaluation.suites.seen': task 'chain_sum' names a suite 'seen' itself\n"
        "    choose another name"
    )


def test_a_suite_without_problems_is_refused(kinds: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        suites(*kinds, "task.num_held_out=1", num_prompts=4)
    assert str(raised.value) == (
        "suite 'unseen' of task 'chain_sum' has no problem that can be asked\n"
        "    raise task.max_prompt_tokens, or ask none: evaluation.num_prompts=0"
    )


@pytest.mark.slow
def test_a_run_says_how_each_suite_of_its_task_changed(
    penstock: Penstock, kinds: tuple[str, ...]
) -> None:
    said = penstock(
        "run",
        *kinds,
        "algorithm.num_steps=2",
        "algorithm.per_step.prompts=2",
        "algorithm.roles.actor.start=model",
        "model.architecture.num_hidden_layers=1",
        "evaluation.num_prompts=4",
        "tracker=none",
    )
    assert said.code == 0, said.err
    lines = [line.partition(",")[0] for line in said.err.splitlines()]
    assert "seen: 4 problems" in lines
    assert "unseen: 4 problems" in lines
    (run,) = Path("runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert list(summary["suites"]) == ["seen", "unseen"]
    assert summary["accuracy_before_rl"] is None
    assert len(summary["examples_after"]) == 8
