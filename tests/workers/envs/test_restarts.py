"""Groups stepped by one object in which one environment goes wrong: they go on, all begin anew."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.roles.environment import Actor, Acts, Trajectories
from penstock.dataflow.errors import StateError, WorkerError
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.group import BadRows, Stepped, finite
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.worker import EnvWorker, EnvWorkerSpec

from . import toys
from .acting import NoisyActor, alike, env_worker, roll, shown, targets
from .test_acting import Found, finish
from .test_held_out import evaluated

SAID = {
    "raises": r"raised RuntimeError: out of coffee \(toys.py:\d+\)",
    "hangs": r"did not answer in time \(task.step_limit_s\)",
    "shape": r"showed observations of shape \[4, 3\]; expected \[4, 4\]",
    "few": r"gave rewards, terminations and truncations of shapes \[3\], \[4\], \[4\]; expected "
    r"\[4\]",
    "nan": r"showed an observation that is not finite: \[nan, nan, nan, nan\]",
    "reward": "gave a reward of inf",
}
ONE = ("nan", "reward")
"""Where it can be told which environment it was."""

HOW = pytest.mark.parametrize("how", SAID)
SCALED = Normalization(observations=True, rewards=True)


def bad(how: str = "nan", *, at: int = 5, share: float = 1.1, **options: Any) -> EnvSpec:
    """CartPoles of which environment 1 of a group goes wrong, and of how many groups."""
    own = {"how": how, "at": at, "share": share}
    return EnvSpec(id="toys/BadCartPoles-v0", options=own, vectorized=True, **options)


def whose(how: str, numbers: str = r"\[0, 1, 2, 3\]", one: str = "1") -> str:
    named = f"environment {one}" if how in ONE else f"environments {numbers}"
    since = "it was" if how in ONE else "they were"
    return (
        rf"{named} of 'toys/BadCartPoles-v0' \(seed \d+\) {SAID[how]} at step 5 since {since} made"
    )


def rolled(worker: EnvWorker, **options: Any) -> Trajectories:
    return roll(worker, 0, num_envs=4, group_size=4, **options)


@HOW
def test_all_of_the_group_begin_anew_and_one_is_counted(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker, begun_s = env_worker(bad(how, step_limit_s=0.2)), time.monotonic()
    with caplog.at_level(logging.WARNING, "penstock.envs"):
        traj = rolled(worker)
    assert time.monotonic() - begun_s < 10
    assert worker.metrics["env_restarts"].value == 1
    (said,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(whose(how) + r"; restarted: \[0, 1, 2, 3\]", said)
    # The fifth step does not count, and the episodes of all are cut off with the fourth.
    assert traj.mask.logical_not().nonzero()[:, 1].tolist() == [4] * 4
    assert traj.truncated.nonzero()[:, 1].tolist() == [3] * 4
    assert not traj.terminated.any()
    assert traj.reward[0].tolist() == [1, 1, 1, 1, 0, 1, 1, 1]
    # It was taken in what they showed last; the next step is the first of new episodes.
    fine = rolled(env_worker(bad(share=0)))
    assert torch.equal(traj.obs[:, :5], fine.obs[:, :5])
    assert traj.obs[:, 5].abs().max() <= 0.05 < fine.obs[:, 5].abs().max()
    assert torch.isfinite(traj.obs).all()
    counted = shown(worker)
    assert (counted["episodes"], counted["env_steps"]) == (
        0,
        28,
    )  # what is given up is none that ended


@HOW
def test_one_that_always_fails_ends_the_run_named_with_seed_and_step(how: str) -> None:
    worker = env_worker(bad(how, max_restarts=2, step_limit_s=0.1))
    with pytest.raises(
        WorkerError,
        match=rf"^{whose(how)}, failure 3 of its group in one rollout; 2 may be made good by a "
        r"restart \(task.max_restarts\)\n    with task.vectorized=false only what goes wrong is "
        "restarted, not its whole group$",
    ):
        rolled(worker, horizon=100)


def test_those_that_begin_in_the_second_attempt_are_counted_too() -> None:
    """With 40 % of all groups bad, 16 groups; an episode that never began is not given up."""
    worker = env_worker(bad(at=0, share=0.4, max_restarts=40))
    traj = roll(worker, 0, num_envs=16, group_size=1, horizon=4)
    assert worker.metrics["env_restarts"].value > 0
    assert not traj.truncated.any()
    assert traj.mask.all()
    worker.metrics.clear()
    roll(worker, 1, num_envs=16, group_size=1, horizon=4)
    assert worker.metrics["env_restarts"].value == 0


def test_several_that_go_wrong_at_once_are_named_and_counted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = bad()
    worker = env_worker(replace(spec, options={**spec.options, "row": [0, 2]}))
    with caplog.at_level(logging.WARNING, "penstock.envs"):
        rolled(worker)
    assert worker.metrics["env_restarts"].value == 1
    assert caplog.records[0].getMessage().startswith("environments [0, 2] of 'toys/BadCartPoles-v")


def test_what_is_replaced_is_closed_and_may_take_its_time_to_be_made() -> None:
    open_before = toys.BadCartPoles.num_open
    spec = bad(step_limit_s=0.2)
    worker = env_worker(replace(spec, options={**spec.options, "making_s": 0.3}))
    rolled(worker)
    assert worker.metrics["env_restarts"].value == 1
    assert toys.BadCartPoles.num_open == open_before + 1
    worker.close()
    assert toys.BadCartPoles.num_open == open_before


class Ponders(NoisyActor):
    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        time.sleep(0.1)
        return super().act(obs, noise, action_mask)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_the_time_of_a_step_is_not_that_of_an_answer(backend: Any) -> None:
    worker = env_worker(EnvSpec(id="CartPole-v1", backend=backend, step_limit_s=0.05))
    rolled(worker, horizon=2, actor=Ponders())
    assert worker.metrics["env_restarts"].value == 0


def test_advantages_do_not_reach_over_a_restart() -> None:
    traj = rolled(env_worker(bad()))
    value = torch.arange(traj.reward.numel(), dtype=torch.float32).view(traj.reward.shape)
    target = targets(traj, value, torch.zeros(4))
    # Worth its reward and what the critic says of the state that the failed step was taken from.
    assert torch.equal(target.value_target[:, 3], traj.reward[:, 3] + value[:, 4])
    assert torch.equal(target.advantage[:, 4], torch.zeros(4))


@HOW
def test_what_went_wrong_never_enters_the_moments(how: str) -> None:
    worker = env_worker(bad(how, normalization=SCALED, step_limit_s=0.2))
    scaled, plain = rolled(worker), rolled(env_worker(bad(how, step_limit_s=0.2)))
    state: Any = worker._live[0].moments()["normalizer"]  # pyright: ignore[reportPrivateUsage]
    # Of the first observations, and of what every step has shown, the one that failed included.
    assert state["obs"]["count"] == pytest.approx(4 * 9, abs=1e-3)
    seen = np.concatenate([plain.obs.numpy().reshape(-1, 4), plain.last_obs.numpy()])
    assert state["obs"]["mean"] == pytest.approx(seen.mean(axis=0), abs=1e-3)
    assert state["returns"]["count"] == pytest.approx(4 * 7, abs=1e-3)
    assert torch.isfinite(scaled.reward).all()
    assert torch.equal(scaled.mask, plain.mask)


@pytest.mark.parametrize("normalization", [Normalization(), SCALED], ids=["plain", "scaled"])
def test_what_was_saved_after_a_restart_goes_on_bit_for_bit(
    normalization: Normalization, tmp_path: Path
) -> None:
    spec = bad(at=7, normalization=normalization)
    worker, resumed = env_worker(spec), env_worker(spec)
    rolled(worker, horizon=10)
    assert worker.metrics["env_restarts"].value == 1
    worker.save_state(tmp_path)
    resumed.load_state(tmp_path)
    for step in (1, 2):  # in which they go wrong again, with seeds that no object had before
        one, other = (roll(each, step, num_envs=4, group_size=4) for each in (worker, resumed))
        assert alike(one, other)
    assert worker.metrics["env_restarts"].value == 3
    assert resumed.metrics["env_restarts"].value == 2


def test_a_state_of_objects_that_were_never_counted_is_gone_on_from(tmp_path: Path) -> None:
    spec = bad(share=0)
    worker, resumed = env_worker(spec), env_worker(spec)
    roll(worker, 0)
    worker.save_state(tmp_path)
    for file in tmp_path.glob("group-*.json"):
        text, count = re.subn(r', "made": 1, "steps": 8', "", file.read_text())
        assert count == 1
        file.write_text(text)
    resumed.load_state(tmp_path)
    assert alike(roll(worker, 1), roll(resumed, 1))


def test_those_that_cannot_be_reset_are_not_resumed(tmp_path: Path) -> None:
    worker = env_worker(bad(share=0))
    roll(worker, 0)
    worker.save_state(tmp_path)
    options = {"at": 0, "share": "much"}
    broken = env_worker(EnvSpec(id=bad().id, options=options, vectorized=True))
    broken.load_state(tmp_path)
    with pytest.raises(
        StateError,
        match=r"^environments \[0, 1\] of 'toys/BadCartPoles-v0' \(seed \d+\) do not come to where "
        r"they were when they were saved: they raised TypeError: .* \(toys.py:\d+\), reset; they",
    ):
        roll(broken, 1)


HALF = replace(bad(share=0.5, at=9, max_restarts=9), id=f"{toys.__name__}:toys/BadCartPoles-v0")
"""About half of all groups go wrong in their ninth step, until another object is as it should."""


@pytest.mark.slow
@pytest.mark.parametrize("normalization", [Normalization(), SCALED], ids=["plain", "scaled"])
def test_a_rollout_does_not_depend_on_the_ring_or_on_who_has_which_group(
    normalization: Normalization,
) -> None:
    spec = replace(HALF, normalization=normalization)
    found: list[Any] = []
    for num_overlapped in (1, 2, 3, "auto"):
        one = EnvWorkerSpec(env=spec, num_overlapped=num_overlapped).build(WorkerContext("env", 1))
        rolls = [roll(one, step, num_envs=8, group_size=2, horizon=12) for step in range(3)]
        found.append((rolls, dict(one.metrics)))
        one.close()
    assert found[0][1]["env_restarts"].value > 0
    for rolls, metrics in found[1:]:
        assert metrics == found[0][1]
        assert all(alike(*pair) for pair in zip(rolls, found[0][0], strict=True))
    parts = [env_worker(spec), env_worker(spec)]
    for step in range(3):
        rolls = [
            roll(one, step, num_envs=8, group_size=2, horizon=12, groups=groups)
            for one, groups in zip(parts, ((0, 1), (2, 3)), strict=True)
        ]
        joined = {name: torch.cat([vars(part)[name] for part in rolls]) for name in vars(rolls[0])}
        assert alike(found[0][0][step], Trajectories(**joined))


@pytest.fixture(scope="module")
def inline() -> Found:
    found = finish(InProcess(), "inline", 1, env=HALF)
    fine = replace(HALF, options={**HALF.options, "share": 0})
    assert found != finish(InProcess(), "inline", 1, env=fine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("server", ["decoupled", "main", "policy"])
def test_wherever_acting_happens_it_ends_the_same(server: str, inline: Found) -> None:
    assert finish(InProcess(), server, 1, env=HALF, num_overlapped=2) == inline


def test_in_a_ring_one_that_hangs_ends_the_rollout() -> None:
    spec = bad("hangs", step_limit_s=0.1, at=1)
    spec = replace(spec, options={**spec.options, "seconds": 0.6})
    one = EnvWorkerSpec(env=spec, num_overlapped=2).build(WorkerContext("env", 1))
    with pytest.raises(WorkerError, match="took longer than 0.2 s"):
        roll(one, 0)
    time.sleep(0.8)  # What hung goes on to its next question, and ends there.
    one.close()


def test_held_out_episodes_that_are_given_up_with_it_do_not_count() -> None:
    worker = env_worker(bad(at=30, share=0.5, max_restarts=20))
    actor: Actor = NoisyActor(2)
    found = evaluated(worker, num_envs=8, num_episodes=4, actor=actor)
    assert worker.metrics["env_restarts"].value > 0
    assert worker.metrics["episodes"].value == 32
    assert float(found.min()) >= 9


def test_held_out_episodes_that_never_end_well_name_who_it_was() -> None:
    spec = bad(at=6, max_restarts=100)
    with pytest.raises(
        WorkerError,
        match=r"^environment 0 \(seed \d+\) gave up \d+ held-out episodes in a row; last of all, "
        r"environment 1 of 'toys/BadCartPoles-v0' \(seed \d+\) showed an observation that is not "
        r"finite: \[nan, nan, nan, nan\] at step 6 since it was made$",
    ):
        evaluated(env_worker(spec), num_envs=2)


def test_large_numbers_are_numbers_if_float32_has_them() -> None:
    obs, reward = np.ones((2, 3), np.float32), np.ones(2)
    never = np.zeros(2, np.bool_)
    obs[1, 2], reward[0] = 3e38, -3e38
    stepped = Stepped(obs, reward, never, never)
    assert finite(stepped) is stepped
    reward[0] = -4e38
    with pytest.raises(BadRows) as caught:
        finite(stepped)
    assert caught.value.what == {0: "gave a reward of -4e+38"}
