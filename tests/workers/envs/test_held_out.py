"""Held-out episodes: what they are, and that they leave no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.evaluate import EnvEvaluation, env_evaluate_step
from penstock.algorithms.roles.environment import Actor, Acts
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import follow
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import PIECE, EnvWorker
from torch import Tensor

from .acting import NoisyActor, alike, env_worker, roll, shown
from .test_acting import CARTPOLE, GRAPH, SOURCES, placed, workers
from .toys import Counting, register

SCALED = EnvSpec(id="CartPole-v1", normalization=Normalization(observations=True, rewards=True))
TEAMS = EnvSpec(id="penstock.workers.envs.cover:penstock/Cover-v0", num_agents=3)


class Notes(NoisyActor):
    def __init__(self) -> None:
        super().__init__(2)
        self.seen: list[Any] = []

    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        self.seen.append(obs.copy())
        return super().act(obs, noise, action_mask, recurrent_state)


def evaluated(
    worker: EnvWorker,
    *,
    num_envs: int = 4,
    group_size: int = 2,
    group: int | None = None,
    actor: Actor | None = None,
    num_episodes: int = 2,
    max_episode_steps: int = 10_000,
) -> Tensor:
    rows = EnvRowSource(num_envs, group_size).batch(0)
    own = rows.group >= 0 if group is None else rows.group == group
    with step_scope(0):
        return worker.evaluate(
            rows.env[own],
            rows.group[own],
            actor or NoisyActor(2),
            num_episodes=num_episodes,
            max_episode_steps=max_episode_steps,
        )


def test_whole_episodes_are_counted() -> None:
    worker = env_worker(EnvSpec(id="toys/Counting-v0", options={"length": 70}))
    assert evaluated(worker, num_episodes=3).tolist() == [70.0] * 4
    assert shown(worker) == {
        "episode_return": 70.0,
        "episode_length": 70.0,
        "episodes": 12.0,
        "env_restarts": 0.0,
    }


class FailsOnce(Counting):
    """One in the process fails at its step `at`."""

    failed = False

    def __init__(self, at: int) -> None:
        super().__init__(length=200)
        self._at = at

    def step(self, action: Any) -> Any:
        if self._steps + 1 == self._at and not FailsOnce.failed:
            FailsOnce.failed = True
            raise RuntimeError("out of coffee")
        return super().step(action)


register(FailsOnce=FailsOnce)


@pytest.mark.parametrize("at", [50, PIECE, PIECE + 1, PIECE + 2])
def test_an_episode_that_is_given_up_does_not_count(at: int) -> None:
    FailsOnce.failed = False
    worker = env_worker(EnvSpec(id="toys/FailsOnce-v0", options={"at": at}))
    assert evaluated(worker, num_envs=2).tolist() == [200.0, 200.0]
    assert shown(worker) == {
        "episode_return": 200.0,
        "episode_length": 200.0,
        "episodes": 4.0,
        "env_restarts": 1.0,
    }


def test_an_environment_whose_episodes_never_end_well_is_named() -> None:
    options = {"how": "raises", "share": 1.1, "at": 100, "length": 200}
    worker = env_worker(EnvSpec(id="toys/Bad-v0", options=options, max_restarts=4))
    with pytest.raises(
        WorkerError,
        match=r"^environment 0 \(seed \d+\) gave up 8 held-out episodes in a row; last of all, "
        r"environment \d of 'toys/Bad-v0' \(seed \d+\) raised RuntimeError: out of coffee "
        r"\(toys.py:\d+\) at step 100 of its episode$",
    ):
        evaluated(worker, num_envs=2)


def test_an_episode_without_end_is_cut_off() -> None:
    worker = env_worker(EnvSpec(id="toys/Counting-v0", options={"length": 10**9}))
    assert evaluated(worker, max_episode_steps=150).tolist() == [150.0] * 4
    assert worker.metrics["episodes"].value == 4


def test_agents_of_a_team_earn_the_same() -> None:
    found = evaluated(env_worker(TEAMS), num_envs=12, group_size=6, actor=NoisyActor(3))
    assert found.view(4, 3).eq(found[::3, None]).all()


@pytest.mark.slow
@pytest.mark.parametrize("spec", [CARTPOLE, SCALED], ids=["plain", "scaled"])
def test_they_are_the_same_each_time_and_rollouts_go_on_as_without(spec: EnvSpec) -> None:
    one, other = env_worker(spec), env_worker(spec)
    before = evaluated(one)
    for step in range(3):
        with_, without = roll(one, step, horizon=40), roll(other, step, horizon=40)
        assert alike(with_, without)
        assert torch.equal(evaluated(one), before)  # for the actor does not look at what it sees


def test_they_are_other_episodes_than_those_of_rollouts() -> None:
    worker, actor = env_worker(CARTPOLE), Notes()
    traj = roll(worker, 0)
    evaluated(worker, actor=actor)
    assert not np.isin(actor.seen[0], traj.obs.numpy()).any()


def test_after_a_resume_they_are_the_same(tmp_path: Path) -> None:
    worker, resumed, seen = env_worker(SCALED), env_worker(SCALED), [Notes(), Notes()]
    roll(worker, 0, horizon=50)
    worker.save_state(tmp_path)
    resumed.load_state(tmp_path)
    for one, notes in zip((worker, resumed), seen, strict=True):
        evaluated(one, actor=notes)
    assert np.array_equal(np.concatenate(seen[0].seen), np.concatenate(seen[1].seen))


def test_it_does_not_matter_which_worker_plays_which_group() -> None:
    every = evaluated(env_worker(CARTPOLE))
    apart = [evaluated(env_worker(CARTPOLE), group=group) for group in (0, 1)]
    assert torch.equal(every, torch.cat(apart))


def test_observations_are_scaled_as_by_now_and_returns_are_not() -> None:
    worker, plain, scaled = env_worker(SCALED), Notes(), Notes()
    evaluated(env_worker(CARTPOLE), group=0, actor=plain)
    roll(worker, 0, horizon=300)
    found = evaluated(worker, group=0, actor=scaled)
    state: Any = worker._live[0].moments()["normalizer"]["obs"]  # pyright: ignore[reportPrivateUsage]
    expected = (plain.seen[0] - state["mean"]) / np.sqrt(np.array(state["variance"]) + 1e-8)
    assert scaled.seen[0] == pytest.approx(expected, abs=1e-5)
    assert torch.equal(found, evaluated(env_worker(CARTPOLE), group=0))


def returns_of(server: str) -> list[float]:
    """Of an evaluation before training, and of one after it."""
    graph = build(env_evaluate_step, cfg=EnvEvaluation(num_episodes=2))
    placement = placed(server, 1)
    also = {"evaluate": Program(graph, follow(graph, GRAPH, placement))}
    with Engine(
        GRAPH, placement, workers=workers(), executor=InProcess(), seed=3, also=also
    ) as engine:
        (before,) = engine.run(SOURCES, 1, program="evaluate")
        list(engine.run(SOURCES, 4))
        (after,) = engine.run(SOURCES, 1, program="evaluate")
    return [step.metrics["env.evaluate/episode_return"] for step in (before, after)]


@pytest.fixture(scope="module")
def inline() -> list[float]:
    return returns_of("inline")


@pytest.mark.slow
@pytest.mark.parametrize("server", ["decoupled", "main", "policy"])
def test_the_newest_weights_act_wherever_acting_happens(server: str, inline: list[float]) -> None:
    assert inline[0] != inline[1]
    assert returns_of(server) == inline
