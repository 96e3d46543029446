"""Observations and rewards scaled by running moments, one set for each group of environments.

Kept per group, as others keep them per environment: what a group shows then depends on its own
past alone, whichever worker it is in and however many there are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import ConfigError
from ...dataflow.options import Fraction, PositiveFloat, option_class


@option_class
class Normalization:
    """Which values are scaled, and their bounds."""

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
        """Take in f[n, width]."""
        mean, variance = rows.mean(axis=0, dtype=np.float64), rows.var(axis=0, dtype=np.float64)
        self._merge(mean, variance, len(rows))

    def join(self, other: Moments) -> None:
        """Take in what others have taken in."""
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
        """The moments as JSON."""
        mean, variance = self.mean.tolist(), self.variance.tolist()
        return {"mean": mean, "variance": variance, "count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self.mean, self.variance = np.array(state["mean"]), np.array(state["variance"])
        self.count = float(state["count"])


class Normalizer:
    """Scales what a group shows.

    Args:
        options: What is scaled.
        num_envs: Environments of the group.
        num_features: Numbers of an observation.

    Attributes:
        frozen: Whether moments stay as they are.

    Raises:
        ConfigError: If `options.start` holds no environments, or such of other observations.
    """

    def __init__(self, options: Normalization, num_envs: int, num_features: int) -> None:
        self.frozen = False
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
        """The moments as JSON."""
        return {
            "obs": self._obs.state(),
            "returns": self._returns.state(),
            "sums": self._sums.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` gave."""
        self._obs.restore(state["obs"])
        self._returns.restore(state["returns"])
        self._sums = np.array(state["sums"])
