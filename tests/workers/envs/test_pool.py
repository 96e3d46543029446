"""EnvPool's environments: what Gymnasium's show, in the same columns, and what goes wrong."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from penstock.algorithms.roles.environment import ActionSpace, Actor, Acts, Trajectories
from penstock.dataflow.errors import ConfigError, StateError, WorkerError
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.spec import EnvSpec

from .acting import NoisyActor, alike, env_worker, roll, shown, targets
from .toys import damage

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="requirements-engines.txt is installed on Linux"
)

CARTPOLE = EnvSpec(id="CartPole-v1", backend="envpool", options={"num_threads": 1})
ACROBOT = EnvSpec(id="Acrobot-v1", backend="envpool", options={"num_threads": 1})
PENDULUM = EnvSpec(id="Pendulum-v1", backend="envpool", options={"num_threads": 1})


class Balances(Actor):
    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        push = (obs @ np.array([0.05, 0.3, 1.0, 0.5]) > 0)[:, None]
        return Acts(push.astype(np.float32), np.zeros(len(obs), np.float32))


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
    target = targets(traj, value, torch.zeros(2))
    assert target.value_target[:, 499].tolist() == (1 + value[:, 500]).tolist()


@pytest.mark.parametrize("spec", [CARTPOLE, PENDULUM], ids=lambda s: s.id)
def test_an_environment_does_the_same_in_any_group(spec: EnvSpec) -> None:
    rolled = [
        roll(env_worker(spec), 0, num_envs=4, group_size=size, horizon=64, actor=actor_for(spec))
        for size in (4, 4, 1)
    ]
    assert alike(rolled[0], rolled[1])
    assert alike(rolled[0], rolled[2])
    other = roll(env_worker(spec, seed=2), 0, horizon=64, actor=actor_for(spec))
    assert not alike(rolled[0], other)


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
        assert alike(one, roll(resumed, step, horizon=50, actor=actor))


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
    ("spec", "action"), [(CARTPOLE, [[2.0], [0.0]]), (CARTPOLE, [[1.0]]), (PENDULUM, [[1.0]])]
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
        ("CartPool-v1", {}, "^EnvPool has no environment 'CartPool-v1'; did you mean 'CartPole-v1'"
         r"\?\n    leave out backend=envpool, and it is Gymnasium's$"),
        ("CartPole-v1", {"gravity": 1}, r"^environment 'CartPole-v1' cannot be made by EnvPool: "
         r"Config.__new__\(\) got an unexpected keyword argument 'gravity'$"),
        ("TicTacToe-v1", {}, "'TicTacToe-v1' of EnvPool is played by several"),
    ],
)  # fmt: skip
def test_what_cannot_be_made(env_id: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EnvSpec(id=env_id, backend="envpool", options=options).spaces()


def test_what_belongs_to_gymnasium_alone() -> None:
    with pytest.raises(ValueError, match="leave out vectorized and num_agents, or the backend"):
        EnvSpec(id="CartPole-v1", backend="envpool", vectorized=True)


Damage = Callable[..., None]
SAID = {
    "raises": r"raised RuntimeError: out of coffee \(toys.py:\d+\)",
    "hangs": r"did not answer in time \(task.step_limit_s\)",
    "few": r"gave rewards, terminations and truncations of shapes \[3\], \[4\], \[4\]; expected "
    r"\[4\]",
    "shape": r"showed observations of shape \[4, 3\]; expected \[4, 4\]",
}
ONE = {
    "nan": r"showed an observation that is not finite: \[nan, nan, nan, nan\]",
    "reward": "gave a reward of inf",
}
POOL = r"EnvPool's environments \[0, 1, 2, 3\] of 'CartPole-v1' \(seeds \[\d+, \d+, \d+, \d+\]\)"


def cartpole(**options: Any) -> EnvSpec:
    own = {"num_threads": 1}
    return EnvSpec(id="CartPole-v1", backend="envpool", options=own, step_limit_s=0.3, **options)


class Damaged:
    """A pool of EnvPool's, some steps of which are damaged where a seed divides by `every`.

    What all environments show together is damaged where the first seed does.
    """

    def __init__(self, pool: Any, seeds: list[int], how: str, at: range, every: int) -> None:
        self._pool, self._how, self._at, self._taken = pool, how, at, 0
        self._rows = [row for row, seed in enumerate(seeds) if seed % every == 0]
        if how in SAID:
            self._rows = [0] if 0 in self._rows else []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def reset(self, rows: Any = None) -> Any:
        obs, info = self._pool.reset(rows)
        if rows is None and 0 in self._at:
            for row in self._rows:
                obs, _ = damage(self._how, row, obs, np.zeros(len(obs)))
        return obs, info

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self._pool.step(action)
        self._taken += 1
        if self._taken in self._at:
            for row in self._rows:
                obs, reward = damage(self._how, row, obs, reward)
        return obs, reward, *rest


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> Damage:
    """Damages what pools show that are made from now on."""
    import envpool

    real: Any = envpool.make_gymnasium

    def begin(how: str, at: range = range(5, 6), every: int = 2) -> None:
        def made(env_id: str, *, seed: list[int], **options: Any) -> Any:
            return Damaged(real(env_id, seed=seed, **options), seed, how, at, every)

        monkeypatch.setattr(envpool, "make_gymnasium", made)

    return begin


def rolled(
    spec: EnvSpec, *, group_size: int = 4, horizon: int = 12, actor: Actor | None = None
) -> tuple[Trajectories, dict[str, float]]:
    worker = env_worker(spec)
    traj = roll(worker, 0, num_envs=4, group_size=group_size, horizon=horizon, actor=actor)
    worker.close()
    return traj, shown(worker)


def given_up(traj: Trajectories) -> list[int]:
    """The rows whose fourth step is the last, because the fifth does not count."""
    rows = traj.truncated[:, 3].nonzero().flatten().tolist()
    assert (~traj.mask[:, 4]).nonzero().flatten().tolist() == rows
    return rows


@pytest.mark.parametrize("how", ONE)
def test_one_of_many_begins_anew_and_the_others_go_on_as_without_it(
    how: str, damaged: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    fine, _ = rolled(cartpole())
    damaged(how)
    with caplog.at_level(logging.WARNING, "penstock.envs"):
        traj, counted = rolled(cartpole())
    rows = given_up(traj)
    assert 0 < len(rows) < 4
    assert counted["env_restarts"] == len(rows)
    for row, record in zip(rows, caplog.records, strict=True):
        assert re.fullmatch(
            rf"environment {row} of EnvPool's 'CartPole-v1' \(seed \d*[02468]\) {ONE[how]} at step "
            rf"5 since it was made; restarted: \[{row}\]",
            record.getMessage(),
        )
    assert alike(traj, fine, [row for row in range(4) if row not in rows])
    assert torch.equal(traj.obs[:, :5], fine.obs[:, :5])
    assert traj.reward[rows, :6].tolist() == [[1, 1, 1, 1, 0, 1]] * len(rows)
    assert traj.obs[rows, 5].abs().max() <= 0.05
    assert torch.isfinite(traj.obs).all()


@pytest.mark.parametrize("how", SAID)
def test_where_the_pool_fails_another_takes_its_place(
    how: str, damaged: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(how, every=1)
    worker = env_worker(cartpole())
    with caplog.at_level(logging.WARNING, "penstock.envs"):
        traj = roll(worker, 0, num_envs=4, group_size=4, horizon=9)
    assert given_up(traj) == [0, 1, 2, 3]
    assert worker.metrics["env_restarts"].value == 1
    (said,) = (record.getMessage() for record in caplog.records)
    since = r"at step 5 since they were made; restarted: \[0, 1, 2, 3\]"
    assert re.fullmatch(rf"{POOL} {SAID[how]} {since}", said)
    assert traj.obs[:, 5].abs().max() <= 0.05
    assert not torch.equal(traj.obs[:, 5], traj.obs[:, 0])  # for it has other seeds


@pytest.mark.parametrize("how", SAID)
def test_a_pool_that_always_fails_ends_the_run(how: str, damaged: Damage) -> None:
    damaged(how, every=1)
    with pytest.raises(
        WorkerError,
        match=rf"^{POOL} {SAID[how]} at step 5 since they were made, failure 2 of its group in one "
        r"rollout; 1 may be made good by a restart \(task.max_restarts\)\n    without "
        "task.backend=envpool they are stepped, and restarted, one by one$",
    ):
        rolled(cartpole(max_restarts=1))


@pytest.mark.parametrize("how", ONE)
def test_an_environment_does_the_same_in_any_group_whatever_goes_wrong_there(
    how: str, damaged: Damage
) -> None:
    damaged(how)
    (one, counted), (other, also) = (rolled(cartpole(), group_size=size) for size in (4, 1))
    assert alike(one, other)
    assert counted == also


@pytest.mark.parametrize("normalization", [Normalization(), Normalization(observations=True)])
@pytest.mark.parametrize("how", ["nan", "reward", "raises", "shape"])
def test_what_was_saved_after_a_restart_goes_on_bit_for_bit(
    how: str, normalization: Normalization, damaged: Damage, tmp_path: Path
) -> None:
    if how in ONE:
        damaged(how, at=range(8) if how == "nan" else range(5, 7))
    else:
        damaged(how, at=range(7, 8), every=1)
    spec = cartpole(max_restarts=99, normalization=normalization)
    worker, resumed = env_worker(spec), env_worker(spec)
    for step in range(2):
        roll(worker, step, horizon=9)
    assert worker.metrics["env_restarts"].value > 0
    worker.save_state(tmp_path)
    resumed.load_state(tmp_path)
    for step in (2, 3):
        assert alike(roll(worker, step, horizon=9), roll(resumed, step, horizon=9))


def test_what_fails_where_it_did_not_before_is_not_resumed(damaged: Damage, tmp_path: Path) -> None:
    worker = env_worker(cartpole())
    roll(worker, 0, num_envs=4, group_size=4)
    worker.save_state(tmp_path)
    damaged("raises", every=1)
    resumed = env_worker(cartpole())
    resumed.load_state(tmp_path)
    with pytest.raises(
        StateError,
        match=rf"^{POOL} {SAID['raises']} at step 5 since they were made, where 8 were taken "
        "again; they had not when they were saved$",
    ):
        roll(resumed, 1, num_envs=4, group_size=4)


def moves(board: Any) -> list[bool]:
    """Whether something of a board of 2048 can go to the left, up, to the right and down."""
    found: list[bool] = []
    for turns in range(4):
        turned = np.rot90(board, turns)
        near, far = turned[:, :-1], turned[:, 1:]  # what lies far goes where nothing is
        found.append(bool((((near == 0) | (near == far)) & (far > 0)).any()))
    return found


def test_what_is_allowed_is_asked_of_the_new_episode(damaged: Damage) -> None:
    damaged("nan", at=range(9, 10), every=1)
    spec = EnvSpec(id="Play2048-v1", backend="envpool", masked=True, max_restarts=4)
    traj, counted = rolled(spec, actor=NoisyActor(4))
    assert counted["env_restarts"] == 4
    tiles = traj.obs.numpy().reshape(4, 12, 16, 31).argmax(axis=-1)
    assert ((tiles[:, 9] > 0).sum(axis=-1) == 2).all()
    assert traj.mask[:, 9].all()
    for row, t in traj.mask.nonzero().tolist():
        assert traj.action_mask[row, t].tolist() == moves(tiles[row, t].reshape(4, 4))


def test_what_went_wrong_in_an_episodes_last_step_did_not_end_it(damaged: Damage) -> None:
    options = {"num_threads": 1, "max_episode_steps": 5}
    damaged("nan")
    traj, _ = rolled(EnvSpec(id="CartPole-v1", backend="envpool", options=options), horizon=6)
    rows = given_up(traj)
    others = [row for row in range(4) if row not in rows]
    assert not traj.truncated[rows, 4].any()
    assert traj.truncated[others, 4].all()
    assert traj.mask[rows, 5].all()
    assert not traj.mask[others, 5].any()
