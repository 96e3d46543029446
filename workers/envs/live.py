"""A group between rollouts: where its environments are, and what is known of their episodes.

Observations and rewards are scaled by running moments, one set for each group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace, Actor
from ...dataflow.errors import ConfigError, StateError, WorkerError
from ...dataflow.graph.role import Metric
from ...dataflow.options import Fraction, PositiveFloat, option_class
from ...dataflow.runtime.call_context import CallKey
from .group import EnvGroup, all_finite, step_columns

_LOG = logging.getLogger("penstock.envs")


@option_class
class Normalization:
    """Values that are scaled, and their bounds."""

    observations: bool = False
    """Scale observations to mean 0 and variance 1."""
    symlog: bool = False
    """Squeeze large observations by `sign(x) ln(1 + |x|)`, before anything else."""
    rewards: bool = False
    """Divide rewards by the deviation of their discounted sum."""
    discount: Fraction = 0.99
    """Discount of that sum: the algorithm's own."""
    clip: PositiveFloat = 10.0
    """Largest size of a scaled number."""
    start: str | None = None
    """The folder of the environments in another run's checkpoint, `checkpoints/step-N/env`: every
    group begins with the moments that all groups there had together. By default with none."""


class Moments:
    """Running mean and variance of rows, by Chan et al., 1979, "Updating formulae"."""

    def __init__(self, width: int) -> None:
        self.mean = np.zeros(width)
        self.variance = np.ones(width)
        self.count = 1e-4

    def add(self, rows: NDArray[Any]) -> None:
        mean, variance = rows.mean(axis=0, dtype=np.float64), rows.var(axis=0, dtype=np.float64)
        self._merge(mean, variance, len(rows))

    def join(self, other: Moments) -> None:
        self._merge(other.mean, other.variance, other.count)

    def _merge(self, mean: NDArray[Any], variance: NDArray[Any], count: float) -> None:
        total = self.count + count
        delta = mean - self.mean
        squares = self.variance * self.count + variance * count
        squares += np.square(delta) * self.count * count / total
        self.mean = self.mean + delta * count / total
        self.variance = squares / total
        self.count = total

    def state(self) -> dict[str, Any]:
        mean, variance = self.mean.tolist(), self.variance.tolist()
        return {"mean": mean, "variance": variance, "count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.mean, self.variance = np.array(state["mean"]), np.array(state["variance"])
        self.count = float(state["count"])


class Normalizer:
    """Scales what a group shows, by running moments of its own.

    Kept per group, as others keep them per environment: what a group shows then depends on its own
    past alone, whichever worker it is in and however many there are.
    """

    def __init__(self, options: Normalization, num_envs: int, num_features: int) -> None:
        self.frozen = False  # whether moments stay as they are
        self._options = options
        self._obs = Moments(num_features)
        self._returns = Moments(1)
        self._sums = np.zeros(num_envs)
        if options.start is not None:
            self._begin(Path(options.start), num_features)

    def _begin(self, folder: Path, num_features: int) -> None:
        files = sorted(folder.glob("group-*.json"))
        if not files:
            raise ConfigError(
                f"'task.normalization.start': '{folder}' holds no environments\n    give the "
                "folder of the role in a checkpoint, as runs/ID/checkpoints/step-N/env"
            )
        for number, file in enumerate(files):
            state = json.loads(file.read_text())["normalizer"]
            width = len(state["obs"]["mean"])
            if width != num_features:
                raise ConfigError(
                    f"'task.normalization.start': environments in '{folder}' show {width} numbers, "
                    f"and here {num_features}\n    use the task that was trained on there"
                )
            for own, name, size in ((self._obs, "obs", width), (self._returns, "returns", 1)):
                its = Moments(size)
                its.restore(state[name])
                if number:
                    own.join(its)
                else:
                    own.restore(state[name])

    def obs(self, obs: NDArray[np.float32]) -> NDArray[np.float32]:
        """f32[envs, features], taken in (unless frozen) and scaled."""
        if self._options.symlog:
            obs = np.copysign(np.log1p(np.abs(obs)), obs)
        if not self._options.observations:
            return obs
        if not self.frozen:
            self._obs.add(obs)
        scaled = (obs - self._obs.mean) / np.sqrt(self._obs.variance + 1e-8)
        clip = self._options.clip
        return np.clip(scaled, -clip, clip).astype(np.float32)

    def reward(
        self, reward: NDArray[Any], over: NDArray[np.bool_], counts: NDArray[np.bool_]
    ) -> NDArray[Any]:
        """[envs], taken in and scaled.

        Args:
            reward: As the environments give it; 0 where it does not count.
            over: True where this reward ends an episode.
            counts: Whose step counts: elsewhere an episode begins with the next one.
        """
        if not self._options.rewards:
            return reward
        self._sums = np.where(counts, self._sums * self._options.discount + reward, 0.0)
        if counts.any():
            self._returns.add(self._sums[counts, None])
        self._sums[over] = 0.0
        clip = self._options.clip
        return np.clip(reward / np.sqrt(self._returns.variance[0] + 1e-8), -clip, clip)

    def state(self) -> dict[str, Any]:
        return {
            "obs": self._obs.state(),
            "returns": self._returns.state(),
            "sums": self._sums.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._obs.restore(state["obs"])
        self._returns.restore(state["returns"])
        self._sums = np.array(state["sums"])


class LiveGroup:
    """A group with all that changes from step to step.

    A rollout's arrays are [horizon, envs, ...].
    """

    def __init__(self, group: EnvGroup, numbers: list[int], normalization: Normalization) -> None:
        self._group = group
        self.numbers = numbers  # of the environments, unique in the run
        self._normalizer = Normalizer(normalization, group.num_envs, group.num_features)
        self._scales_rewards = normalization.rewards
        self._obs = np.zeros((group.num_envs, group.num_features), np.float32)
        self._over = np.zeros(group.num_envs, np.bool_)
        self._recurrent_state: NDArray[np.float32] | None = None  # the actor's, if it has one
        self._return = np.zeros(group.num_envs)
        self._length = np.zeros(group.num_envs, np.int64)
        self._call = CallKey(-1, 0)
        # Of the last rollout: return and length of episodes that ended, and steps.
        self._episodes: list[tuple[float, int]] = []
        self._num_steps = 0
        self._given_up: set[tuple[int, int]] = set()

    def named(self, index: int) -> str:
        return f"environment {self.numbers[index]} (seed {self._group.seed_of(index)})"

    @property
    def actions(self) -> ActionSpace:
        return self._group.actions

    def see_as(self, state: Mapping[str, Any]) -> None:
        """Scale observations as the group did that gave `state`, from now on and unchanged."""
        self._normalizer.restore(state["normalizer"])
        self._normalizer.frozen = True

    def start(self) -> None:
        self._obs = self._normalizer.obs(self._group.start()).copy()

    def check_order(self, call: CallKey) -> None:
        """Require the calls of a run one after another; step 0 begins a run."""
        step, last = call.step, self._call
        again = step == last.step and call.ordinal > last.ordinal
        if last.step >= 0 and step not in (0, last.step + 1) and not again:
            raise StateError(
                f"environments {self.numbers} were asked for call {call.ordinal} of step {step} "
                f"after call {last.ordinal} of step {last.step}; what they do depends on all steps "
                "before, so none may be left out or done twice"
            )
        self._call = call

    def roll(self, actor: Actor, noise: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
        """Act for as many steps as there is noise."""
        horizon, group = len(noise), self._group
        num_failures = len(group.failures)  # of the first episodes' beginning
        found = step_columns((horizon, group.num_envs), group.num_features, group.actions)
        obs_t, action_t, logprob_t = found["obs"], found["action"], found["behavior_logprob"]
        reward_t, terminated_t, truncated_t = (
            found[name] for name in ("reward", "terminated", "truncated")
        )
        earned_t = np.empty_like(reward_t) if self._scales_rewards else reward_t
        broken: list[tuple[int, int]] = []
        obs, scale, masked = self._obs, self._normalizer, group.actions.masked
        valid: NDArray[np.bool_] | None = None
        recurrent_state = self._recurrent_state
        for t in range(horizon):
            obs_t[t] = obs
            if masked:
                valid = group.action_mask()
                found["action_mask"][t] = valid
            action, logprob, recurrent_state = actor.act(obs, noise[t], valid, recurrent_state)
            if not (all_finite(action) and all_finite(logprob)):
                raise self._not_said(t, action, logprob)
            action_t[t], logprob_t[t] = action, logprob
            obs, earned, terminated, truncated = group.step(action)
            obs = scale.obs(obs)
            terminated_t[t], truncated_t[t], earned_t[t] = terminated, truncated, earned
            if len(group.failures) > num_failures:
                new, num_failures = group.failures[num_failures:], len(group.failures)
                broken += [(t, row) for failure in new for row in failure.rows]
            if self._scales_rewards:
                counts = ~self._began(t, found, broken)
                reward_t[t] = scale.reward(earned, terminated | truncated, counts)
            if recurrent_state is not None:
                began = self._began(t, found, broken)[:, None]
                recurrent_state = np.where(began, np.float32(0), recurrent_state)
        self._given_up = self._mark(found, broken)
        self._count(earned_t, found)
        self._obs = obs.copy()
        rows = {name: array.swapaxes(0, 1) for name, array in found.items()}
        return {**rows, "last_obs": self._obs, "recurrent_state": self._remember(recurrent_state)}

    def _began(
        self, t: int, found: Mapping[str, NDArray[Any]], broken: list[tuple[int, int]]
    ) -> NDArray[np.bool_]:
        """Environments that step t has reset, bool[envs]."""
        began = found["terminated"][t - 1] | found["truncated"][t - 1] if t else self._over.copy()
        began[[index for at, index in broken if at == t]] = True
        return began

    def _remember(self, recurrent_state: NDArray[np.float32] | None) -> NDArray[np.float32]:
        began, self._recurrent_state = self._recurrent_state, recurrent_state
        if began is not None:
            return began
        return np.zeros(
            (len(self._obs), 0 if recurrent_state is None else recurrent_state.shape[1]), np.float32
        )

    def _not_said(
        self, t: int, action: NDArray[np.float32], logprob: NDArray[np.float32]
    ) -> WorkerError:
        """Environments are not shown such actions: they would be blamed for what they do then."""
        bad, what = ~np.isfinite(action).reshape(len(action), -1).all(axis=1), "action"
        if not bad.any():
            bad, what = ~np.isfinite(logprob), "log-probability of an action"
        return WorkerError(
            f"{self.named(int(bad.argmax()))}, step {t} of the rollout of step {self._call.step}: "
            f"the actor's {what} is not finite"
        )

    def _mark(
        self, found: dict[str, NDArray[Any]], broken: list[tuple[int, int]]
    ) -> set[tuple[int, int]]:
        """Say which steps count, and return the last steps of episodes that were given up.

        Such an episode is truncated with the step before the one that failed.
        """
        terminated, truncated = found["terminated"], found["truncated"]
        mask = found["mask"]
        mask[0] = ~self._over
        mask[1:] = ~(terminated[:-1] | truncated[:-1])
        given_up = {(t - 1, index) for t, index in broken if mask[t, index]}
        for t, index in given_up:
            if t >= 0:
                truncated[t, index] = True
            mask[t + 1, index] = False
        self._over = terminated[-1] | truncated[-1]
        return given_up

    def _count(self, earned: NDArray[Any], found: Mapping[str, NDArray[Any]]) -> None:
        """Returns and lengths of the episodes that ended; those given up do not count."""
        given_up = self._given_up
        mask = found["mask"]
        over = (found["terminated"] | found["truncated"]) & mask
        self._episodes.clear()
        self._num_steps = int(mask.sum())
        for index in range(self._group.num_envs):
            begin = 0
            ends = over[:, index].nonzero()[0].tolist()
            ends += [t for t, other in given_up if other == index and t not in ends]
            for end in sorted(ends):
                until = slice(begin, end + 1)
                total = self._return[index] + earned[until, index].sum(dtype=np.float64)
                length = int(self._length[index] + mask[until, index].sum())
                if (end, index) not in given_up:
                    self._episodes.append((float(total), length))
                self._return[index], self._length[index], begin = 0.0, 0, end + 1
            self._return[index] += earned[begin:, index].sum(dtype=np.float64)
            self._length[index] += mask[begin:, index].sum()

    def given_up(self, num_steps: int) -> NDArray[np.bool_]:
        """Steps of the last rollout that failed and gave up an episode, bool[envs, num_steps]."""
        found = np.zeros((self._group.num_envs, num_steps), np.bool_)
        for last, index in self._given_up:
            found[index, last + 1] = True
        return found

    def restarts(self) -> list[str]:
        """Log the restarts up to the end of the last rollout, and return their number."""
        failures = self._group.failures
        for said, rows in failures:
            _LOG.warning("%s; restarted: %.80s", said, [self.numbers[row] for row in rows])
        said = [failure.said for failure in failures]
        failures.clear()
        return said

    def metrics(self) -> dict[str, Metric]:
        """Metrics of the last rollout; call once. `EnvWorker` lists them."""
        count = float(len(self._episodes))
        return {
            "episode_return": Metric.mean(sum(total for total, _ in self._episodes), count),
            "episode_length": Metric.mean(float(sum(n for _, n in self._episodes)), count),
            "episodes": Metric.sum(count),
            "env_steps": Metric.sum(float(self._num_steps)),
            "env_restarts": Metric.sum(float(len(self.restarts()))),
        }

    def moments(self) -> dict[str, Any]:
        """The part of `state` that `see_as` needs."""
        return {"normalizer": self._normalizer.state()}

    def state(self) -> dict[str, Any]:
        return {
            "numbers": self.numbers,
            "step": self._call.step,
            "ordinal": self._call.ordinal,
            "obs": self._obs.tolist(),
            "over": self._over.tolist(),
            "memory": None if self._recurrent_state is None else self._recurrent_state.tolist(),
            "return": self._return.tolist(),
            "length": self._length.tolist(),
            **self.moments(),
            "envs": self._group.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["numbers"] != self.numbers:
            raise StateError(
                f"a group of environments {state['numbers']} was saved, and {self.numbers} are to "
                "go on from there; resume with the groups the run was started with"
            )
        self._call = CallKey(int(state["step"]), int(state.get("ordinal", 0)))
        self._obs = np.array(state["obs"], np.float32)
        self._over = np.array(state["over"], np.bool_)
        recurrent_state = state.get("memory")  # absent where actors had none when it was saved
        self._recurrent_state = (
            None if recurrent_state is None else np.array(recurrent_state, np.float32)
        )
        self._return = np.array(state["return"], np.float64)
        self._length = np.array(state["length"], np.int64)
        self._normalizer.restore(state["normalizer"])
        self._group.restore(state["envs"])

    def close(self) -> None:
        self._group.close()

    @staticmethod
    def nothing(
        num_features: int, actions: ActionSpace, horizon: int, actor: Actor
    ) -> dict[str, NDArray[Any]]:
        """The columns of `roll` for no environments."""
        found = step_columns((horizon, 0), num_features, actions)
        rows = {name: array.swapaxes(0, 1) for name, array in found.items()}
        no_rows = np.zeros((0, num_features), np.float32)
        noise = np.zeros((0, actions.num_components))
        allowed = found["action_mask"][0] if actions.masked else None
        recurrent_state = actor.act(no_rows, noise, allowed).recurrent_state
        width = 0 if recurrent_state is None else recurrent_state.shape[1]
        return {**rows, "last_obs": no_rows, "recurrent_state": np.zeros((0, width), np.float32)}
