"""Rewards by name in a configuration: which worker is made of `algorithm.roles.reward`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.roles.language import Reward
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.data import load_data
from penstock.launch.inputs.run import resolved
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.worker_specs import check_options, worker_specs
from penstock.workers.rewards.judge import JudgeSpec
from penstock.workers.rewards.mixture import MixtureSpec
from penstock.workers.rewards.registry import RULES
from penstock.workers.rollout.scores import CheckedRewardSpec

ROLE = "algorithm.roles.reward"
TOKENS = torch.zeros(40, 2, dtype=torch.int64)
SMALL = ["task.num_train=20", "task.num_held_out=2", "algorithm.roles.actor.start=model"]


def reward_of(*words: str) -> Any:
    """The spec of a GRPO run's reward."""
    composed = compose("run", [*SMALL, *words])
    composed.pop("resume")
    run = resolved(composed)
    stage = build_stages(run).stages[-1]
    check_options(stage, run)
    run = replace(run, data=load_data(run.config.task, run.model))
    return worker_specs(stage, run, {})["reward"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RULES])
def test_rules(name: str) -> None:
    made = reward_of(f"{ROLE}.worker={name}", f"{ROLE}.options.scale=10.0")
    assert type(made) is RULES[name]
    assert made.scale == 10.0
    assert made.task_fingerprint is not None


def test_a_rule_may_be_given_a_verifier_with_options() -> None:
    made = reward_of(
        f"{ROLE}.options.verifier=instructions", f"{ROLE}.options.verifier_options.mode=loose"
    )
    assert (made.verifier, made.verifier_options) == ("instructions", {"mode": "loose"})


def test_a_judge_s_model_is_the_user_s_to_name() -> None:
    made = reward_of(
        f"{ROLE}.worker=judge",
        f"{ROLE}.options.url=http://127.0.0.1:8000/v1",
        f"{ROLE}.options.model=big",
        f"{ROLE}.options.concurrency=4",
    )
    assert isinstance(made, JudgeSpec)
    assert (made.model, made.concurrency) == ("big", 4)


@pytest.mark.parametrize("kind", ["trl", "rule", "mixture"])
def test_a_function_of_a_whole_batch_is_one_call(tmp_path: Path, kind: str) -> None:
    mine = f"{tmp_path}/mine.py"
    (tmp_path / "mine.py").write_text(
        "def one(response):\n    return 1.0\n\ndef all(completions, **columns):\n    return []\n"
    )
    part = f"{{worker: trl, options: {{verifier: '{mine}:all'}}}}"
    words = {
        "rule": ["task=file", "task.path=x.jsonl", f"task.reward=['{mine}:one','{mine}:all']"],
        "trl": [f"{ROLE}.options.verifier='{mine}:all'"],
        "mixture": [f"{ROLE}.options.parts={{all: {part}}}"],
    }
    for is_whole in (True, False):
        given = [word if is_whole else word.replace(":all", ":one") for word in words[kind]]
        given = [word.replace(f",'{mine}:one'", "") for word in given]
        small = SMALL if kind != "rule" else SMALL[2:]
        composed = compose("run", [*small, *given, f"{ROLE}.worker={kind}"])
        composed.pop("resume")
        stage = build_stages(resolved(composed)).stages[-1]
        assert (stage.graph["reward.score"].scope == "batch") == is_whole


def test_a_mixture_has_parts() -> None:
    made = reward_of(
        f"{ROLE}.worker=mixture",
        f"{ROLE}.options.parts.correct.worker=math",
        f"{ROLE}.options.parts.correct.weight=2",
        f"{ROLE}.options.parts.short.worker=instructions",
        f"{ROLE}.options.parts.short.at_least=1",
    )
    assert isinstance(made, MixtureSpec)
    parts = made.checked()
    assert (parts["correct"].weight, parts["short"].at_least) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [f"{ROLE}.worker=judge", f"{ROLE}.options.model=m"],
            f"'{ROLE}.options': a judge needs an address and a model, got url='', model='m'; such "
            "as url=http://127.0.0.1:8000/v1 model=NAME",
        ),
        (
            [f"{ROLE}.worker=math", f"{ROLE}.options.scales=2"],
            f"there is no key '{ROLE}.options.scales'; did you mean '{ROLE}.options.scale'?",
        ),
        (
            [f"{ROLE}.worker=mixture", f"{ROLE}.options.parts.a.worker=exact",
             f"{ROLE}.options.output=passed"],
            f"'{ROLE}.options': output 'passed' needs a part with at_least, which is a constraint",
        ),
        (
            [f"{ROLE}.worker=math", f"{ROLE}.start=model"],
            f"'{ROLE}.start' is set, but 'math' has no weights\n"
            f"    leave it out, or set {ROLE}.worker=reward_model",
        ),
        (
            [f"{ROLE}.worker=process_reward"],
            f"'{ROLE}.worker': role 'reward' is a Reward, which 'process_reward' is not\n"
            "    use reward_model or rule or exact or math or instructions or code or trl or judge "
            "or served or mixture or module:factory",
        ),
    ],
)  # fmt: skip
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        reward_of(*words)
    assert str(raised.value).startswith(message)


class Sparse(Reward):
    """Gives the first responses of a batch a score, and the others none."""

    def __init__(self, num_scored: int) -> None:
        self.num_scored = num_scored

    def score(self, tokens: torch.Tensor, mask: torch.Tensor, prompt_id: torch.Tensor) -> Any:
        rows = torch.arange(len(tokens))
        return torch.where(rows < self.num_scored, 1.0, torch.nan)


def test_an_own_reward_that_scores_hardly_anything_ends_the_run() -> None:
    def scored(num_scored: int) -> Any:
        made = CheckedRewardSpec("mine:Sparse", Sparse(num_scored)).build(WorkerContext("reward"))
        assert isinstance(made, Sparse)
        given = {"tokens": TOKENS, "mask": TOKENS > 0, "prompt_id": TOKENS[:, 0]}
        return [made.score(**given).isnan().sum().item() for _ in range(2)]

    assert scored(3) == [37, 37]
    with pytest.raises(WorkerError) as raised:
        scored(1)
    assert str(raised.value) == (
        "the reward 'mine:Sparse' gave 2 of the last 80 responses a score: it could not say on 78. "
        "There is nothing to learn from that. The first one:\n`score` returned nan for it\n"
        "    have it return a number, not nan, for responses that are to be learned from"
    )
