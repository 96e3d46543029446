"""A group of environments that step together: the unit that lives in one worker.

What a group does depends on its specification, the run's seed and the numbers of its environments,
never on other groups or on which process it is in. Three kinds keep this promise: `native.py`, one
object that steps all of them with numpy, `pool.py`, EnvPool's threads, and `loop.py`, single
environments one after another.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...algorithms.env_roles import ActionSpace
from ...dataflow.errors import WorkerError, raised_at
from .alarm import StepAlarm, StepTooLong

__all__ = [
    "EnvGroup",
    "Stepped",
    "close_all",
    "closed_on_error",
    "digest",
    "env_seed",
    "flat_rows",
    "step_together",
]

T = TypeVar("T")


class Stepped(NamedTuple):
    """What a step of a group shows; arrays may be overwritten by the next step."""

    obs: NDArray[np.float32]
    """f32[envs, features]: after the step, before any reset."""
    reward: NDArray[Any]
    """[envs]."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class EnvGroup(Protocol):
    """Environments that step together and are reset one step after their episode ended.

    Attributes:
        num_envs: How many.
        num_features: Numbers of an observation.
        actions: What can be done.
        num_agents: Rows next to each other that are one environment, which fail together.
        failures: Environments that failed since this was cleared, as (index, seed, what happened).
            Such an environment has been restarted, and its step counts as that of a reset.
    """

    num_envs: int
    num_features: int
    actions: ActionSpace
    num_agents: int
    failures: list[tuple[int, int, str]]

    def start(self) -> NDArray[np.float32]:
        """Begin the first episodes; the observations, f32[envs, features]."""
        ...

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Step all environments by `action`, f32[envs, components]."""
        ...

    def action_mask(self) -> NDArray[np.bool_] | None:
        """bool[envs, choices] of the states they are in; None if everything is always allowed."""
        ...

    def seed_of(self, index: int) -> int:
        """The seed behind the current episode of an environment, for messages."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `restore` needs to go on in the same way, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            StateError: If the environments do not come to where they were.
        """
        ...

    def close(self) -> None:
        """Close all of them."""
        ...


def env_seed(seed: int, role: str, *names: int | str) -> int:
    """A seed below 2^31 for the thing that `names` stand for; equal names, equal seed."""
    text = "\x1f".join(map(str, (seed, role, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def described(error: BaseException) -> str:
    """What an environment did that failed, after its name."""
    if isinstance(error, StepTooLong):
        return "did not answer in time (task.step_limit_s)"
    return f"raised {type(error).__name__}: {error} ({raised_at(error).short})"


def step_together(named: Callable[[], str], alarm: StepAlarm, step: Callable[[], T]) -> T:
    """A step of environments that cannot be told apart if it fails.

    Args:
        named: Says what messages call them, with their seeds.
        alarm: Limits its time.
        step: Takes it.

    Raises:
        WorkerError: If it raises or takes too long.
    """
    alarm.arm()
    try:
        return step()
    except (Exception, StepTooLong) as error:
        raise WorkerError(f"{named()} {described(error)}") from error
    finally:
        alarm.disarm()


def flat_rows(
    named: Callable[[], str], obs: NDArray[Any], num_envs: int, num_features: int
) -> NDArray[np.float32]:
    """Observations of several environments as f32[num_envs, num_features].

    Args:
        named: Says what messages call them.
        obs: As they show them.
        num_envs: How many there are.
        num_features: Numbers that each should show.

    Raises:
        WorkerError: If there are more or fewer numbers.
    """
    if obs.shape[0] != num_envs or obs.size != num_envs * num_features:
        raise WorkerError(
            f"{named()} showed observations of shape {list(obs.shape)}; expected [{num_envs}, "
            f"{num_features}]"
        )
    return obs.reshape(num_envs, num_features).astype(np.float32, copy=False)


def close_all(closes: Iterable[Callable[[], None]]) -> None:
    """Close several things; one that raises does not keep the others open.

    Raises:
        Exception: What the first one raised that did, once all have been closed.
    """
    errors: list[Exception] = []
    for close in closes:
        try:
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
    """A hash of what environments show."""
    return hashlib.sha256(obs.tobytes()).hexdigest()
