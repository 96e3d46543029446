"""Groups that cannot be restarted exactly are named before the start, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import pytest
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.inputs.data import load_data
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.report import not_exact

from ...workers.envs.toys import Worldly
from .test_stages import config_of

APART = (
    "executor=ray",
    "executor.groups={train:1,rollout:1}",
    "executor.nodes={actor.generate:rollout}",
)


def named(*words: str, schedule: Schedule | None = None, **task: Any) -> list[str]:
    run = config_of(*words)
    data = load_data(run.config.task, run.model)
    for name, value in task.items():
        setattr(data.task, name, value)
    run = replace(build_stages(run), data=data)
    return not_exact(run.having(schedule=schedule or run.config.schedule), tries=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("schedule.max_lag=2",),
        ("algorithm=env_ppo", "task=cartpole", "model=mlp"),
        ("algorithm=agent_grpo", "task=calculator"),
    ],
)
def test_what_follows_from_seeds_is_exact(words: tuple[str, ...]) -> None:
    assert named(*words) == []


@pytest.mark.slow
def test_weights_that_come_by_timing_are_named_with_the_group_that_samples() -> None:
    assert named(*APART, schedule=Schedule(max_lag=1, order="arrival")) == [
        "group 'rollout' cannot be restarted exactly: which weights its calls read depends on "
        "timing (schedule.order=arrival); to change that: schedule.order=step"
    ]
    (line,) = named(*APART, "schedule=in_flight")
    assert line.startswith("group 'rollout' cannot be restarted exactly: when new weights come")
    assert line.endswith("to change that: schedule.in_flight=false")


@pytest.mark.slow
def test_conversations_with_something_outside_are_named() -> None:
    (line,) = named("algorithm=agent_grpo", "task=calculator", deterministic=False)
    assert line.startswith("group 'all' cannot be restarted exactly: what answers in ")
    assert "may keep a state outside the run" in line


@pytest.mark.slow
def test_judges_are_named_also_within_a_mixture() -> None:
    judge = "algorithm.roles.reward.worker=judge"
    mixture = (
        "algorithm.roles.reward.worker=mixture",
        "algorithm.roles.reward.options.parts={a: {worker: judge}, b: {worker: rule}}",
    )
    for words in ((judge,), mixture):
        (line,) = named(*words)
        assert "a judge behind an address may score the same response otherwise" in line


def test_an_environment_that_says_it_is_random_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.spec("CartPole-v1")
    monkeypatch.setattr(spec, "nondeterministic", True)
    (line,) = named("algorithm=env_ppo", "task=cartpole", "model=mlp")
    assert "Gymnasium lists 'CartPole-v1' as nondeterministic" in line


@pytest.mark.slow
def test_an_environment_that_is_caught_at_it_is_named() -> None:
    gymnasium.register("toys/Caught-v0", lambda **_: Worldly("global"))
    try:
        (line,) = named("algorithm=env_ppo", "task=cartpole", "model=mlp", "task.id=toys/Caught-v0")
    finally:
        del gymnasium.registry["toys/Caught-v0"]
    assert line.startswith(
        "group 'all' cannot be restarted exactly: two environments 'toys/Caught-v0' that were "
        "tried do not come to where they were: "
    )
