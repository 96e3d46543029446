"""Rule rewards: scores, metrics, failures, time limits, and the same task on both sides."""

from __future__ import annotations

import logging
import math
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from penstock.algorithms.roles import Reward
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Metric
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.sources import DemonstrationSource
from penstock.workers.data.task import Task, fingerprint
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.rule_reward import RuleReward, RuleRewardSpec

from .responses import CONTEXT, TOKENIZER, rows, scores_of

SUMS = ReasoningTaskSpec(
    name="chain_sum", config={"max_terms": 3, "max_digits": 1}, num_train=40, num_held_out=10
)
MINE = """
import sys

def f(prompt, response, answer):
    if response == "loop":
        while True:
            pass
    if response == "raise":
        raise KeyError(prompt)
    if response == "exit":
        sys.exit(0)
    if response == "generator":
        raise GeneratorExit
    if response == "interrupt":
        raise KeyboardInterrupt
    if response == "large":
        return -1e300
    if response == "nearly":
        return 3e38
    return 1.0 if response == answer else -0.5
"""


def scored(
    task: FileTaskSpec, *responses: str, **options: Any
) -> tuple[list[float | None], RuleReward]:
    """What responses get of a reward that is closed then, and the reward."""
    every: dict[str, Any] = {"num_processes": 1, **options}
    reward = RuleRewardSpec(task=task, tokenizer=TokenizerSpec(), **every).build(CONTEXT)
    with closing(reward):
        return scores_of(reward, *responses), reward


def _file_task(folder: Path, reward: str, *, here: bool = False) -> FileTaskSpec:
    (folder / "rows.jsonl").write_text('{"prompt": "1/2+0=", "answer": "1/2"}\n')
    (folder / "mine.py").write_text(MINE)
    path, reward = str(folder / "rows.jsonl"), reward.format(folder=folder)
    return FileTaskSpec(path=path, reward=reward, reward_in_process=here)


def test_right_answers_score_one() -> None:
    spec = RuleRewardSpec(task=SUMS, tokenizer=TokenizerSpec())
    reward = pickle.loads(pickle.dumps(spec)).build(CONTEXT)
    assert isinstance(reward, Reward)
    task = SUMS.build()
    table = DemonstrationSource(task, TOKENIZER, batch_size=40, seed=0).batch(0)
    problem = {task.prompt_text(i) + (task.answer_text(i) or ""): i for i in task.train}
    whole = TOKENIZER.decode_rows(table.tokens)
    ids = [problem[text.removesuffix("<eos>")] for text in whole]
    score = reward.score(table.tokens, table.mask, torch.tensor(ids))
    assert score.dtype == torch.float32
    assert score.tolist() == [1.0] * 40
    assert drain_metrics(reward)["reward/correct"].value == 1.0
    assert drain_metrics(reward) == {}


def rule_reward(task: Task, **options: Any) -> RuleReward:
    spec = RuleRewardSpec(task=cast("Any", None), tokenizer=TokenizerSpec(), **options)
    return RuleReward(spec, task, TOKENIZER)


def test_metrics_and_partial_credit() -> None:
    task = SUMS.build()
    answer = task.answer_text(0) or ""
    table = rows(answer, f"{answer}, surely", "?", "")
    reward = rule_reward(task)
    part = len(answer) / len(f"{answer} surely")  # reasoning-gym takes commas out first
    assert reward.score(*table).tolist() == pytest.approx([1.0, part, 0.0, 0.0])
    metrics = {name: metric.value for name, metric in drain_metrics(reward).items()}
    assert metrics == pytest.approx(
        {
            "reward/mean": (1 + part) / 4,
            "reward/mean_square": (1 + part**2) / 4,
            "reward/equal_groups": 0.0,
            "reward/positive": 0.5,
            "reward/correct": 0.25,
            "reward/errors": 0.0,
            "reward/unscored": 0.0,
            "reward/timeouts": 0.0,
        }
    )
    strict = rule_reward(task, partial_credit=False)
    assert strict.score(*table).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert drain_metrics(strict)["reward/correct"].total == 1.0


def test_a_verifier_that_fails_is_counted_and_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    task = ReasoningTaskSpec(name="prime_factorization", num_train=5, num_held_out=1).build()
    reward = rule_reward(task)
    with caplog.at_level(logging.WARNING, logger="penstock.reward"):
        for _ in range(2):
            found = scores_of(reward, task.answer_text(0) or "", "x", "1/0")
            assert found == [1.0, None, None]
    metrics = drain_metrics(reward)
    assert metrics["reward/errors"].total == metrics["reward/unscored"].total == 4.0
    assert metrics["reward/mean"] == Metric.mean(2.0, 2.0)  # of those that have a score
    assert reward.first_error is not None
    assert "ValueError: invalid literal for int" in reward.first_error
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "the verifier of task 'prime_factorization' failed on a response. Such responses are not "
        "trained on, and never correct; reward/unscored counts them. It was:\n"
    )
    assert "Traceback" not in record.getMessage()
    assert "penstock/workers" not in record.getMessage()


def test_a_users_function_that_loops_or_fails_costs_its_own_rows(tmp_path: Path) -> None:
    before = set(psutil.Process().children())  # those of another test, if any are left
    task = _file_task(tmp_path, "{folder}/mine.py:f")
    responses = ("1/2", "loop", "raise", "no", "loop", "1/2")
    found, reward = scored(task, *responses, time_limit_s=1.0, num_processes=2)
    assert found == [1.0, None, None, -0.5, None, 1.0]
    metrics = drain_metrics(reward)
    assert metrics["reward/timeouts"].total == 2.0
    assert metrics["reward/errors"].total == 1.0
    assert metrics["reward/mean"].total == 1.5
    assert "KeyError: '1/2+0='" in (reward.first_error or "")
    assert set(psutil.Process().children()) <= before


@pytest.mark.slow
def test_math_verify_runs_in_the_pool(tmp_path: Path) -> None:
    task = _file_task(tmp_path, "math_verify")
    responses = ("it is $0.5$", "1/3", "", "$\\frac{{{", "9**9**9")
    found, _ = scored(task, *responses, time_limit_s=2.0)
    assert found == [1.0, 0.0, 0.0, 0.0, None]


@pytest.mark.slow
def test_a_verifier_that_evaluates_responses_runs_in_the_pool() -> None:
    spec = ReasoningTaskSpec(name="spiral_matrix", num_train=4, num_held_out=1, allow_eval=True)
    task = spec.build()
    tokens, mask, _ = rows(task.answer_text(2) or "", "[9**9**9**9]")
    with closing(rule_reward(task, num_processes=1, time_limit_s=2.0)) as reward:
        first, second = reward.score(tokens, mask, torch.tensor([2, 2])).tolist()
    assert (first, math.isnan(second)) == (1.0, True)
    assert drain_metrics(reward)["reward/timeouts"].total == 1.0


def test_another_task_than_the_prompts_is_refused() -> None:
    same = fingerprint(SUMS.build())
    RuleRewardSpec(task=SUMS, tokenizer=TokenizerSpec(), task_fingerprint=same).build(CONTEXT)
    spec = RuleRewardSpec(task=SUMS, tokenizer=TokenizerSpec(), task_fingerprint="0" * 16)
    with pytest.raises(WorkerError) as caught:
        spec.build(CONTEXT)
    assert str(caught.value) == (
        "role 'reward': task 'chain_sum' has other problems in this process than where its prompts "
        "come from, so answers would be scored against the wrong ones\n"
        "    set PYTHONHASHSEED=0, and see that all machines read the same data"
    )


def test_an_unknown_problem_is_refused() -> None:
    reward = rule_reward(SUMS.build())
    tokens, mask, _ = rows("1")
    for index in (50, -1):
        with pytest.raises(WorkerError) as caught:
            reward.score(tokens, mask, torch.tensor([index]))
        assert str(caught.value) == (
            f"prompt_id {index} is not a problem of task 'chain_sum', which has 50\n"
            "    give prompts and reward the same task"
        )


def test_a_verifier_of_ones_own_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task, name = _file_task(tmp_path, "{folder}/mine.py:f"), f"{tmp_path}/mine.py:f"
    scored(task, "raise", verifier=name)
    (record,) = caplog.records
    said = f"the verifier '{name}' of task 'rows' failed on a response. "
    assert record.getMessage().startswith(said)


def test_a_verifier_that_never_works_ends_the_run(tmp_path: Path) -> None:
    task = _file_task(tmp_path, "{folder}/mine.py:f")
    reward = RuleRewardSpec(task=task, tokenizer=TokenizerSpec(), num_processes=1).build(CONTEXT)
    with closing(reward):
        assert scores_of(reward, *["raise"] * 32) == [None] * 32
        with pytest.raises(WorkerError) as raised:
            scores_of(reward, *["raise"] * 32)
    told = str(raised.value).splitlines()
    assert told[0].startswith("the verifier of task '")
    assert told[0].endswith(
        "' gave 0 of the last 64 responses a score: it failed on 64. There is nothing to learn "
        "from that. The first one:"
    )
    assert told[-2] == "KeyError: '1/2+0='"
    assert told[-1].endswith(
        "if there is no score to give, name a score for such responses in the reward's options: "
        "unscored=0, or unscored=nan to train on the others alone"
    )


@pytest.mark.parametrize("here", [True, False])
def test_a_users_function_cannot_end_the_run(tmp_path: Path, here: bool) -> None:
    task = _file_task(tmp_path, "{folder}/mine.py:f", here=here)
    found, reward = scored(task, "exit", "generator", "1/2")
    assert found == [None, None, 1]
    assert drain_metrics(reward)["reward/errors"].total == 2.0
    assert (reward.first_error or "").endswith("SystemExit: 0")


def test_an_interrupt_in_this_process_is_not_taken_for_the_verifier_s(tmp_path: Path) -> None:
    task = _file_task(tmp_path, "{folder}/mine.py:f", here=True)
    with pytest.raises(KeyboardInterrupt):
        scored(task, "interrupt")


@pytest.mark.parametrize("here", [True, False])
def test_scores_beyond_float32_are_failures(tmp_path: Path, here: bool) -> None:
    task = _file_task(tmp_path, "{folder}/mine.py:f", here=here)
    told: list[str | None] = []
    for scale, expected in {1.0: [None, 3e38, 1.0], 2.0: [None, None, 2.0]}.items():
        found, reward = scored(task, "large", "nearly", "1/2", scale=scale)
        assert found == pytest.approx(expected)
        told.append(reward.first_error)
    assert told == [
        "the verifier returned -1e+300, which is beyond float32, whose largest number is "
        "3.40282e+38",
        "the verifier returned -1e+300, which times scale=2 is beyond float32, whose largest "
        "number is 3.40282e+38",
    ]


@pytest.mark.slow
def test_a_verifier_that_is_never_in_time_ends_the_run(tmp_path: Path) -> None:
    task = _file_task(tmp_path, "{folder}/mine.py:f")
    options: dict[str, Any] = {"num_processes": 4, "time_limit_s": 0.05, "scale": 1.0}
    with pytest.raises(WorkerError) as raised:  # after the first 64 of them
        scored(task, *["loop"] * 300, **options)
    assert str(raised.value) == (
        "the verifier of task 'rows' gave 0 of the last 64 responses a score: it ran out of time "
        "on 64. There is nothing to learn from that. The first one:\n"
        "no score within the time limit\n"
        "    see what it raises, returns or waits for (time_limit_s=0.05); if there is no score to "
        "give, name a score for such responses in the reward's options: unscored=0, or "
        "unscored=nan to train on the others alone"
    )
    with pytest.raises(WorkerError) as raised:
        scored(task, "loop", *["raise"] * 63, **options)
    assert "a score: it failed on 63, ran out of time on 1. There" in str(raised.value)
    assert "KeyError" in str(raised.value)  # not the time-out, which came first


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_processes": 257}, "num_processes is 257; expected at least 1 and at most 256"),
        ({"time_limit_s": 1e-4}, "time_limit_s is 0.0001; expected at least 0.001 and at most"),
        ({"time_limit_s": 90000.0}, "time_limit_s is 90000.0; expected at least 0.001 and at most"),
    ],
)
def test_limits_are_within_reason(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RuleRewardSpec(task=SUMS, tokenizer=TokenizerSpec(), **options)
