"""Environments that go wrong: one of many is restarted, all of them are an error with a name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.env_roles import Acts
from penstock.algorithms.returns import gae
from penstock.dataflow.errors import ConfigError, StateError, WorkerError
from penstock.workers.envs.spec import EnvSpec

from .acting import NoisyActor, env_worker, roll

SAID = {
    "raises": "raised RuntimeError: out of coffee",
    "nan": r"showed an observation that is not finite: \[nan, nan\]",
    "shape": r"showed an observation of shape \[5\], 5 numbers; expected 2",
    "reward": "gave a reward of nan",
    "hangs": "did not answer in time",
}


def bad(how: str, share: float, **options: Any) -> EnvSpec:
    return EnvSpec(id="toys/Bad-v0", options={"how": how, "share": share}, **options)


@pytest.mark.parametrize("how", SAID)
def test_one_that_always_fails_is_named_with_seed_and_step(how: str) -> None:
    worker = env_worker(bad(how, 1.1, max_restarts=1, step_limit_s=0.2))
    with pytest.raises(
        WorkerError,
        match=rf"^environment \d of 'toys/Bad-v0' \(seed \d+\) {SAID[how]} at step 2 of its "
        "episode, failure 2 of its group in one rollout; 1 may be made good by a restart$",
    ):
        roll(worker, 0)


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_one_of_many_is_restarted_and_counted(how: str) -> None:
    worker = env_worker(bad(how, 0.1, max_restarts=8, step_limit_s=0.2))
    begun_s = time.monotonic()
    traj = roll(worker, 0, num_envs=8, group_size=8, horizon=20)
    restarts = worker.metrics["env_restarts"].value
    assert 1 <= restarts <= 8
    assert time.monotonic() - begun_s < 20
    # The step that failed does not count, and its episode is cut off with the step before it.
    assert int(traj.truncated.sum()) == restarts
    row, t = (int(at[0]) for at in torch.nonzero(traj.truncated, as_tuple=True))
    assert traj.mask[row, t]
    assert not traj.mask[row, t + 1]
    assert traj.obs[row, t + 2, 0] == 0
    assert worker.metrics["episode_length"].value == 5


def test_advantages_do_not_reach_over_a_restart() -> None:
    worker = env_worker(bad("raises", 0.1, max_restarts=8))
    traj = roll(worker, 0, num_envs=8, group_size=8, horizon=20)
    row, t = (int(at[0]) for at in torch.nonzero(traj.truncated, as_tuple=True))
    value = torch.arange(traj.reward.numel(), dtype=torch.float32).view(traj.reward.shape)
    target = gae(
        traj.mask,
        reward=traj.reward,
        value=value,
        bootstrap_value=torch.zeros(8),
        terminated=traj.terminated,
        truncated=traj.truncated,
        lam=1.0,
    )
    # Worth its reward and what the critic says of the state that the failed step was taken from.
    assert target.value_target[row, t] == traj.reward[row, t] + value[row, t + 1]


def test_what_the_actor_says_must_be_numbers() -> None:
    class Lost(NoisyActor):
        def act(self, obs: Any, noise: Any, action_mask: Any, memory: Any = None) -> Acts:
            acts = super().act(obs, noise, action_mask)
            acts.logprob[1] = float("nan")
            return acts

    worker = env_worker(EnvSpec(id="CartPole-v1"))
    with pytest.raises(
        WorkerError,
        match=r"environment 1 \(seed \d+\), step 0 of the rollout of step 0: the actor's "
        "log-probability of an action is not finite",
    ):
        roll(worker, 0, actor=Lost())


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_one_that_fails_where_it_did_not_before_is_not_resumed(how: str, tmp_path: Path) -> None:
    worker = env_worker(bad(how, 0))
    roll(worker, 0, horizon=3)
    worker.save_state(tmp_path)
    worse = env_worker(bad(how, 1.1, step_limit_s=0.2))
    worse.load_state(tmp_path)
    with pytest.raises(
        StateError,
        match=rf"^environment 0 of 'toys/Bad-v0' \(seed \d+\) {SAID[how]} at step 2 of its "
        "episode, where its 3 actions since it was seeded were taken again; it had not "
        "when it was saved$",
    ):
        roll(worse, 1)


@pytest.mark.parametrize("vectorized", [True, False])
def test_an_environment_nobody_knows(vectorized: bool) -> None:
    with pytest.raises(ConfigError, match="environment 'Cartpool-v7' cannot be made: .*Cartpool"):
        EnvSpec(id="Cartpool-v7", vectorized=vectorized).spaces()


def test_actions_that_nobody_can_give() -> None:
    spec = EnvSpec(id="toys/Counting-v0", options={"actions": "text"})
    with pytest.raises(ConfigError, match=r"'toys/Counting-v0' takes actions of Text\(1, 3, "):
        spec.spaces()


def test_a_vectorized_form_that_is_not_there() -> None:
    spec = EnvSpec(id="Acrobot-v1", vectorized=True)
    with pytest.raises(ConfigError, match="environment 'Acrobot-v1' has no vectorized form; leave"):
        roll(env_worker(spec), 0)


def test_a_mask_that_allows_nothing() -> None:
    spec = EnvSpec(id="toys/Counting-v0", options={"actions": "multi"}, masked=True)
    with pytest.raises(
        WorkerError,
        match=r"environment 0 of 'toys/Counting-v0' \(seed \d+\) allows \[True, False, True\] at "
        "step 0 of its episode; expected 5 booleans, one True for every component",
    ):
        roll(env_worker(spec), 0)
