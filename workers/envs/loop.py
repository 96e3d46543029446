"""A group of single Gymnasium environments, stepped one after another.

One that raises, hangs or shows what is no observation is replaced by a new one, and its episode is
given up. Any environment works whose episodes are a function of their seed and the actions: its
state is saved as these, and restored by taking the actions again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import StateError, WorkerError
from .group import (
    LARGEST,
    BadEnv,
    Members,
    RestartedGroup,
    Stepped,
    StepTooLong,
    action_space,
    all_finite,
    close_all,
    closed_on_error,
    described,
    digest,
    env_seed,
    from_columns,
    not_finite,
    num_features,
    to_features,
)


@dataclass
class _Single:
    number: int
    env: gym.Env[Any, Any]
    episode: int = 0
    over: bool = False
    obs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    actions: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])


class LoopGroup(RestartedGroup):
    """Single environments, which `make` makes.

    With masks they say which choices are allowed as `info["action_mask"]`, or by a method
    `action_masks`.
    """

    def __init__(self, members: Members, make: Callable[[], gym.Env[Any, Any]]) -> None:
        super().__init__(members)
        self._make = make
        self._all: list[_Single] = []
        with closed_on_error(self.close):
            for number in members.numbers:
                self._all.append(_Single(number, make()))
            first = self._all[0].env
            self.num_features = num_features(first.observation_space, members.name)
            self.actions = action_space(first.action_space, members.name, masked=members.masked)
        self._flat = to_features(first.observation_space)
        self._take = from_columns(first.action_space)
        self._obs = np.zeros((self.num_envs, self.num_features), np.float32)
        self._reward = np.zeros(self.num_envs, np.float64)
        self._terminated = np.zeros(self.num_envs, np.bool_)
        self._truncated = np.zeros(self.num_envs, np.bool_)

    def start(self) -> NDArray[np.float32]:
        for index, single in enumerate(self._all):
            self._obs[index] = self._or_replaced(index, single, partial(self._reset, single))
        self._alarm.disarm()
        return self._obs

    def step(self, action: NDArray[np.float32]) -> Stepped:
        self._reward[:] = 0.0
        self._terminated[:] = self._truncated[:] = False
        for index, single in enumerate(self._all):
            if single.over:
                call = partial(self._next, single)
            else:
                call = partial(self._advance, index, single, action[index])
            self._obs[index] = self._or_replaced(index, single, call)
        self._alarm.disarm()
        return Stepped(self._obs, self._reward, self._terminated, self._truncated)

    def _advance(
        self, index: int, single: _Single, action: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        single.actions.append(action.copy())
        obs, reward, terminated, truncated, info = single.env.step(self._take(action))
        single.obs = self._features(obs)
        number = float(reward)
        if not abs(number) <= LARGEST:
            raise BadEnv(f"gave a reward of {number}")
        single.over = bool(terminated or truncated)
        self._ask_mask(single, info)
        self._reward[index] = number
        self._terminated[index], self._truncated[index] = terminated, truncated
        return single.obs

    def _next(self, single: _Single) -> NDArray[np.float32]:
        single.episode += 1
        return self._reset(single)

    def _reset(self, single: _Single) -> NDArray[np.float32]:
        single.over = False
        single.actions.clear()
        obs, info = single.env.reset(seed=self._seed_of(single))
        single.obs = self._features(obs)
        self._ask_mask(single, info)
        return single.obs

    def _features(self, obs: Any) -> NDArray[np.float32]:
        found = self._flat(obs)
        if found.shape != (self.num_features,):
            raise BadEnv(
                f"showed an observation of shape {list(np.shape(obs))}, {found.size} numbers; "
                f"expected {self.num_features}"
            )
        if not all_finite(found):
            raise BadEnv(not_finite(found))
        return found

    def _or_replaced(
        self, index: int, single: _Single, call: Callable[[], NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        """The call's result, or that of a new environment's first reset if it fails."""

        def replace() -> NDArray[np.float32]:
            single.env = self._remade(single.env.close, self._make)
            return self._next(single)

        def failed(error: BaseException) -> Callable[[], NDArray[np.float32]]:
            said = f"{self._named(single)} {described(error)} at step {len(single.actions)} of its"
            self._note(f"{said} episode", (index,), error)
            self._reward[index] = 0.0
            self._terminated[index] = self._truncated[index] = False
            return replace

        return self._guarded(call, failed)

    def _seed_of(self, single: _Single) -> int:
        return env_seed(self._members.seed, self._members.role, single.number, single.episode)

    def action_mask(self) -> NDArray[np.bool_] | None:
        """The masks of several components stand side by side."""
        return np.stack([single.mask for single in self._all]) if self.actions.masked else None

    def _ask_mask(self, single: _Single, info: Mapping[str, Any]) -> None:
        """Note what is allowed now; where the episode is over, it may be nothing."""
        if not self.actions.masked:
            return
        found: Any = info.get("action_mask")
        if found is None:
            if not single.env.has_wrapper_attr("action_masks"):
                raise WorkerError(
                    f"{self._named(single)} has no method action_masks, and no action_mask among "
                    f"what it says, which is {', '.join(info) or 'nothing'}; set task.masked=false"
                )
            found = single.env.get_wrapper_attr("action_masks")()
        parts = found if isinstance(found, tuple) else (found,)
        mask = np.concatenate([np.asarray(part, dtype=np.bool_).reshape(-1) for part in parts])
        starts = np.cumsum((0, *self.actions.sizes))
        fits = len(mask) == self.actions.num_choices
        if not fits or not np.logical_or.reduceat(mask, starts[:-1]).all():
            if not fits or not single.over:
                raise WorkerError(
                    f"{self._named(single)} allows {mask.tolist()!s:.80} at step "
                    f"{len(single.actions)} of its episode; expected {self.actions.num_choices} "
                    "booleans, one True for every component"
                )
            mask[:] = True
        single.mask = mask

    def _named(self, single: _Single) -> str:
        return f"environment {single.number} of '{self._name}' (seed {self._seed_of(single)})"

    def seed_of(self, index: int) -> int:
        return self._seed_of(self._all[index])

    def state(self) -> dict[str, Any]:
        return {
            "envs": [
                {
                    "episode": single.episode,
                    "actions": [action.tolist() for action in single.actions],
                    "obs": digest(single.obs),
                }
                for single in self._all
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for index, (single, saved) in enumerate(zip(self._all, state["envs"], strict=True)):
            single.episode = int(saved["episode"])
            try:
                self._alarm.arm()
                self._reset(single)
                for action in saved["actions"]:
                    self._alarm.arm()
                    self._advance(index, single, np.array(action, np.float32))
            except (Exception, StepTooLong) as error:
                raise StateError(
                    f"{self._named(single)} {described(error)} at step {len(single.actions)} "
                    f"of its episode, where its {len(saved['actions'])} actions since it was "
                    "seeded were taken again; it had not when it was saved"
                ) from error
            finally:
                self._alarm.disarm()
            if digest(single.obs) != saved["obs"]:
                raise StateError(
                    f"{self._named(single)} shows something else after the "
                    f"{len(single.actions)} actions of its episode than when it was saved; its "
                    "episodes must depend on the seed and the actions alone"
                )

    def close(self) -> None:
        close_all(single.env.close for single in self._all)
