"""A replay: what it keeps, what it samples, and that it goes on from a checkpoint bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from penstock.algorithms.roles.environment import Trajectories, Transitions
from penstock.dataflow.errors import PlanError, StateError
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.q_learning import ReplayMemory, ReplaySpec


def steps(first: int, *, envs: int = 2, horizon: int = 3, choices: int = 0) -> Trajectories:
    """Observations count up from `first`, row by row; nothing ends unless a test says so."""
    count = envs * (horizon + 1)
    obs = torch.arange(first, first + count).float().reshape(envs, horizon + 1, 1)
    flags = torch.zeros(envs, horizon, dtype=torch.bool)
    return Trajectories(
        env=torch.arange(envs),
        obs=obs[:, :-1],
        last_obs=obs[:, -1],
        action=obs[:, :-1] % 2,
        action_mask=torch.ones(envs, horizon, choices, dtype=torch.bool),
        behavior_logprob=torch.zeros(envs, horizon),
        reward=obs[:, :-1, 0] * 10,
        terminated=flags.clone(),
        truncated=flags.clone(),
        mask=~flags,
        recurrent_state=torch.zeros(envs, 0),
    )


def add(replay: ReplayMemory, table: Trajectories, step: int = 0) -> torch.Tensor:
    with call_scope(step, 0):
        return replay.add(table)


def sample(replay: ReplayMemory, step: int, num_steps: int, at_least: int = 1) -> Transitions:
    with call_scope(step, 0):
        return replay.sample(torch.zeros(0), num_steps=num_steps, at_least=at_least)


def built(capacity: int, seed: int = 0) -> ReplayMemory:
    return ReplaySpec(capacity=capacity).build(WorkerContext("replay", seed))


def test_a_step_is_kept_with_the_state_it_led_to() -> None:
    replay = built(100)
    table = steps(0)
    table.mask[0, 1] = False  # environment 0 was reset there
    assert add(replay, table).tolist() == [5, 5]
    sampled = sample(replay, 0, 200)
    assert sampled.obs.shape == (200, 1, 1)
    assert sampled.reward.shape == (200, 1)
    assert sorted(set(sampled.obs.flatten().tolist())) == [0, 2, 4, 5, 6]
    assert torch.equal(sampled.next_obs, sampled.obs + 1)
    assert torch.equal(sampled.reward, sampled.obs[..., 0] * 10)
    assert torch.equal(sampled.action, sampled.obs % 2)
    assert bool(sampled.mask.all())


def test_the_oldest_steps_make_room() -> None:
    replay = built(8)
    add(replay, steps(0), 0)
    add(replay, steps(100), 1)
    assert sorted(set(sample(replay, 1, 400).obs.flatten().tolist())) == [
        5, 6, 100, 101, 102, 104, 105, 106,
    ]  # fmt: skip
    assert add(replay, steps(200, envs=5), 2).tolist() == [8] * 5
    assert int(sample(replay, 2, 400).obs.min()) == 209  # 15 came, the last 8 of them stay


def test_nothing_is_sampled_before_there_is_enough() -> None:
    replay = built(100)
    add(replay, steps(0))
    assert not bool(sample(replay, 0, 4, at_least=7).mask.any())
    assert bool(sample(replay, 0, 4, at_least=6).mask.all())


def test_samples_belong_to_seed_and_step() -> None:
    replay, other = built(100), built(100, seed=1)
    add(replay, steps(0, horizon=30))
    add(other, steps(0, horizon=30))
    sampled = [sample(r, s, 20).obs for r, s in ((replay, 0), (replay, 0), (replay, 1), (other, 0))]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])
    assert not torch.equal(sampled[0], sampled[3])


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    replay, restored = built(8), built(8)
    add(replay, steps(0), 0)
    add(replay, steps(100), 1)
    replay.save_state(tmp_path)
    restored.load_state(tmp_path)
    for one in (replay, restored):
        add(one, steps(200, envs=1), 2)
    ours, its = sample(replay, 2, 50), sample(restored, 2, 50)
    for name in vars(ours):
        assert torch.equal(getattr(ours, name), getattr(its, name)), name


def test_an_empty_replay_can_be_saved(tmp_path: Path) -> None:
    built(8).save_state(tmp_path)
    restored = built(8)
    restored.load_state(tmp_path)
    assert restored.num_stored == 0


def test_a_replay_of_another_size_is_refused(tmp_path: Path) -> None:
    built(8).save_state(tmp_path)
    with pytest.raises(ValueError, match="holds a replay of 8 steps, and 'replay' has room for 9"):
        built(9).load_state(tmp_path)


def test_steps_out_of_order_are_refused() -> None:
    replay = built(8)
    add(replay, steps(0), 3)
    with pytest.raises(StateError, match="'replay' was given step 2 after step 3"):
        add(replay, steps(0), 2)
    add(replay, steps(0), 0)  # another run


def test_masked_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="which choices are allowed"):
        add(built(8), steps(0, choices=2))


def test_several_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="its group has 2 ranks"):
        ReplaySpec().build(WorkerContext("replay", num_ranks=2))
