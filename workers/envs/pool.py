"""A group stepped by EnvPool, which computes environments in threads of its own.

EnvPool seeds an environment once, when it is made, so what one shows depends on all of its actions
since. They are kept, a byte for a choice, and a group that was saved takes them again.

An environment that shows what is no number is reset, and goes on with its own random numbers. Where
the pool as a whole fails, another takes its place, with other seeds.
"""

from __future__ import annotations

import base64
import importlib
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError, StateError, WorkerError, nearest
from .group import (
    BadRows,
    Members,
    RestartedGroup,
    Stepped,
    StepTooLong,
    action_space,
    began,
    described,
    digest,
    env_seed,
    finite,
    from_columns,
    laid_out,
    num_features,
    to_features,
)


@contextmanager
def without_casts() -> Generator[None]:
    """Without Gymnasium's warning that bounds, which EnvPool gives as f64, become f32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield


def ask_envpool(
    kind: str,
    name: str,
    function: str,
    options: Mapping[str, Any],
    *,
    advice: str = "",
    **further: Any,
) -> Any:
    """Call a function of EnvPool for an environment or game."""
    try:
        pool = importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend=envpool needs the package {error.name}, which is not installed\n"
            "    pip install penstock-rl[envpool]"
        ) from error
    known: list[str] = pool.list_all_envs()
    if name not in known:
        raise ConfigError(f"EnvPool has no {kind} '{name}'{nearest(name, known)}{advice}")
    try:
        with without_casts():
            return getattr(pool, function)(name, **options, **further)
    except Exception as error:  # of many kinds, assertions among them
        raise ConfigError(f"{kind} '{name}' cannot be made by EnvPool: {error}") from error


_MASKS = ("action_mask", "legal_action_mask")  # names of them in EnvPool's environments
_GYMNASIUM = "\n    leave out backend=envpool, and it is Gymnasium's"


class PoolGroup(RestartedGroup):
    """Environments of EnvPool's. An environment's seed and episodes are its own.

    What is being computed when the alarm rings is not interrupted.
    """

    advice = "\n    without task.backend=envpool they are stepped, and restarted, one by one"

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.num_features, self.actions = pool_spaces(
            members.name, members.options, masked=members.masked
        )
        self._begin_anew(1)
        self._env = self._make()
        with without_casts():
            self._take = from_columns(self._env.action_space)
            self._flat = to_features(self._env.observation_space, many=True)
        small = self.actions.kind == "discrete" and max(self.actions.sizes) <= 256
        self._kept = np.dtype(np.uint8 if small else np.float32)
        self._obs = np.zeros((self.num_envs, self.num_features), np.float32)
        self._over = np.zeros(self.num_envs, np.bool_)
        self._info: Mapping[str, Any] = {}

    def _begin_anew(self, num_made: int) -> None:
        """Note that the next pool is the first, the second, ...: what it is seeded by."""
        self._num_made = num_made
        again = () if num_made == 1 else (num_made - 1,)
        ours = self._members
        self._seeds = [
            env_seed(ours.seed, ours.role, "envpool", number, *again) for number in ours.numbers
        ]
        self._actions, self._num_steps = bytearray(), 0
        self._resets: list[tuple[int, list[int]]] = []

    def _make(self) -> Any:
        made = ask_envpool(
            *("environment", self._name, "make_gymnasium", self._members.options),
            num_envs=self.num_envs,
            seed=self._seeds,
        )
        with without_casts():
            _ = made.observation_space  # which it asks itself for at every step
        return made

    def start(self) -> NDArray[np.float32]:
        return self._or_restarted(lambda: finite(self._begun())).obs

    def step(self, action: NDArray[np.float32]) -> Stepped:
        self._check(action)
        return self._or_restarted(lambda: finite(self._taken(action)))

    def _or_restarted(self, call: Callable[[], Stepped]) -> Stepped:
        found = self._guarded(call, self._failed)
        self._alarm.disarm()
        self._obs, self._over = found.obs, found.terminated | found.truncated
        return found

    def _begun(self) -> Stepped:
        obs, self._info = self._env.reset()
        return began(self._flat(obs), self.num_envs, self.num_features)

    def _taken(self, action: NDArray[np.float32]) -> Stepped:
        self._actions += action.astype(self._kept).tobytes()
        self._num_steps += 1
        obs, *shown, self._info = self._env.step(self._take(action))
        return laid_out((self._flat(obs), *shown), self.num_envs, self.num_features)

    def _failed(self, error: BaseException) -> Callable[[], Stepped]:
        step = self._num_steps
        if not isinstance(error, BadRows):
            said = f"{self._named()} {described(error)} at step {step} since they were made"
            self._note(said, range(self.num_envs), error)
            return self._replace
        for row, what in error.what.items():
            whose = f"of EnvPool's '{self._name}' (seed {self._seeds[row]})"
            said = f"environment {self._numbers[row]} {whose} {what} at step {step} since it was"
            self._note(f"{said} made", (row,), error)
        return lambda: finite(self._reset(list(error.what), error.stepped))

    def _replace(self) -> Stepped:
        close = self._env.close
        self._begin_anew(self._num_made + 1)
        self._env = self._remade(close, self._make)
        return finite(self._begun())

    def _reset(self, rows: list[int], stepped: Stepped) -> Stepped:
        """The same step with a reset of `rows`, unchecked."""
        self._resets.append((self._num_steps, rows))
        shown, info = self._env.reset(np.array(rows, np.int32))
        stepped.obs[rows] = self._flat(shown).reshape(len(rows), self.num_features)
        stepped.reward[rows] = stepped.terminated[rows] = stepped.truncated[rows] = 0
        for name in self._mask_names():
            self._info[name][rows] = info[name]
        return stepped

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
        seeds = f"seeds {self._seeds!s:.80}"
        return f"EnvPool's environments {self._numbers!s:.80} of '{self._name}' ({seeds})"

    def action_mask(self) -> NDArray[np.bool_] | None:
        """The allowed choices; everything is allowed where an episode is over."""
        if not self.actions.masked:
            return None
        names = self._mask_names()
        if not names:
            raise WorkerError(
                f"{self._named()} have no {' or '.join(_MASKS)} among what they say, which is "
                f"{', '.join(self._info)}; set masked=false"
            )
        found = np.asarray(self._info[names[0]], np.bool_)
        return found.reshape(self.num_envs, -1) | self._over[:, None]

    def _mask_names(self) -> list[str]:
        return [name for name in _MASKS if name in self._info]

    def seed_of(self, index: int) -> int:
        return self._seeds[index]

    def state(self) -> dict[str, Any]:
        actions = base64.b64encode(zlib.compress(self._actions, level=1)).decode()
        return {
            "actions": actions,
            "dtype": self._kept.str,
            "obs": digest(self._obs),
            "made": self._num_made,
            "resets": self._resets,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        taken = np.frombuffer(
            zlib.decompress(base64.b64decode(state["actions"])), np.dtype(state["dtype"])
        )
        taken = taken.reshape(-1, self.num_envs, self.actions.num_components).astype(np.float32)
        resets: dict[int, list[list[int]]] = defaultdict(list)
        for step, rows in state.get("resets", []):
            resets[step].append(rows)
        num_made = int(state.get("made", 1))
        if num_made > 1:
            self._env.close()
            self._begin_anew(num_made)
            self._env = self._make()
        try:
            stepped = self._taken_again(taken, resets)
        except (Exception, StepTooLong) as error:
            raise StateError(
                f"{self._named()} {described(error)} at step {self._num_steps} since they were "
                f"made, where {len(taken)} were taken again; they had not when they were saved"
            ) from error
        finally:
            self._alarm.disarm()
        self._obs, self._over = stepped.obs, stepped.terminated | stepped.truncated
        if digest(self._obs) != state["obs"]:
            raise StateError(
                f"{self._named()} show something else after the {len(taken)} steps since they were "
                "made than when they were saved; EnvPool may be of another version"
            )

    def _taken_again(
        self, taken: NDArray[np.float32], resets: Mapping[int, list[list[int]]]
    ) -> Stepped:
        self._alarm.arm()
        stepped = self._begun()
        for action in (None, *taken):
            if action is not None:
                self._alarm.arm()
                stepped = self._taken(action)
            for rows in resets.get(self._num_steps, ()):
                stepped = self._reset(rows, stepped)
        return stepped

    def close(self) -> None:
        self._env.close()


def pool_spaces(
    env_id: str, options: Mapping[str, Any], *, masked: bool = False
) -> tuple[int, ActionSpace]:
    made = ask_envpool("environment", env_id, "make_spec", options, advice=_GYMNASIUM)
    if getattr(made.config, "max_num_players", 1) > 1:
        raise ConfigError(
            f"environment '{env_id}' of EnvPool is played by several, whose moves cannot be told "
            "apart here\n    for games of two, see algorithm=self_play"
        )
    with without_casts():
        shown, taken = made.gymnasium_observation_space, made.gymnasium_action_space
    if isinstance(shown, spaces.Dict):
        raise ConfigError(
            f"environment '{env_id}' of EnvPool shows {', '.join(shown)}; expected one array"
        )
    return num_features(shown, env_id), action_space(taken, env_id, masked=masked)
