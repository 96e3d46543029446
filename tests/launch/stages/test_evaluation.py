"""Who answers held-out problems, and who scores the answers and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.compose import resolved
from penstock.launch.stages.evaluation import stage_evaluator
from penstock.launch.stages.job import prepare
from penstock.launch.stages.worker_specs import worker_specs
from penstock.workers.models.response_end import ResponseEnd
from penstock.workers.rewards.rule_reward import RuleRewardSpec

OPTIONS = "algorithm.roles.reward.options"


def verifier(folder: Path, *words: str) -> RuleRewardSpec:
    composed = compose("run", ["task.num_train=200", "task.num_held_out=8", *words])
    composed.pop("resume")
    job = prepare(resolved({**composed, "evaluation": {"num_prompts": 8}}))
    spec = stage_evaluator(job.main, job.suites, 4, folder).workers["verifier"]
    assert isinstance(spec, RuleRewardSpec)
    return spec


def test_held_out_answers_are_scored_with_the_options_of_the_stages_rule(tmp_path: Path) -> None:
    spec = verifier(
        tmp_path,
        f"{OPTIONS}.time_limit_s=0.5",
        f"{OPTIONS}={{num_processes:3,partial_credit:false}}",
    )
    assert (spec.time_limit_s, spec.num_processes, spec.partial_credit) == (0.5, 3, False)


STOP = "algorithm.cfg.sampling.stop=['=', '+']"


def test_answers_end_as_those_that_are_trained_on_unless_told_otherwise(tmp_path: Path) -> None:
    ids = "algorithm.cfg.sampling.stop_token_ids=[7]"
    composed = compose("run", ["task.num_train=200", "task.num_held_out=8", STOP, ids])
    composed.pop("resume")
    for told, strings, tokens in [
        ({}, ("=", "+"), (7,)),
        ({"stop": ["-"]}, ("-",), (7,)),
        ({"stop": [], "stop_token_ids": []}, (), ()),
    ]:
        evaluation = {"num_prompts": 8, "sampling": told}
        job = prepare(resolved({**composed, "evaluation": evaluation}))
        (suite,) = job.suites
        assert (suite.sampling.stop, suite.sampling.stop_token_ids) == (strings, tokens)
        workers: Any = stage_evaluator(job.main, job.suites, 4, tmp_path).workers
        for reader in ("verifier", "observer"):
            end = workers[reader].tokenizer.build().end
            assert (end.strings, end.ids) == (strings, (2, *tokens))
        specs: Any = worker_specs(job.main, job.run, job.data, {})
        assert specs["reward"].tokenizer.build().end == ResponseEnd((2, 7), ("=", "+"))


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_without_a_rule_they_are_scored_with_its_defaults(tmp_path: Path, algorithm: str) -> None:
    spec = verifier(tmp_path, f"algorithm={algorithm}")
    default = RuleRewardSpec(task=spec.task, tokenizer=spec.tokenizer)
    assert spec.time_limit_s == default.time_limit_s
    assert spec.num_processes == default.num_processes
