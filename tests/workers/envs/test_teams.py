"""Agents of one environment as rows: what they share, and what goes wrong between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.mappo import joint
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TeamCriticSpec
from penstock.workers.envs.cover import Cover
from penstock.workers.envs.spec import EnvSpec

from .acting import NoisyActor, env_worker, roll
from .toys import register

COVER = EnvSpec(id="penstock.workers.envs.cover:penstock/Cover-v0", num_agents=3)


class Deserted(Cover):
    """Loses an agent at the second step of an episode in which the marks lie far left."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return (obs[:-1] if self._step == 2 and self.marks[0] <= self._far else obs, *rest)

    def __init__(self, far: int) -> None:
        super().__init__()
        self._far = far


register(Deserted=Deserted)


def deserted(far: int, **options: Any) -> EnvSpec:
    return EnvSpec(id="toys/Deserted-v0", options={"far": far}, num_agents=3, **options)


def test_agents_are_rows_that_share_rewards_and_ends() -> None:
    traj = roll(env_worker(COVER), 0, num_envs=6, group_size=6, horizon=30)
    assert traj.obs.shape == (6, 30, 6)
    assert traj.action.shape == (6, 30, 1)
    for name in ("reward", "truncated", "mask"):
        column = getattr(traj, name)
        assert torch.equal(column[:3], column[:1].expand(3, -1)), name
    assert not torch.equal(traj.reward[0], traj.reward[3])
    assert traj.truncated[0].nonzero().flatten().tolist() == [11, 24]
    places = traj.obs[:3, :, 0]
    assert torch.allclose(traj.obs[0, :, 4], places[1] - places[0])
    assert torch.allclose(traj.obs[2, :, 4], places[0] - places[2])


def test_a_team_is_the_same_whoever_steps_with_it() -> None:
    together = roll(env_worker(COVER), 0, num_envs=12, group_size=12, horizon=30)
    apart = roll(env_worker(COVER), 0, num_envs=12, group_size=3, horizon=30)
    assert torch.equal(together.obs, apart.obs)


def test_a_covered_mark_counts_once() -> None:
    env = Cover(num_agents=2, width=5)
    env.reset(seed=0)
    env.marks, env.places = np.array([1, 3]), np.array([1, 2])
    obs, reward, *_ = env.step(np.array([1, 1]))
    assert reward == 0.5
    assert np.allclose(obs * 5, [[1, 0, 2, 1], [2, -1, 1, -1]])
    assert env.step(np.array([1, 2]))[1] == 1.0


def test_agents_that_disagree_in_number_are_named_with_seed_and_step() -> None:
    worker = env_worker(deserted(9, max_restarts=1))
    with pytest.raises(
        WorkerError,
        match=r"^environment \d of 'toys/Deserted-v0' \(seed \d+\) raised ValueError: showed 2 "
        r"agents, where 3 take part \(spec.py:\d+\) at step 2 of its episode, failure 2 of its "
        r"group in one rollout; 1 may be made good by a restart \(task.max_restarts\)$",
    ):
        roll(worker, 0, num_envs=6, group_size=6)


def test_one_bad_team_of_many_is_restarted_with_all_its_agents() -> None:
    worker = env_worker(deserted(0, max_restarts=20))
    traj = roll(worker, 0, num_envs=24, group_size=24, horizon=20)
    restarts = int(worker.metrics["env_restarts"].value)
    # Whole episodes have 12 steps: one of a single step was given up in its second.
    begun = torch.cat([torch.ones(24, 1, dtype=torch.bool), ~traj.mask[:, :-1]], dim=1)
    given_up = traj.truncated & begun
    assert restarts == int(given_up[::3].sum()) > 0
    assert torch.equal(traj.truncated[::3], traj.truncated[1::3])


@pytest.mark.parametrize("num_agents", [2, 4])
def test_another_number_of_agents_is_refused(num_agents: int) -> None:
    spec = EnvSpec(id=COVER.id, num_agents=num_agents)
    with pytest.raises(ConfigError, match=rf"are not those of {num_agents} equal agents"):
        spec.spaces()


def test_teams_must_be_whole() -> None:
    with pytest.raises(ConfigError, match="does not hold whole teams of 3 agents"):
        roll(env_worker(COVER), 0, num_envs=6, group_size=4)


def test_the_critic_sees_each_agent_first() -> None:
    obs = torch.arange(12).float().reshape(6, 1, 2)
    seen = joint(torch.arange(3, 9), obs=obs, last_obs=obs[:, 0], num_agents=3)
    assert seen.obs[:2, 0].tolist() == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 0, 1]]
    assert seen.last_obs[5].tolist() == [10, 11, 6, 7, 8, 9]


@pytest.mark.parametrize("env", [[0, 1, 2, 3], [1, 2, 3], [0, 2, 1], [0, 1, 2, 6, 7, 9]])
def test_the_critic_refuses_teams_that_are_not_whole(env: list[int]) -> None:
    obs = torch.zeros(len(env), 1, 2)
    with pytest.raises(ValueError, match="are not whole teams of 3 agents"):
        joint(torch.tensor(env), obs=obs, last_obs=obs[:, 0], num_agents=3)


def test_each_agent_has_a_choice_of_its_own() -> None:
    worker = env_worker(COVER)
    traj = roll(worker, 0, num_envs=6, group_size=6, horizon=30, actor=NoisyActor(3))
    assert set(traj.action.flatten().tolist()) == {0.0, 1.0, 2.0}
    assert not torch.equal(traj.action[0], traj.action[1])


def test_a_critic_of_a_team_of_another_size_says_so() -> None:
    critic = TeamCriticSpec(env=COVER).build(WorkerContext("critic"))
    with pytest.raises(ConfigError) as caught:
        critic.value(torch.zeros(4, 5, 24), torch.zeros(4, 24))
    assert str(caught.value) == (
        "role 'critic' sees 3 agent(s) of 'penstock.workers.envs.cover:penstock/Cover-v0', 18 "
        "numbers in all, but the step shows it 24\n"
        "    set algorithm.cfg.num_agents=3, or task.num_agents"
    )
