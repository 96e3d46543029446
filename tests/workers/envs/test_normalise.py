"""Running moments."""

from __future__ import annotations

import numpy as np
import pytest
from penstock.workers.envs.normalise import Moments, Normalisation, Normaliser


def test_moments_are_those_of_all_rows() -> None:
    rows = np.random.default_rng(0).normal(3, 2, (500, 4))
    moments = Moments(4)
    for part in np.array_split(rows, 7):
        moments.add(part)
    assert moments.mean == pytest.approx(rows.mean(0), abs=1e-4)
    assert moments.variance == pytest.approx(rows.var(0), abs=1e-4)


def test_rewards_are_divided_by_the_deviation_of_their_discounted_sum() -> None:
    scaled = Normaliser(Normalisation(rewards=True, discount=0.5), 2, 1)
    nobody = np.array([False, False])
    scaled.reward(np.array([1.0, 3.0]), np.array([True, False]))
    found = scaled.reward(np.array([1.0, 1.0]), nobody)
    # Sums so far: 1 and 3, then 1 (its episode was over) and 0.5 * 3 + 1.
    assert found == pytest.approx(1 / np.std([1, 3, 1, 2.5]), abs=1e-3)


def test_nothing_is_scaled_unless_asked() -> None:
    plain = Normaliser(Normalisation(), 1, 2)
    obs = np.array([[100.0, -100.0]], np.float32)
    assert plain.obs(obs) is obs
