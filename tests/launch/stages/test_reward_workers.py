"""Rewards by name in a configuration: which worker is made of `algorithm.roles.reward`."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.compose import resolved
from penstock.launch.inputs.data import load_data
from penstock.launch.stages.stages import stages_of
from penstock.launch.stages.worker_specs import check_options, worker_specs
from penstock.workers.rewards.judge import JudgeSpec
from penstock.workers.rewards.kinds import RULES
from penstock.workers.rewards.mixture import MixtureSpec

ROLE = "algorithm.roles.reward"
SMALL = ["task.num_train=20", "task.num_held_out=2", "algorithm.roles.actor.start=model"]


def reward_of(*words: str) -> Any:
    """The spec of a GRPO run's reward."""
    composed = compose("run", [*SMALL, *words])
    composed.pop("resume")
    run = resolved(composed)
    stage = stages_of(run)[-1]
    check_options(stage, run)
    return worker_specs(stage, run, load_data(run.task, run.model), {})["reward"]


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
            "    use reward_model or rule or exact or math or instructions or code or judge or "
            "mixture or module:factory",
        ),
    ],
)  # fmt: skip
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        reward_of(*words)
    assert str(raised.value).startswith(message)
