"""A group of environments that step together: the unit that lives in one worker.

What a group does depends on its specification, the run's seed and the numbers of its environments,
never on other groups or on which process it is in. Three kinds keep this promise: `native.py`, one
object that steps all of them with numpy, `pool.py`, EnvPool's threads, and `loop.py`, single
environments one after another.

A call that fails is noted as a `Failure`, and another one is made in its place, which restarts what
failed; what else may be done differs from group to group.

Observations become columns laid out flat, and actions are numbers. A discrete action is the index
of its choice, counted from 0; a continuous one is a number that is clipped to what the environment
takes. Both are float32 in columns, where indices are exact. Bytes from 0 to 255, as images have
them, are divided by 255.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError, WorkerError, one_process, raised_at
from ...dataflow.runtime.call_context import DeadlineExceeded

T = TypeVar("T")

LARGEST = float(np.finfo(np.float32).max)  # number of a float32 column
_WHOLE = 1 << 24  # float32 has all whole numbers up to this one


_SOON_S = 1e-6  # for what should have come already: a timer of 0 never does


class StepTooLong(DeadlineExceeded):
    """Raised inside a call that outlives a `StepAlarm`; that of any other limit is not this one."""


class StepAlarm:
    """Interrupts whatever lasts longer than `seconds` since the last `arm`.

    It guards each of many short calls of code of the user's, cheaply enough for every step. A copy
    of the process that a call forks ends when the call does, or several would go on with the run;
    to look takes 0.2 microseconds.

    Calls are interrupted by SIGALRM, as in `call_context.deadline`. A limit that was running
    already goes on all the while: whichever of the two ends first interrupts. Arming it only notes
    the time: the signal comes when the first call might have been going on for too long, and is put
    off for as long as the one that is going on by then may take.

    Outside the main thread and under a debugger it does nothing: there the engine's own deadline is
    the only one.

    Args:
        seconds: The limit; None for none.

    Raises:
        StepTooLong: Inside the body.
        DeadlineExceeded: Inside the body, if a `deadline` around it ends first, armed or not.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._able = False
        self._since_s = self._outer_end_s = math.inf
        self._comes_s = math.inf  # when the signal does
        self._process = os.getpid()

    def __enter__(self) -> StepAlarm:
        self._able = (
            self._seconds < math.inf
            and threading.current_thread() is threading.main_thread()
            and hasattr(signal, "setitimer")
            and sys.gettrace() is None
            # None: not Python's, nor to be put back
            and signal.getsignal(signal.SIGALRM) is not None
        )
        if self._able:
            left_s = signal.getitimer(signal.ITIMER_REAL)[0]
            self._outer_end_s = time.monotonic() + left_s if left_s else math.inf
            self._outer = signal.signal(signal.SIGALRM, self._ring)
            self._since_s, self._comes_s = math.inf, self._outer_end_s
        return self

    def arm(self) -> None:
        """Begin another call, with the whole time; the one before, if there was one, is over."""
        self._end_copy()
        if self._able:
            self._since_s = now_s = time.monotonic()
            if not now_s <= self._comes_s <= now_s + self._seconds:
                self._come(now_s)

    def disarm(self) -> None:
        self._end_copy()
        self._since_s = math.inf

    def __exit__(self, *_: object) -> None:
        if not self._able:
            return
        # First, so that a signal which is on its way already sets no timer again.
        self._able, self._since_s = False, math.inf
        outer_end_s, self._outer_end_s = self._outer_end_s, math.inf
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._outer)
        if outer_end_s < math.inf:
            left_s = outer_end_s - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(left_s, _SOON_S))

    def _end_copy(self) -> None:
        if os.getpid() != self._process:
            os._exit(1)

    def _come(self, now_s: float) -> None:
        self._comes_s = min(self._since_s + self._seconds, self._outer_end_s)
        if self._comes_s < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(self._comes_s - now_s, _SOON_S))

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        now_s, end_s = time.monotonic(), self._since_s + self._seconds
        outer_end_s = self._outer_end_s
        if end_s <= now_s and end_s < outer_end_s:
            self._since_s = math.inf
            self._come(now_s)
            raise StepTooLong
        if outer_end_s > now_s:  # the call that is going on began later
            self._come(now_s)
            return
        self._outer_end_s = math.inf
        self._come(now_s)
        if callable(self._outer):
            self._outer(signum, frame)
        else:
            signal.signal(signal.SIGALRM, self._outer)
            signal.raise_signal(signum)


class Stepped(NamedTuple):
    """A step of a group; arrays may be overwritten by the next step."""

    obs: NDArray[np.float32]  # f32[envs, features]: after the step, before any reset
    reward: NDArray[Any]  # [envs], as all that follow
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class Failure(NamedTuple):
    """An environment failed, or one of several that cannot be told apart."""

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
    alarm: StepAlarm  # limits the time of a step; entered around each step
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

    After an interruption it is left as it is: closing could not be interrupted again.
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


def num_features(space: gym.Space[Any], name: str) -> int:
    """Numbers of an observation laid out flat."""
    leaves = _leaves(space)
    wrong = "have no fixed number of values" if not space.is_np_flattenable else ""
    if any(isinstance(leaf, spaces.Text) for leaf in leaves):
        wrong = "have text in them, whose letters are no quantities"
    elif not wrong and spaces.flatdim(space) == 0:
        wrong = "have no values at all"
    if wrong:
        raise ConfigError(
            f"environment '{name}' shows observations of {space}, which {wrong}\n"
            "    wrap it so that it shows a Box, a Discrete, or a Dict or Tuple of them"
        )
    return spaces.flatdim(space)


def to_features(
    space: gym.Space[Any], *, many: bool = False
) -> Callable[[Any], NDArray[np.float32]]:
    """Return a function from an observation to its numbers, laid out flat."""
    scale = np.concatenate([_scale(leaf) for leaf in _leaves(space)])
    scale = scale[0] if (scale == scale[0]).all() else scale

    def numbers(obs: Any) -> NDArray[np.float32]:
        if isinstance(space, (spaces.Box, spaces.MultiBinary)):
            found = np.asarray(obs)
            return as_f32(found if many else found.reshape(-1))
        if not many:
            return as_f32(np.asarray(spaces.flatten(space, obs)))
        every = iterate(batch_space(space), obs)
        return as_f32(np.stack([np.asarray(spaces.flatten(space, one)) for one in every]))

    return numbers if np.all(scale == 1) else lambda obs: numbers(obs) / scale


def _leaves(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    match space:
        case spaces.Dict():
            parts = list(space.spaces.values())
        case spaces.Tuple():
            parts = list(space.spaces)
        case _:
            return [space]
    return [leaf for part in parts for leaf in _leaves(part)]


def _scale(leaf: gym.Space[Any]) -> NDArray[np.float32]:
    image = (
        isinstance(leaf, spaces.Box)
        and leaf.dtype == np.uint8
        and (leaf.low == 0).all()
        and (leaf.high == 255).all()
    )
    return np.full(spaces.flatdim(leaf), 255 if image else 1, np.float32)


def action_space(space: gym.Space[Any], name: str, *, masked: bool = False) -> ActionSpace:
    """Convert a space of actions to the actor's form."""
    match space:
        case spaces.Discrete():
            return ActionSpace("discrete", sizes=(int(space.n),), masked=masked)
        case spaces.MultiDiscrete():
            sizes = tuple(map(int, space.nvec.reshape(-1)))
            return ActionSpace("discrete", sizes=sizes, masked=masked)
        case spaces.MultiBinary():
            return ActionSpace("discrete", sizes=(2,) * int(np.prod(space.shape)), masked=masked)
        case spaces.Box() if (
            np.issubdtype(space.dtype, np.floating) and not masked and np.prod(space.shape)
        ):
            low, high = space.low.reshape(-1), space.high.reshape(-1)
            return ActionSpace(
                "continuous", low=tuple(map(float, low)), high=tuple(map(float, high))
            )
        case _:
            raise ConfigError(
                f"environment '{name}' takes actions of {space}"
                f"{', some of them invalid' if masked else ''}, which no actor here can give\n"
                "    wrap it so that it takes Discrete, MultiDiscrete, MultiBinary or a Box of "
                "floats"
            )


def from_columns(space: gym.Space[Any]) -> Callable[[NDArray[np.float32]], Any]:
    """A function from the actions f32[..., components] of a column to what environments take.

    It works on one action of an environment, or on those of many at once: they have the shape and
    the type of the space, after that of the many.
    """
    dtype: Any = space.dtype
    shape: Any = space.shape
    match space:
        case spaces.Discrete():
            start = dtype.type(space.start)
            if start == 0:  # nearly always, and a sum takes half of the time
                return lambda action: action[..., 0].astype(dtype)[()]
            return lambda action: action[..., 0].astype(dtype) + start
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            start = np.asarray(getattr(space, "start", 0), dtype)
            return lambda action: action.astype(dtype).reshape((*action.shape[:-1], *shape)) + start
        case spaces.Box():
            low, high = space.low.reshape(-1), space.high.reshape(-1)
            return lambda action: (
                np.clip(action, low, high).astype(dtype).reshape((*action.shape[:-1], *shape))
            )
        case _:
            raise TypeError(f"{space} has no actions as numbers")


def step_columns(
    shape: tuple[int, ...], num_features: int, actions: ActionSpace
) -> dict[str, NDArray[Any]]:
    """Room for columns of `Trajectories` that have an entry for each step."""
    return {
        "obs": np.zeros((*shape, num_features), np.float32),
        "action": np.zeros((*shape, actions.num_components), np.float32),
        "action_mask": np.zeros((*shape, actions.num_choices), np.bool_),
        **{name: np.zeros(shape, np.float32) for name in ("behavior_logprob", "reward")},
        **{name: np.zeros(shape, np.bool_) for name in ("terminated", "truncated", "mask")},
    }


def groups_of(numbers: Tensor, group: Tensor) -> Iterator[tuple[int, list[int]]]:
    """Every group with the numbers of its environments or games, in the order of the rows."""
    pairs = zip(group.tolist(), numbers.tolist(), strict=True)
    for which, own in groupby(pairs, key=itemgetter(0)):
        yield which, [number for _, number in own]
