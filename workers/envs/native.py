"""A group stepped by one numpy object, such as Gymnasium's own vector CartPole.

Its state is its numbers: every array, number and text among the object's attributes, and its random
generator. All else about it must be fixed once it is made; what is not is refused when it is saved.

Where one of its environments goes wrong, another object takes its place, and the episodes of all of
them are given up: Gymnasium asks no object that resets by itself to reset some of its environments
when it is told to, and its CartPole then resets all of them without a word.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NoReturn, cast

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorWrapper
from numpy.typing import NDArray

from ...dataflow.errors import ConfigError, StateError, one_process
from .group import (
    BadRows,
    Members,
    RestartedGroup,
    Stepped,
    StepTooLong,
    action_space,
    began,
    closed_on_error,
    described,
    env_seed,
    finite,
    from_columns,
    laid_out,
    num_features,
    to_features,
)

# The kinds of numpy types that JSON can hold: truth values, whole and other numbers, texts.
_KINDS = "biufU"


def can_save(value: object) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return cast("NDArray[Any]", value).dtype.kind in _KINDS
    return value is None or isinstance(value, (bool, int, float, str))


def to_json(value: Any) -> Any:
    """Return an array, a number of numpy's or Python's, a text or None as JSON."""
    if isinstance(value, (np.ndarray, np.generic)):
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        values = value.reshape(-1).tolist()
        return {"dtype": value.dtype.str, "shape": shape, "values": values}
    return value


def from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    array = np.array(value["values"], dtype=value["dtype"])
    return array[0] if value["shape"] is None else array.reshape(value["shape"])


def copied(value: Any) -> Any:
    """Return a copy to compare with later; the value itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a class may refuse in any way; then only another is noticed
        return value


def same(one: Any, other: Any, known: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return whether two values are equal, or of one kind with equal parts."""
    pair = (id(one), id(other))
    if one is other or pair in known:
        return True
    if type(one) is not type(other):
        return False
    known = known | {pair}
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        pairs = zip(cast("list[Any]", one), other, strict=False)
        return len(one) == len(other) and all(same(a, b, known) for a, b in pairs)
    if isinstance(one, Mapping):
        whole = cast("Mapping[Any, Any]", one)
        return whole.keys() == other.keys() and all(same(whole[k], other[k], known) for k in whole)
    if isinstance(one, np.random.Generator):
        return same(one.bit_generator.state, other.bit_generator.state, known)
    if isinstance(one, MethodType):
        return one.__func__ is other.__func__
    parts = getattr(one, "__dict__", None)
    return _equal(one, other) or (bool(parts) and same(parts, vars(other), known))


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - as that of several truth values; then it is not a yes
        return False


# Attributes that are saved otherwise: the random generator, and what a wrapper is around.
_NOT_SAVED = ("_np_random", "env")


class NativeGroup(RestartedGroup):
    """One vector environment; an object that takes its place has another seed, which follows."""

    advice = (
        "\n    with task.vectorized=false only what goes wrong is restarted, not its whole group"
    )

    def __init__(self, members: Members, number: int) -> None:
        super().__init__(members)
        self._first_seed = env_seed(members.seed, members.role, "group", number)
        self._num_made, self._num_steps = 1, 0
        self._env = made = self._make()
        with closed_on_error(made.close):
            self.num_features = num_features(made.single_observation_space, members.name)
            self.actions = action_space(made.single_action_space, members.name)
        self._flat = to_features(made.single_observation_space, many=True)
        self._take = from_columns(made.single_action_space)
        self._fixed = self._not_saved()

    def _make(self) -> Any:
        made = _made(self._name, self.num_envs, self._members.options)
        with closed_on_error(made.close):
            mode = made.metadata.get("autoreset_mode")
            if mode is not AutoresetMode.NEXT_STEP:
                raise ConfigError(
                    f"vector environment '{self._name}' resets by {mode}; expected NEXT_STEP\n"
                    "    set vectorized=false to step single environments"
                )
        return made

    @property
    def _seed(self) -> int:
        again = self._num_made - 1
        return env_seed(self._first_seed, "restarted", again) if again else self._first_seed

    def start(self) -> NDArray[np.float32]:
        return self._or_replaced(self._begin).obs

    def step(self, action: NDArray[np.float32]) -> Stepped:
        return self._or_replaced(lambda: self._advance(action))

    def _or_replaced(self, call: Callable[[], Stepped]) -> Stepped:
        found = self._guarded(call, self._failed)
        self._alarm.disarm()
        return found

    def _begin(self) -> Stepped:
        obs, _ = self._env.reset(seed=self._seed)
        return finite(began(self._flat(obs), self.num_envs, self.num_features))

    def _advance(self, action: NDArray[np.float32]) -> Stepped:
        self._num_steps += 1
        obs, *shown = self._env.step(self._take(action))
        return finite(laid_out((self._flat(obs), *shown[:3]), self.num_envs, self.num_features))

    def _failed(self, error: BaseException) -> Callable[[], Stepped]:
        named, what, since = self._named(), described(error), "they were"
        if isinstance(error, BadRows):
            named, what = self._named(*error.what), next(iter(error.what.values()))
            since = "it was" if len(error.what) == 1 else since
        said = f"{named} {what} at step {self._num_steps} since {since} made"
        self._note(said, range(self.num_envs), error)
        return self._replace

    def _replace(self) -> Stepped:
        self._env = self._remade(self._env.close, self._make)
        self._fixed = self._not_saved()
        self._num_made, self._num_steps = self._num_made + 1, 0
        return self._begin()

    def _named(self, *rows: int) -> str:
        numbers = [self._numbers[row] for row in rows] or self._numbers
        which = f"environment {numbers[0]}" if len(rows) == 1 else f"environments {numbers!s:.80}"
        return f"{which} of '{self._name}' (seed {self._seed})"

    def seed_of(self, index: int) -> int:
        return self._seed  # that of the whole group

    def state(self) -> dict[str, Any]:
        *wrappers, values = [
            self._saved(vars(layer), fixed)
            for layer, fixed in zip(self._layers(), self._fixed, strict=True)
        ]
        random = self._env.unwrapped.np_random.bit_generator.state
        return {
            "values": values,
            "wrappers": wrappers,
            "random": random,
            "made": self._num_made,
            "steps": self._num_steps,
        }

    def _not_saved(self) -> list[dict[str, Any]]:
        """By layer, what must stay as it is now."""
        return [
            {name: copied(value) for name, value in vars(layer).items() if not can_save(value)}
            for layer in self._layers()
        ]

    def _layers(self) -> list[Any]:
        layers = [self._env]
        while isinstance(layers[-1], VectorWrapper):
            layers.append(layers[-1].env)
        return layers

    def _saved(self, now: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in now.items():
            if can_save(value):
                values[name] = to_json(value)
            elif name not in _NOT_SAVED and not (name in fixed and same(value, fixed[name])):
                raise StateError(
                    f"{self._named()} cannot be saved: attribute '{name}', a "
                    f"{type(value).__name__}, has changed since they were made, and only arrays, "
                    "numbers and texts are saved\n"
                    "    set task.vectorized=false to step single environments"
                )
        return values

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_made, self._num_steps = int(state.get("made", 1)), int(state.get("steps", 0))
        self._alarm.arm()
        try:
            self._env.reset(seed=self._seed)  # makes the generator
        except (Exception, StepTooLong) as error:
            self._refuse(f"they {described(error)}, reset", error)
        finally:
            self._alarm.disarm()
        layers = self._layers()
        all_values = [*state.get("wrappers", []), state["values"]]
        if len(all_values) != len(layers):
            self._refuse(f"they have {len(layers) - 1} wrappers, and had {len(all_values) - 1}")
        for layer, values in zip(layers, all_values, strict=True):
            for name, value in values.items():
                if name not in vars(layer):
                    self._refuse(f"they have no attribute '{name}'")
                setattr(layer, name, from_json(value))
        generator = self._env.unwrapped.np_random.bit_generator
        if generator.state["bit_generator"] != state["random"]["bit_generator"]:
            self._refuse(f"their random generator was a {state['random']['bit_generator']}")
        generator.state = dict(state["random"])

    def _refuse(self, what: str, error: BaseException | None = None) -> NoReturn:
        raise StateError(
            f"{self._named()} do not come to where they were when they were saved: {what}; they "
            "may be of another version"
        ) from error

    def close(self) -> None:
        with one_process():
            self._env.close()


@one_process()
def _made(env_id: str, num_envs: int, options: Mapping[str, Any]) -> Any:
    return gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **options)


@one_process()
def native_spaces(env_id: str, options: Mapping[str, Any]) -> tuple[gym.Space[Any], gym.Space[Any]]:
    try:
        made = _made(env_id, 1, options)
    except Exception as error:
        raise ConfigError(
            f"environment '{env_id}' cannot be made in its vectorized form: it {described(error)}\n"
            "    set task.vectorized=false to step single environments"
        ) from error
    with contextlib.closing(made):
        return made.single_observation_space, made.single_action_space
