"""Running moments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.workers.envs.live import Moments, Normalization, Normalizer
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvTaskSpec

from .acting import env_worker, roll


def test_moments_are_those_of_all_rows() -> None:
    rows = np.random.default_rng(0).normal(3, 2, (500, 4))
    moments = Moments(4)
    for part in np.array_split(rows, 7):
        moments.add(part)
    assert moments.mean == pytest.approx(rows.mean(0), abs=1e-4)
    assert moments.variance == pytest.approx(rows.var(0), abs=1e-4)


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sum() -> None:
    scaled = Normalizer(Normalization(rewards=True, discount=0.5), 2, 1)
    nobody, everyone = np.array([False, False]), np.array([True, True])
    scaled.reward(np.array([1.0, 3.0]), np.array([True, False]), everyone)
    found = scaled.reward(np.array([1.0, 1.0]), nobody, everyone)
    # Sums so far: 1 and 3, then 1 (its episode was over) and 0.5 * 3 + 1.
    assert found == pytest.approx(1 / np.std([1, 3, 1, 2.5]), abs=1e-3)
    # A step that does not count leaves no trace, and ends the sum.
    found = scaled.reward(np.array([0.0, 1.0]), nobody, np.array([False, True]))
    assert found[0] == 0
    found = scaled.reward(np.array([2.0, 2.0]), nobody, everyone)
    assert found == pytest.approx(2 / np.std([1, 3, 1, 2.5, 2.25, 2, 3.125]), abs=1e-3)
    assert np.array_equal(scaled.reward(np.zeros(2), nobody, nobody), np.zeros(2))


def test_steps_of_resets_and_episodes_given_up_do_not_scale_rewards() -> None:
    bad = EnvSpec(
        id="toys/Bad-v0", options={"how": "raises", "share": 0.2, "at": 4}, max_restarts=20
    )
    scaled = replace(bad, normalization=Normalization(rewards=True, discount=0.5))
    worker = env_worker(bad)
    plain = roll(worker, 0, num_envs=8, group_size=8, horizon=40)
    found = roll(env_worker(scaled), 0, num_envs=8, group_size=8, horizon=40)
    assert worker.metrics["env_restarts"].value > 0
    sums, current = [], np.zeros(8)
    for reward, counts in zip(plain.reward.numpy().T, plain.mask.numpy().T, strict=True):
        current = np.where(counts, 0.5 * current + reward, 0.0)
        sums += current[counts].tolist()
    assert torch.equal(found.mask, plain.mask)
    last = found.reward[:, -1][found.mask[:, -1]]
    assert last.numpy() == pytest.approx(1 / np.std(sums), abs=1e-3)


def test_nothing_is_scaled_unless_asked() -> None:
    plain = Normalizer(Normalization(), 1, 2)
    obs = np.array([[100.0, -100.0]], np.float32)
    assert plain.obs(obs) is obs


def test_groups_begin_with_the_moments_that_others_had_together(tmp_path: Path) -> None:
    scaled = Normalization(observations=True, rewards=True, discount=0.5)
    cartpole = EnvSpec(id="CartPole-v1", normalization=scaled)
    worker = env_worker(cartpole)
    roll(worker, 0, num_envs=6, group_size=2, horizon=50)
    worker.save_state(tmp_path)
    plain = env_worker(replace(cartpole, normalization=Normalization()))
    found = roll(plain, 0, num_envs=6, group_size=2, horizon=50)
    seen = torch.cat([found.obs, found.last_obs[:, None]], dim=1).flatten(0, 1).numpy()
    begun = Normalizer(replace(scaled, start=str(tmp_path)), 1, 4).state()
    assert begun["obs"]["mean"] == pytest.approx(seen.mean(0), abs=1e-5)
    assert begun["obs"]["variance"] == pytest.approx(seen.var(0), rel=1e-3)
    assert begun["obs"]["count"] == pytest.approx(len(seen), abs=1e-2)
    assert begun["returns"]["count"] == pytest.approx(int(found.mask.sum()), abs=1e-2)


def test_one_groups_moments_are_begun_with_as_they_are(tmp_path: Path) -> None:
    scaled = Normalization(observations=True, rewards=True)
    worker = env_worker(EnvSpec(id="CartPole-v1", normalization=scaled))
    roll(worker, 0, num_envs=2, group_size=2)
    worker.save_state(tmp_path)
    saved = json.loads((tmp_path / "group-0.json").read_text())["normalizer"]
    begun = Normalizer(replace(scaled, start=str(tmp_path)), 2, 4).state()
    assert (begun["obs"], begun["returns"]) == (saved["obs"], saved["returns"])


def test_moments_of_other_environments_are_refused(tmp_path: Path) -> None:
    start = Normalization(observations=True, start=str(tmp_path))
    acrobot = EnvTaskSpec(id="Acrobot-v1", normalization=start)
    with pytest.raises(ConfigError) as nothing:
        acrobot.build()
    assert str(nothing.value) == (
        f"'task.normalization.start': '{tmp_path}' holds no environments\n"
        "    give the folder of the role in a checkpoint, as runs/ID/checkpoints/step-N/env"
    )
    worker = env_worker(EnvSpec(id="CartPole-v1"))
    roll(worker, 0)
    worker.save_state(tmp_path)
    with pytest.raises(ConfigError) as other:
        acrobot.build()
    assert str(other.value) == (
        f"'task.normalization.start': environments in '{tmp_path}' show 4 numbers, and here 6\n"
        "    use the task that was trained on there"
    )
