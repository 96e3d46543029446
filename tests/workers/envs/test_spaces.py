"""Spaces as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from penstock.algorithms.roles.environment import ActionSpace
from penstock.dataflow.errors import ConfigError
from penstock.workers.envs.group import (
    BadEnv,
    action_space,
    from_columns,
    num_features,
    to_features,
)


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


ACTIONS = [
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [2, 3]])),
    spaces.MultiDiscrete([2, 3], dtype=np.int32),
    spaces.MultiBinary((2, 3)),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2, 2), np.float64),
    spaces.Box(-1, 1, (), np.float32),
]


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_an_action_has_the_shape_and_the_type_of_its_space(space: spaces.Space[Any]) -> None:
    """Checks an action alone, and as one of several, as a vector environment takes them."""
    found = action_space(space, "any")
    columns = np.ones((5, found.num_components), np.float32)
    take = from_columns(space)
    alone, several = take(columns[0]), take(columns)
    assert space.contains(alone)
    assert (alone.shape, alone.dtype) == (space.shape, space.dtype)
    assert (several.shape, several.dtype) == ((5, *alone.shape), space.dtype)
    assert all(np.array_equal(one, alone) for one in several)


IMAGE = spaces.Box(0, 255, (4, 3, 2), np.uint8)
OBSERVATIONS = [
    (IMAGE, np.full(IMAGE.shape, 51, np.uint8), [0.2] * 24),
    (spaces.Box(0, 3, (2,), np.uint8), np.array([1, 3], np.uint8), [1, 3]),
    (spaces.Box(-(2**60), 2**60, (2,), np.int64), np.array([5, -(2**24)]), [5, -(2**24)]),
    (spaces.Discrete(3, start=1), np.int64(2), [0, 1, 0]),
    (spaces.MultiBinary((2, 2)), np.eye(2, dtype=np.int8), [1, 0, 0, 1]),
    (
        spaces.Dict({"at": spaces.Discrete(2), "see": spaces.Tuple([IMAGE])}),
        {"at": 0, "see": (np.full(IMAGE.shape, 255, np.uint8),)},
        [1, 0] + [1] * 24,
    ),
]


@pytest.mark.parametrize(("space", "shown", "expected"), OBSERVATIONS, ids=lambda case: str(case))
def test_an_observation_is_the_same_alone_and_among_several(
    space: spaces.Space[Any], shown: Any, expected: list[float]
) -> None:
    alone = to_features(space)(shown)
    together = concatenate(space, [shown] * 3, create_empty_array(space, 3))
    several = to_features(space, many=True)(together)
    assert alone.dtype == several.dtype == np.float32
    assert alone.tolist() == pytest.approx(expected)
    assert [one.reshape(-1).tolist() for one in several] == [alone.tolist()] * 3


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("value", [2**24 + 1, -(2**24) - 1])
def test_a_whole_number_that_would_be_rounded_is_refused(value: int, many: bool) -> None:
    space = spaces.Box(-(2**60), 2**60, (2,), np.int64)
    shown = np.array([[1, value]])
    with pytest.raises(BadEnv, match=rf"^gave {value}, but whole numbers beyond 16,777,216 are"):
        to_features(space, many=many)(shown if many else shown[0])


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Text(5), "have text in them, whose letters are no quantities"),
        (spaces.Dict(a=spaces.Discrete(2), b=spaces.Text(5)), "have text in them"),
        (spaces.Box(0, 1, (0, 3)), "have no values at all"),
        (spaces.Sequence(spaces.Discrete(2)), "have no fixed number of values"),
    ],
)
def test_an_observation_that_is_not_numeric_is_refused(space: spaces.Space[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment 'any' shows observations of .*{said}"):
        num_features(space, "any")


def test_an_action_without_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="which no actor here can give"):
        action_space(spaces.Box(-1, 1, (0,)), "any")
