"""EnvPool's environments going wrong: what the real pool has shown is damaged on its way."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.roles.environment import Actor, Trajectories
from penstock.dataflow.errors import StateError, WorkerError
from penstock.dataflow.runtime.in_process import InProcess
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.spec import EnvSpec

from .acting import NoisyActor, env_worker, roll
from .test_acting import finish
from .toys import damage

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="requirements-engines.txt is installed on Linux"
)

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
    """A rollout of four, and its metrics."""
    worker = env_worker(spec)
    traj = roll(worker, 0, num_envs=4, group_size=group_size, horizon=horizon, actor=actor)
    worker.close()
    return traj, {name: metric.value for name, metric in worker.metrics.items()}


def alike(one: Trajectories, other: Trajectories, rows: Any = slice(None)) -> bool:
    return all(torch.equal(of[rows], vars(other)[name][rows]) for name, of in vars(one).items())


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
        traj, shown = rolled(cartpole())
    rows = given_up(traj)
    assert 0 < len(rows) < 4
    assert shown["env_restarts"] == len(rows)
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


def test_one_that_does_so_again_and_again_ends_the_run(damaged: Damage) -> None:
    damaged("nan", at=range(5, 99))
    with pytest.raises(
        WorkerError,
        match=r"^environment \d of EnvPool's 'CartPole-v1' \(seed \d+\) showed an observation that "
        r"is not finite: \[nan, nan, nan, nan\] at step \d+ since it was made, failure 10 of its",
    ):
        rolled(cartpole(max_restarts=9), horizon=99)


@pytest.mark.parametrize("how", ONE)
def test_an_environment_does_the_same_in_any_group_whatever_goes_wrong_there(
    how: str, damaged: Damage
) -> None:
    damaged(how)
    (one, shown), (other, also) = (rolled(cartpole(), group_size=size) for size in (4, 1))
    assert alike(one, other)
    assert shown == also


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
    traj, shown = rolled(spec, actor=NoisyActor(4))
    assert shown["env_restarts"] == 4
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


@pytest.mark.parametrize("how", ["nan", "raises"])
def test_wherever_acting_happens_it_ends_the_same(how: str, damaged: Damage) -> None:
    env = cartpole(max_restarts=9)
    fine = finish(InProcess(), "inline", 1, env=env)
    damaged(how)
    inline = finish(InProcess(), "inline", 1, env=env)
    assert inline != fine
    for server in ("decoupled", "policy"):
        assert finish(InProcess(), server, 1, env=env, num_overlapped=2) == inline
