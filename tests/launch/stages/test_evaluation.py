"""Who answers held-out problems, and who scores the answers and how."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import resolved
from penstock.launch.stages.evaluation import Evaluator, evaluate
from penstock.launch.stages.prepare import prepare
from penstock.launch.stages.report import measured_text
from penstock.launch.stages.worker_specs import first_model, worker_specs
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.tokenizer import ResponseEnd
from penstock.workers.rewards.rule_reward import RuleRewardSpec

OPTIONS = "algorithm.roles.reward.options"


def verifier(folder: Path, *words: str) -> RuleRewardSpec:
    composed = compose("run", ["task.num_train=200", "task.num_held_out=8", *words])
    composed.pop("resume")
    job = prepare(resolved({**composed, "evaluation": {"num_prompts": 8}}))
    spec = Evaluator(job.suites, 4, folder, job.main).workers["verifier"]
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


@pytest.mark.slow
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
        workers: Any = Evaluator(job.suites, 4, tmp_path, job.main).workers
        for reader in ("verifier", "observer"):
            end = workers[reader].tokenizer.build().end
            assert (end.strings, end.ids) == (strings, (2, *tokens))
        specs: Any = worker_specs(job.main, job, {})
        assert specs["reward"].tokenizer.build().end == ResponseEnd((2, 7), ("=", "+"))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_without_a_rule_they_are_scored_with_its_defaults(tmp_path: Path, algorithm: str) -> None:
    spec = verifier(tmp_path, f"algorithm={algorithm}")
    default = RuleRewardSpec(task=spec.task, tokenizer=spec.tokenizer)
    assert spec.time_limit_s == default.time_limit_s
    assert spec.num_processes == default.num_processes


@pytest.mark.slow
@pytest.mark.parametrize("correct_score", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize(
    ("fault", "on"),
    [
        ("raise ValueError(response)", "ab"),
        ("return None", "ab"),
        ("return np.nan", "ab"),
        ("raise ValueError(response)", "abcdefgh"),
    ],
)
def test_an_answer_without_a_score_is_never_right(
    tmp_path: Path, correct_score: float, fault: str, on: str
) -> None:
    """The best value of a closeness is 0, so a failure must not count as 0."""
    (tmp_path / "close.py").write_text(
        "import numpy as np\n\ndef reward(prompt, response, answer):\n"
        f"    if prompt in '{on}':\n        {fault}\n    return np.float32({correct_score})\n"
    )
    rows = [{"prompt": each, "answer": "1"} for each in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [
        "task=file",
        f"task.path={tmp_path}/rows.jsonl",
        f"task.reward={tmp_path}/close.py:reward",
        "task.reward_in_process=true",
        "task.num_held_out=7",
        f"task.correct_score={correct_score}",
        "~algorithm.before",
        "algorithm.per_step.prompts=1",
    ]
    composed = compose("run", words)
    composed.pop("resume")
    job = prepare(resolved({**composed, "evaluation": {"num_prompts": 7}}))
    data = job.suites[0].data
    model = first_model(job.model, data)
    policy = TorchPolicySpec(
        model=model, end_ids=data.tokenizer.end.ids, num_words=data.tokenizer.vocab_size
    )
    (found,) = evaluate(policy, job.suites, 7).values()
    failed = [example["prompt"] in on for example in found.examples]
    assert [example["score"] is None for example in found.examples] == failed
    assert any(failed)
    share = sum(failed) / len(failed)
    assert found.accuracy == pytest.approx(1 - share)
    assert sum(found.correct.values()) == len(failed) - sum(failed)
    assert found.reward("unscored") == pytest.approx(share)
    assert all(map(math.isfinite, found.metrics.values()))  # as its file needs them
    assert f"no score {share:.1%}" in measured_text("", found)
