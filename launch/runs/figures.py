"""The figures of a run: values of its files and metrics of its steps."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ...dataflow.errors import ConfigError, nearest
from .series import History
from .values import RunValues

SUMMARIZED = (
    *("accuracy_after_rl", "accuracy_before_rl", "reward_after_rl", "reward_before_rl"),
    *("num_held_out", "suites"),
    *("episode_return_after", "episode_return_before", "num_episodes"),
    *("samples_per_s", "env_steps_per_s", "step_time_s", "wall_time_s", "main_stage_wall_time_s"),
    *("peak_memory_bytes", "cpu_utilization", "nodes", "stage_times_s", "warnings", "num_steps"),
    *("verifier_errors", "verifier_timeouts", "env_restarts"),
)
"""Numbers of a run's summary, and sections of such numbers, by which runs can be judged."""


class Figures:
    """What one run has of any key; its steps are read once, and only if they are asked for.

    Args:
        run: The run.
    """

    def __init__(self, run: RunValues) -> None:
        self.record, self._values = run

    @cached_property
    def _history(self) -> History:
        return History(self.record.folder.path)

    def of(self, key: str) -> float | str:
        """A key's value.

        Args:
            key: Of its files; else a metric of its steps, of which the mean over the last tenth of
                them counts.

        Raises:
            ConfigError: If it has neither, or one that is neither a number nor a text.
        """
        value: Any = self._values.get(key)
        if value is None:
            value = self._of_steps(key)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ConfigError(f"{self._named(key)}: expected a number or a text, got {value!r:.60}")
        return value

    def number(self, key: str) -> float:
        """The same of a key that must be a number.

        Raises:
            ConfigError: If it is not.
        """
        value = self.of(key)
        if isinstance(value, str):
            raise ConfigError(f"{self._named(key)}: expected a number, got {value!r:.60}")
        return float(value)

    def _of_steps(self, key: str) -> float:
        if key not in self._history.metrics:
            known = [name for name, value in self._values.items() if isinstance(value, int | float)]
            raise ConfigError(
                f"run '{self.record.folder.id}' has no key and no metric '{key}'"
                f"{nearest(key, [*known, *self._history.metrics])}"
            )
        return self._history.series(key).end

    def _named(self, key: str) -> str:
        return f"'{key}' of run '{self.record.folder.id}'"
