"""A group stepped by EnvPool, which computes environments in threads of its own.

EnvPool seeds an environment once, when it is made, so what one shows depends on all of its actions
since. They are kept, a byte for a choice, and a group that was saved takes them again.
"""

from __future__ import annotations

import base64
import importlib
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ...algorithms.env_roles import ActionSpace
from ...dataflow.errors import ConfigError, StateError, WorkerError, nearest
from .alarm import StepAlarm
from .group import Stepped, digest, env_seed, flat_rows, step_together
from .spaces import action_space, from_columns, num_features

__all__ = ["PoolGroup", "pool_spaces"]

_MASKS = ("action_mask", "legal_action_mask")
"""What EnvPool's environments call the choices that are allowed."""


class PoolGroup:
    """An `EnvGroup` of EnvPool's. An environment's seed and episodes are its own.

    Args:
        env_id: EnvPool's name of the environment.
        numbers: Of the environments, unique in the run.
        seed: The run's.
        role: Whose environments they are.
        options: EnvPool's own, such as `num_threads`.
        alarm: Limits the time of a step; entered by whoever steps. What is being computed when it
            rings is not interrupted.
        masked: Whether they say which choices are allowed.

    Raises:
        ConfigError: If EnvPool is not installed or does not have it, or no actor can act in it.
    """

    def __init__(
        self,
        env_id: str,
        numbers: list[int],
        seed: int,
        role: str,
        options: Mapping[str, Any],
        *,
        alarm: StepAlarm,
        masked: bool = False,
    ) -> None:
        self._id, self._numbers, self._alarm = env_id, numbers, alarm
        self._seeds = [env_seed(seed, role, "envpool", number) for number in numbers]
        self.num_envs = len(numbers)
        self.num_features, self.actions = pool_spaces(env_id, options, masked=masked)
        self.num_agents = 1
        self.failures: list[tuple[int, int, str]] = []
        self._env: Any = _asked(
            env_id, "make_gymnasium", options, num_envs=self.num_envs, seed=self._seeds
        )
        with _quiet():
            _ = self._env.observation_space  # which it asks itself for at every step
            self._take = from_columns(self._env.action_space)
        small = self.actions.kind == "discrete" and max(self.actions.sizes) <= 256
        self._kept = np.dtype(np.uint8 if small else np.float32)
        self._actions = bytearray()
        self._obs = np.zeros((self.num_envs, self.num_features), np.float32)
        self._over = np.zeros(self.num_envs, np.bool_)
        self._info: Mapping[str, Any] = {}

    def start(self) -> NDArray[np.float32]:
        """See `EnvGroup.start`."""
        obs, self._info = self._env.reset()
        self._obs = self._flat(obs)
        return self._obs

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """See `EnvGroup.step`.

        Raises:
            WorkerError: If EnvPool fails or takes too long: single environments of it cannot be
                restarted. Or if an action is none, by which the process might end.
        """
        self._check(action)
        self._actions += action.astype(self._kept).tobytes()
        obs, reward, terminated, truncated, self._info = step_together(
            self._named, self._alarm, lambda: self._env.step(self._take(action))
        )
        self._obs, self._over = self._flat(obs), terminated | truncated
        return Stepped(self._obs, reward, terminated, truncated)

    def _check(self, action: NDArray[np.float32]) -> None:
        sizes = self.actions.sizes
        fits = action.shape == (self.num_envs, self.actions.num_components)
        good = (action >= 0) & (action < sizes) if fits and sizes else np.isfinite(action)
        if not fits or not good.all():
            raise WorkerError(
                f"{self._named()} were given actions {action.tolist()!s:.80}; expected "
                f"{self.num_envs} of {self.actions}"
            )

    def _named(self) -> str:
        return f"EnvPool's environments {self._numbers} of '{self._id}' (seeds {self._seeds})"

    def _flat(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        return flat_rows(self._named, obs, self.num_envs, self.num_features)

    def action_mask(self) -> NDArray[np.bool_] | None:
        """See `EnvGroup.action_mask`; where an episode is over, everything is allowed.

        Raises:
            WorkerError: If the environments do not say which choices are allowed.
        """
        if not self.actions.masked:
            return None
        found = next((self._info[name] for name in _MASKS if name in self._info), None)
        if found is None:
            raise WorkerError(
                f"{self._named()} have no {' or '.join(_MASKS)} among what they say, which is "
                f"{', '.join(self._info)}; set masked=false"
            )
        return np.asarray(found, np.bool_).reshape(self.num_envs, -1) | self._over[:, None]

    def seed_of(self, index: int) -> int:
        """See `EnvGroup.seed_of`: that of the environment, in all its episodes."""
        return self._seeds[index]

    def state(self) -> dict[str, Any]:
        """See `EnvGroup.state`."""
        actions = base64.b64encode(zlib.compress(self._actions, level=1)).decode()
        return {"actions": actions, "dtype": self._kept.str, "obs": digest(self._obs)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `EnvGroup.restore`."""
        taken = np.frombuffer(
            zlib.decompress(base64.b64decode(state["actions"])), np.dtype(state["dtype"])
        )
        taken = taken.reshape(-1, self.num_envs, self.actions.num_components)
        self.start()
        for action in taken:
            self.step(action.astype(np.float32))
        if digest(self._obs) != state["obs"]:
            raise StateError(
                f"{self._named()} show something else after the {len(taken)} steps since the run's "
                "start than when they were saved; EnvPool may be of another version"
            )

    def close(self) -> None:
        """See `EnvGroup.close`."""
        self._env.close()


def pool_spaces(
    env_id: str, options: Mapping[str, Any], *, masked: bool = False
) -> tuple[int, ActionSpace]:
    """Numbers of an observation, and what can be done.

    Args:
        env_id: EnvPool's name of the environment.
        options: EnvPool's own.
        masked: Whether it says which choices are allowed.

    Raises:
        ConfigError: If EnvPool is not installed or does not have it, or no actor can act in it.
    """
    made = _asked(env_id, "make_spec", options)
    if getattr(made.config, "max_num_players", 1) > 1:
        raise ConfigError(
            f"environment '{env_id}' of EnvPool is played by several, whose moves cannot be told "
            "apart here\n    for games of two, see algorithm=self_play"
        )
    with _quiet():
        shown, taken = made.gymnasium_observation_space, made.gymnasium_action_space
    if isinstance(shown, spaces.Dict):
        raise ConfigError(
            f"environment '{env_id}' of EnvPool shows {', '.join(shown)}; expected one array"
        )
    return num_features(shown, env_id), action_space(taken, env_id, masked=masked)


@contextmanager
def _quiet() -> Generator[None]:
    """Without Gymnasium's warning that bounds, which EnvPool gives as f64, become f32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield


def _asked(env_id: str, function: str, options: Mapping[str, Any], **further: Any) -> Any:
    """What a function of EnvPool's makes of an environment."""
    try:
        pool = importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend=envpool needs the package {error.name}, which is not installed\n"
            "    install penstock[envpool]"
        ) from error
    known: list[str] = pool.list_all_envs()
    if env_id not in known:
        raise ConfigError(
            f"EnvPool has no environment '{env_id}'{nearest(env_id, known)}\n"
            "    leave out backend=envpool, and it is Gymnasium's"
        )
    try:
        with _quiet():
            return getattr(pool, function)(env_id, **options, **further)
    except Exception as error:  # of many kinds, assertions among them
        raise ConfigError(f"environment '{env_id}' cannot be made by EnvPool: {error}") from error
