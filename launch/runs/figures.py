"""One figure of a run: a value of its files, a metric of its steps, or a count over all of them."""

from __future__ import annotations

import math
from typing import Any

from ...dataflow.errors import ConfigError, nearest
from .series import History
from .values import RunValues

__all__ = ["SUM_OF", "counts_of", "figure_of", "number_of"]

SUM_OF = "sum of "
"""Before a metric's name: its sum over all steps."""

_COUNTS = ("/new_tokens", "/tokens", "/controller_bytes")
"""Ends of the metrics whose sum is a count of operations."""


def figure_of(run: RunValues, key: str) -> float | str:
    """What a run has of a key.

    Args:
        run: The run.
        key: Of its files; else a metric of its steps, of which the mean over the last tenth of them
            counts; or `sum of METRIC`.

    Raises:
        ConfigError: If it has none of these, or one that is neither a number nor a text.
    """
    record, values = run
    value: Any = values.get(key)
    if value is None:
        history = History(record.folder.path)
        summed = key.startswith(SUM_OF)
        metric = key.removeprefix(SUM_OF)
        if metric not in history.metrics:
            known = {name for name, other in values.items() if isinstance(other, int | float)}
            raise ConfigError(
                f"run '{record.folder.id}' has no key and no metric '{key}'"
                f"{nearest(key, [*known, *history.metrics])}"
            )
        series = history.series(metric)
        value = math.fsum(series.ys) if summed else series.end
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(
            f"'{key}' of run '{record.folder.id}': expected a number or a text, got {value!r:.60}"
        )
    return value


def number_of(run: RunValues, key: str) -> float:
    """The same of a key that must be a number.

    Raises:
        ConfigError: If it is not.
    """
    value = figure_of(run, key)
    if isinstance(value, str):
        raise ConfigError(
            f"'{key}' of run '{run[0].folder.id}': expected a number, got {value!r:.60}"
        )
    return float(value)


def counts_of(run: RunValues) -> list[str]:
    """The keys that count operations, which the same run has the same of wherever it runs."""
    names = History(run[0].folder.path).metrics
    return ["num_steps", *(f"{SUM_OF}{name}" for name in names if name.endswith(_COUNTS))]
