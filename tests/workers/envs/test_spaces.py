"""Spaces as columns."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from penstock.algorithms.roles.environment import ActionSpace
from penstock.workers.envs.spaces import action_space, from_columns, num_features, to_features


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (spaces.Discrete(3), ActionSpace("discrete", sizes=(3,))),
        (spaces.Discrete(4, start=2), ActionSpace("discrete", sizes=(4,))),
        (spaces.MultiDiscrete([2, 5]), ActionSpace("discrete", sizes=(2, 5))),
        (spaces.MultiBinary(3), ActionSpace("discrete", sizes=(2, 2, 2))),
        (
            spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32)),
            ActionSpace("continuous", low=(-1.0, 0.0), high=(1.0, float("inf"))),
        ),
    ],
    ids=str,
)
def test_what_can_be_done(space: spaces.Space[object], expected: ActionSpace) -> None:
    assert action_space(space, "any") == expected
    take = from_columns(space)
    columns = np.zeros((6, expected.num_components), np.float32)
    assert space.contains(take(columns[0]))
    assert all(space.contains(action) for action in take(columns))


def test_numbers_are_clipped_by_the_environment_only() -> None:
    take = from_columns(spaces.Box(-1, 1, (1, 2), np.float32))
    assert take(np.array([3.0, -0.5], np.float32)).tolist() == [[1.0, -0.5]]


def test_choices_begin_where_the_environment_wants_them() -> None:
    take = from_columns(spaces.Discrete(4, start=2))
    assert take(np.array([[0.0], [3.0]], np.float32)).tolist() == [2, 5]


def test_observations_lie_flat() -> None:
    box = spaces.Box(0, 1, (2, 3), np.float32)
    nested = spaces.Dict({"at": spaces.Discrete(3), "box": box})
    assert num_features(nested, "any") == 9
    obs = {"at": 1, "box": np.ones((2, 3), np.float32)}
    assert to_features(nested)(obs).tolist() == [0, 1, 0] + [1] * 6
