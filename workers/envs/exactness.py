"""Try whether saved environments go on as they would have, before a run depends on it.

What is saved of single environments are their seed and actions, and of a vectorized one its
numbers. Whatever else an environment depends on (a global random generator, a clock, statistics
over episodes) is lost with its process, and nothing that is read from it says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import StateError, WorkerError
from .alarm import StepAlarm
from .group import EnvGroup
from .spec import EnvSpec

_NUM_ENVS = 2
_NUM_NOISE = 64
"""Random numbers for one environment and step; taken again where it takes more."""
_ROLE = "exactness"


def why_not_exact(spec: EnvSpec, *, num_before: int = 64, num_after: int = 64) -> str | None:
    """Name what differs after a restart, tried with two environments and random actions."""
    numbers = list(range(_NUM_ENVS * spec.num_agents))
    random = np.random.default_rng(0)
    with StepAlarm(spec.step_limit_s) as alarm:
        first = spec.group(0, numbers, 0, _ROLE, alarm)
        try:
            first.start()
            for _ in range(num_before):
                first.step(_action(first, random.random((len(numbers), _NUM_NOISE))))
            state = json.loads(json.dumps(first.state()))
            noise = random.random((num_after, len(numbers), _NUM_NOISE))
            expected = [_shown(first, one) for one in noise]
        except StateError as error:
            return f"cannot be saved: {error}"
        except WorkerError:
            return None
        finally:
            first.close()
        again = spec.group(0, numbers, 0, _ROLE, alarm)
        try:
            return _difference(again, state, noise, expected)
        finally:
            again.close()


def _difference(
    group: EnvGroup,
    state: Mapping[str, Any],
    noise: NDArray[np.float64],
    expected: list[tuple[bytes, ...]],
) -> str | None:
    try:
        group.restore(state)
        for step, one in enumerate(noise):
            if _shown(group, one) != expected[step]:
                return f"show something else {step + 1} steps after they were saved"
    except StateError as error:
        return f"do not come to where they were: {error}"
    except WorkerError as error:
        return f"fail where they had not: {error}"
    return None


def _shown(group: EnvGroup, noise: NDArray[np.float64]) -> tuple[bytes, ...]:
    """Everything that a step shows, as bytes."""
    mask = group.action_mask()
    found = group.step(_action(group, noise))
    shown = (found.obs, found.reward, found.terminated, found.truncated, mask)
    return tuple(b"" if one is None else np.asarray(one).tobytes() for one in shown)


def _action(group: EnvGroup, noise: NDArray[np.float64]) -> NDArray[np.float32]:
    """Random actions that are allowed, f32[envs, components]."""
    actions, mask = group.actions, group.action_mask()
    found = np.take(noise, np.arange(actions.num_components), axis=1, mode="wrap")
    if mask is not None:
        weight = mask * (np.take(noise, np.arange(mask.shape[1]), axis=1, mode="wrap") + 1.0)
        ends = np.cumsum(actions.sizes)[:-1]
        found = np.stack([one.argmax(1) for one in np.split(weight, ends, axis=1)], axis=1)
    elif actions.kind == "discrete":
        found = np.floor(found * np.array(actions.sizes))
    return found.astype(np.float32)
