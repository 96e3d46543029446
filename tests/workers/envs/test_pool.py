"""EnvPool's environments: what Gymnasium's show, told in the same columns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from penstock.algorithms.ops.returns import gae
from penstock.algorithms.roles.environment import ActionSpace, Actor, Acts, Trajectories
from penstock.dataflow.errors import ConfigError, StateError, WorkerError
from penstock.workers.envs.spec import EnvSpec

from .acting import NoisyActor, env_worker, roll

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="requirements-engines.txt is installed on Linux"
)

CARTPOLE = EnvSpec(id="CartPole-v1", backend="envpool", options={"num_threads": 1})
ACROBOT = EnvSpec(id="Acrobot-v1", backend="envpool", options={"num_threads": 1})
PENDULUM = EnvSpec(id="Pendulum-v1", backend="envpool", options={"num_threads": 1})


class Balances(Actor):
    """Keeps the pole up."""

    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        push = (obs @ np.array([0.05, 0.3, 1.0, 0.5]) > 0)[:, None]
        return Acts(push.astype(np.float32), np.zeros(len(obs), np.float32))


def same(one: Trajectories, other: Trajectories) -> bool:
    return all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(other).values(),
                                                 strict=True))  # fmt: skip


def actor_for(spec: EnvSpec) -> NoisyActor:
    kind = spec.spaces()[1]
    return NoisyActor(kind.sizes[0] if kind.sizes else None)


@pytest.mark.parametrize("spec", [CARTPOLE, ACROBOT, PENDULUM], ids=lambda s: s.id)
def test_what_is_shown_and_taken_is_what_gymnasium_says(spec: EnvSpec) -> None:
    assert spec.spaces() == EnvSpec(id=spec.id).spaces()
    traj = roll(env_worker(spec), 0, num_envs=4, group_size=4, actor=actor_for(spec))
    assert traj.obs.dtype == traj.reward.dtype == torch.float32
    assert traj.mask.dtype == traj.terminated.dtype == traj.truncated.dtype == torch.bool


def test_steps_are_those_of_gymnasiums_cartpole() -> None:
    traj = roll(env_worker(CARTPOLE), 0, num_envs=2, group_size=2, horizon=200)
    single: Any = gym.make("CartPole-v1").unwrapped
    for row in range(2):
        end = int(traj.terminated[row].nonzero()[0, 0])
        single.reset(seed=0)
        single.state = traj.obs[row, 0].double().numpy()
        for t in range(end + 1):
            obs, reward, terminated, _, _ = single.step(int(traj.action[row, t, 0]))
            assert obs == pytest.approx(traj.obs[row, t + 1].numpy(), abs=1e-3)
            assert (reward, terminated) == (float(traj.reward[row, t]), t == end)
        # What comes next resets: it shows the end, earns nothing and does not count.
        assert traj.mask[row, : end + 3].tolist() == [True] * (end + 1) + [False, True]
        assert traj.reward[row, end + 1] == 0
        assert traj.obs[row, end + 2].abs().max() <= 0.05
    assert not traj.truncated.any()


def test_the_time_limit_truncates_and_is_bootstrapped() -> None:
    worker = env_worker(CARTPOLE)
    traj = roll(worker, 0, num_envs=2, group_size=2, horizon=510, actor=Balances())
    assert not traj.terminated.any()
    assert traj.truncated.nonzero().tolist() == [[0, 499], [1, 499]]
    assert worker.metrics["episode_return"].value == 500
    value = torch.arange(2.0 * 510).view(2, 510)
    target = gae(
        traj.mask,
        reward=traj.reward,
        value=value,
        bootstrap_value=torch.zeros(2),
        terminated=traj.terminated,
        truncated=traj.truncated,
        lam=1.0,
    )
    assert target.value_target[:, 499].tolist() == (1 + value[:, 500]).tolist()


@pytest.mark.parametrize("spec", [CARTPOLE, PENDULUM], ids=lambda s: s.id)
def test_an_environment_does_the_same_in_any_group(spec: EnvSpec) -> None:
    rolled = [
        roll(env_worker(spec), 0, num_envs=4, group_size=size, horizon=64, actor=actor_for(spec))
        for size in (4, 4, 1)
    ]
    assert same(rolled[0], rolled[1])
    assert same(rolled[0], rolled[2])
    other = roll(env_worker(spec, seed=2), 0, horizon=64, actor=actor_for(spec))
    assert not same(rolled[0], other)


@pytest.mark.parametrize("spec", [CARTPOLE, PENDULUM], ids=lambda s: s.id)
def test_what_was_saved_goes_on_bit_for_bit(spec: EnvSpec, tmp_path: Path) -> None:
    actor, worker = actor_for(spec), env_worker(spec)
    for step in range(3):
        roll(worker, step, horizon=50, actor=actor)
    worker.save_state(tmp_path)
    resumed = env_worker(spec)
    resumed.load_state(tmp_path)
    for step in (3, 4):
        one = roll(worker, step, horizon=50, actor=actor)
        assert same(one, roll(resumed, step, horizon=50, actor=actor))


def test_a_state_that_is_not_come_to_again_is_refused(tmp_path: Path) -> None:
    worker = env_worker(CARTPOLE)
    roll(worker, 0)
    worker.save_state(tmp_path)
    for file in tmp_path.glob("group-*.json"):
        file.write_text(file.read_text().replace('"obs": "', '"obs": "0'))
    resumed = env_worker(CARTPOLE)
    resumed.load_state(tmp_path)
    with pytest.raises(
        StateError,
        match=r"^EnvPool's environments \[0, 1\] of 'CartPole-v1' \(seeds \[\d+, \d+\]\) show "
        "something else after the 8 steps since they were made than when they were saved",
    ):
        roll(resumed, 1)


def test_moves_that_are_not_allowed_are_a_column() -> None:
    spec = EnvSpec(id="Play2048-v1", backend="envpool", masked=True)
    assert spec.spaces()[1] == ActionSpace("discrete", sizes=(4,), masked=True)
    traj = roll(env_worker(spec), 0, horizon=6, actor=NoisyActor(4))
    assert traj.action_mask.shape == (4, 6, 4)
    assert traj.action_mask.any(-1).all()
    assert not traj.action_mask.all()


def test_masks_that_are_not_there() -> None:
    spec = EnvSpec(id="CartPole-v1", backend="envpool", masked=True)
    with pytest.raises(WorkerError, match="have no action_mask or legal_action_mask among what"):
        roll(env_worker(spec), 0)


@pytest.mark.parametrize(
    ("spec", "action"),
    [(CARTPOLE, [[2.0], [0.0]]), (CARTPOLE, [[1.0]]), (PENDULUM, [[1.0]])],
)
def test_actions_that_are_none_never_reach_it(spec: EnvSpec, action: list[list[float]]) -> None:
    class Lost(NoisyActor):
        def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
            return Acts(np.array(action, np.float32), np.zeros(len(obs), np.float32))

    with pytest.raises(
        WorkerError,
        match=rf"^EnvPool's environments \[0, 1\] of '{spec.id}' \(seeds \[\d+, \d+\]\) were "
        r"given actions \[\[.*; expected 2 of ActionSpace",
    ):
        roll(env_worker(spec), 0, actor=Lost())


@pytest.mark.parametrize(
    ("env_id", "options", "said"),
    [
        ("CartPool-v1", {}, "EnvPool has no environment 'CartPool-v1'; did you mean 'CartPole-v"),
        ("CartPole-v1", {"gravity": 1}, "'CartPole-v1' cannot be made by EnvPool: .*gravity"),
        ("TicTacToe-v1", {}, "'TicTacToe-v1' of EnvPool is played by several"),
    ],
)
def test_what_cannot_be_made(env_id: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnvSpec(id=env_id, backend="envpool", options=options).spaces()


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError) as raised:
        CARTPOLE.spaces()
    assert str(raised.value) == (
        "backend=envpool needs the package envpool, which is not installed\n"
        "    pip install penstock-rl[envpool]"
    )


def test_what_belongs_to_gymnasium_alone() -> None:
    with pytest.raises(ValueError, match="leave out vectorized and num_agents, or the backend"):
        EnvSpec(id="CartPole-v1", backend="envpool", vectorized=True)
