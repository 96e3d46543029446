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
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import one_process


class Stepped(NamedTuple):
    """A step of a group; arrays may be overwritten by the next step."""

    obs: NDArray[np.float32]
    """f32[envs, features]: after the step, before any reset."""
    reward: NDArray[Any]
    """[envs]."""
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class Failure(NamedTuple):
    """An environment went wrong, or several that nobody can tell apart."""

    said: str
    """The environment, its fault and the step."""
    rows: tuple[int, ...]
    """Rows that were restarted: their step counts as that of a reset."""


class EnvGroup(Protocol):
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

    def close(self) -> None:
        """Close all of them."""


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
    """A hash of what environments show."""
    return hashlib.sha256(obs.tobytes()).hexdigest()
