"""A group of environments that step together: the unit that lives in one worker.

What a group does depends on its specification, the run's seed and the numbers of its environments,
never on other groups or on which process it is in. Three kinds keep this promise: `native.py`, one
object that steps all of them with numpy, `pool.py`, EnvPool's threads, and `loop.py`, single
environments one after another.

A call that fails is noted as a `Failure`, and another one is made in its place, which restarts what
failed; what else may be done differs from group to group.
"""

from __future__ import annotations

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError, WorkerError, one_process, raised_at
from .alarm import StepAlarm, StepTooLong

T = TypeVar("T")

LARGEST = float(np.finfo(np.float32).max)  # number of a float32 column
_WHOLE = 1 << 24  # float32 has all whole numbers up to this one


class Stepped(NamedTuple):
    """A step of a group; arrays may be overwritten by the next step."""

    obs: NDArray[np.float32]  # f32[envs, features]: after the step, before any reset
    reward: NDArray[Any]  # [envs], as all that follow
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class Failure(NamedTuple):
    """An environment went wrong, or several that nobody can tell apart."""

    said: str  # the environment, its fault and the step
    rows: tuple[int, ...]  # were restarted: their step counts as that of a reset


@dataclass(frozen=True, kw_only=True)
class Members:
    """The environments of a group, and how they are made and stepped."""

    name: str  # the library's, and that of messages
    options: Mapping[str, Any]  # keyword arguments of the environment
    numbers: list[int]  # unique in the run
    seed: int  # the run's
    role: str
    alarm: StepAlarm  # limits the time of a step; entered by whoever steps
    masked: bool = False  # whether they say which choices are allowed
    max_restarts: int = 3  # how many may fail before `failures` is cleared


class EnvGroup(ABC):
    """Environments that step together and are reset one step after their episode ended.

    Attributes:
        num_envs: Number of environments.
        num_features: Numbers of an observation.
        actions: What can be done.
        failures: What has failed and was restarted since this was cleared.
    """

    num_envs: int
    num_features: int
    actions: ActionSpace
    failures: list[Failure]

    @abstractmethod
    def start(self) -> NDArray[np.float32]:
        """Begin the first episodes; the observations, f32[envs, features]."""

    @abstractmethod
    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Step all environments by `action`, f32[envs, components]."""

    def action_mask(self) -> NDArray[np.bool_] | None:
        """bool[envs, choices] of the states they are in; None if everything is always allowed."""
        return None

    @abstractmethod
    def seed_of(self, index: int) -> int:
        """The seed behind the current episode of an environment, for messages."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that `restore` needs to go on in the same way, as JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            StateError: If the environments do not come to where they were.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all of them."""


class RestartedGroup(EnvGroup):
    """A group that restarts what fails, as often as it may."""

    advice = ""  # what else would fix it, as lines of a message

    def __init__(self, members: Members) -> None:
        self._members, self._alarm = members, members.alarm
        self._name, self._numbers = members.name, members.numbers
        self.num_envs = len(members.numbers)
        self.failures = []

    def _guarded(
        self, call: Callable[[], T], instead: Callable[[BaseException], Callable[[], T]]
    ) -> T:
        """The call's result, or that of what `instead` makes of a failure."""
        while True:
            self._alarm.arm()
            try:
                found = call()
            except (Exception, StepTooLong) as error:
                self._alarm.disarm()
                if isinstance(error, WorkerError):
                    raise
                call = instead(error)
            else:
                return found

    def _note(self, said: str, rows: Iterable[int], error: BaseException) -> None:
        """Count a failure, and see that no more fail than may."""
        self.failures.append(Failure(said, tuple(rows)))
        most = self._members.max_restarts
        if len(self.failures) > most:
            raise WorkerError(
                f"{said}, failure {len(self.failures)} of its group in one rollout; "
                f"{most} may be made good by a restart (task.max_restarts)"
                f"{self.advice}"
            ) from error

    def _remade(self, close: Callable[[], object], make: Callable[[], T]) -> T:
        """Something new in the place of what failed; making it has no limit but the engine's."""
        with contextlib.suppress(Exception, StepTooLong):  # it is broken already
            close()
        self._alarm.disarm()
        try:
            made = make()
        except ConfigError as error:
            raise BadEnv(f"could not be made anew: {error},") from error
        except Exception as error:
            raise BadEnv(f"could not be made anew, which {described(error)}") from error
        self._alarm.arm()
        return made


def env_seed(seed: int, role: str, *names: int | str) -> int:
    """A seed below 2^31 for the thing that `names` stand for; equal names, equal seed."""
    text = "\x1f".join(map(str, (seed, role, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def close_all(closes: Iterable[Callable[[], None]]) -> None:
    """Close several things; one that raises does not keep the others open."""
    errors: list[Exception] = []
    for close in closes:
        try:
            with one_process():
                close()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def closed_on_error(close: Callable[[], None]) -> Generator[None]:
    """Close something if the body raises, which is what is told, whatever closing raises then.

    After an interruption it is left as it is: nobody could interrupt closing again.
    """
    try:
        yield
    except Exception:
        with contextlib.suppress(Exception):
            close()
        raise


def digest(obs: NDArray[np.float32]) -> str:
    return hashlib.sha256(obs.tobytes()).hexdigest()


class BadEnv(Exception):
    """A fault of an environment, or of several that cannot be told apart."""


class BadRows(Exception):
    """A fault of some of the environments that were stepped together, in words, by row."""

    def __init__(self, what: dict[int, str], stepped: Stepped) -> None:
        super().__init__(str(what))
        self.what, self.stepped = what, stepped


def described(error: BaseException) -> str:
    """Describe a failure, in words that follow the environment's name."""
    if isinstance(error, BadEnv):
        return str(error)
    if isinstance(error, StepTooLong):
        return "did not answer in time (task.step_limit_s)"
    return f"raised {type(error).__name__}: {error} ({raised_at(error).short})"


def not_finite(obs: NDArray[np.float32]) -> str:
    return f"showed an observation that is not finite: {obs.tolist()!s:.80}"


def began(obs: NDArray[Any], num_envs: int, num_features: int) -> Stepped:
    """First observations of several environments; raises as `laid_out`."""
    nothing, never = np.zeros(num_envs, np.float32), np.zeros(num_envs, np.bool_)
    return laid_out((obs, nothing, never, never.copy()), num_envs, num_features)


def laid_out(shown: Sequence[NDArray[Any]], num_envs: int, num_features: int) -> Stepped:
    """A step of several environments, their observations laid out flat."""
    obs, reward, terminated, truncated = shown
    if obs.shape[0] != num_envs or obs.size != num_envs * num_features:
        raise BadEnv(
            f"showed observations of shape {list(obs.shape)}; expected [{num_envs}, {num_features}]"
        )
    if not reward.shape == terminated.shape == truncated.shape == (num_envs,):
        shapes = ", ".join(str(list(array.shape)) for array in (reward, terminated, truncated))
        raise BadEnv(
            f"gave rewards, terminations and truncations of shapes {shapes}; expected [{num_envs}]"
        )
    return Stepped(as_f32(obs).reshape(num_envs, num_features), reward, terminated, truncated)


def finite(stepped: Stepped) -> Stepped:
    """Require finite values; this takes 1.3 microseconds for 16 environments."""
    obs, reward = stepped.obs, as_f32(stepped.reward)
    if not (all_finite(obs) and all_finite(reward)):
        bad: list[int] = np.flatnonzero(~np.isfinite(obs).all(axis=1)).tolist()
        what = {row: not_finite(obs[row]) for row in bad}
        for row in np.flatnonzero(~np.isfinite(reward)).tolist():
            what.setdefault(row, f"gave a reward of {stepped.reward[row]}")
        raise BadRows(what, stepped)
    return stepped


def as_f32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Convert to float32; numbers that are too large become infinite, without a warning."""
    if array.dtype == np.float32:
        return array
    if array.dtype.kind in "iu" and array.dtype.itemsize > 2 and array.size:
        low, high = int(array.min()), int(array.max())
        if max(-low, high) > _WHOLE:
            raise BadEnv(
                f"gave {high if high > _WHOLE else low}, but whole numbers beyond {_WHOLE:,} are "
                "rounded in float32, which models read; scale it, or show it in several parts,"
            )
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def all_finite(array: NDArray[Any]) -> bool:
    """`np.isfinite(array).all()` in half the time."""
    return np.count_nonzero(np.isfinite(array)) == array.size
