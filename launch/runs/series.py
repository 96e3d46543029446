"""A metric of a run over its steps, samples, tokens or seconds, and as one line of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ...dataflow.errors import ConfigError, nearest
from ..run_dir.trackers.jsonl import METRICS, read_metrics

Over = Literal["steps", "samples", "tokens", "seconds"]
OVER: tuple[Over, ...] = get_args(Over)

_STEP, _STEP_TIME, _RATE = "step", "run/step_time_s", "run/samples_per_s"
_TOKENS = ("/new_tokens", "/tokens")
"""Ends of the metrics that count tokens: those that were generated, else those trained on."""


@dataclass(frozen=True)
class Series:
    """A metric as it went.

    Attributes:
        xs: Where it was measured, rising: how many steps, samples, tokens or seconds were over.
        ys: Its value there; finite.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @property
    def end(self) -> float:
        """Mean over the last tenth of its points, at least one."""
        last = self.ys[-max(1, len(self.ys) // 10) :]
        return math.fsum(last) / len(last)


class History:
    """Every step of a run, or of a stage's folder below it, as `metrics.jsonl` has it.

    Args:
        folder: Of the run, or of the stage.

    Raises:
        ConfigError: If the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._lines = read_metrics(folder / METRICS)
        names = dict.fromkeys(name for line in self._lines for name in line)
        self.metrics = [name for name in names if name not in (_STEP, "wall_time_s")]
        """What the steps have measured, in order."""

    def series(self, metric: str, over: Over = "steps") -> Series:
        """A metric; steps at which it was not measured, or was not finite, are left out.

        Samples and seconds are those of the steps' own, so a pause between two processes of a
        resumed run counts for nothing; what was generated counts as tokens, else what was trained
        on.

        Args:
            metric: As `metrics.jsonl` names it.
            over: What is counted.

        Raises:
            ConfigError: If no step has the metric, or what is counted was not measured.
        """
        if metric not in self.metrics:
            raise ConfigError(
                f"run '{self._name}' has no metric '{metric}'{nearest(str(metric), self.metrics)}\n"
                f"    penstock runs show {self._name} lists those that it has"
            )
        points = [
            (x, float(line[metric]))
            for x, line in zip(self._ends(over), self._lines, strict=True)
            if line.get(metric) is not None
        ]
        return Series(tuple(x for x, _ in points), tuple(y for _, y in points))

    def _ends(self, over: Over) -> list[float]:
        """How much was over at the end of each line's step."""
        lines = self._lines
        if over == "steps":
            return [float(line[_STEP]) + 1 for line in lines]
        if over == "seconds":
            amounts = [line.get(_STEP_TIME) for line in lines]
        elif over == "samples":
            amounts = [_product(line.get(_STEP_TIME), line.get(_RATE)) for line in lines]
        else:
            names = self._token_counts()
            amounts = [sum(line.get(name) or 0.0 for name in names) for line in lines if names]
        if not any(amounts):
            raise ConfigError(f"run '{self._name}' has not counted its {over}\n    use over=steps")
        total, ends = 0.0, list[float]()
        for amount in amounts:
            total += amount or 0.0
            ends.append(total)
        return ends

    def _token_counts(self) -> list[str]:
        for end in _TOKENS:
            found = [name for name in self.metrics if name.endswith(end)]
            if found:
                return found
        return []


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(ys: Sequence[float], width: int = 32) -> str:
    """The values in characters of eight heights, from the lowest to the highest of them.

    Args:
        ys: Finite values, in order. Neighbors are averaged where there are more than fit.
        width: Characters at most.

    Example:
        >>> sparkline([0.0, 1.0, 2.0, 7.0])
        '▁▂▃█'
    """
    num = min(width, len(ys))
    edges = [round(at * len(ys) / num) for at in range(num + 1)] if num else []
    means = [
        math.fsum(ys[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)
    ]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if low == high:
        return _LEVELS[0] * num
    most = len(_LEVELS) - 1
    return "".join(_LEVELS[round((y - low) / (high - low) * most)] for y in means)
