"""A run's numbers over its steps: `metrics.jsonl`.

One JSON object per line and step, with flat names:

    {"step": 3, "wall_time_s": 1795229694.1, "actor.train/loss": 0.25}

JSON has no word for NaN and the infinities, so they are null there. Each line is written at once:
a killed process loses at most the line it was writing, and a resumed one starts again where its
checkpoint says, so no step is ever there twice.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....dataflow.errors import ConfigError
from ....dataflow.regular_files import opened_to_append
from ..atomic import append, write_text
from ..run_files import read_lines
from .tracker import RunInfo

METRICS = "metrics.jsonl"
"""The file, in the folder of each stage."""

_STEP = "step"
_TIME = "wall_time_s"
_MOST_WHOLE = 1 << 1000
"""Bound on whole numbers of a row; a float holds less than 2^1024."""


def finite_or_none(value: float) -> float | None:
    """The value as JSON can say it: None for NaN and the infinities."""
    return value if math.isfinite(value) else None


class MetricsLog:
    """Writes `metrics.jsonl`, one line per step.

    Args:
        path: The file; made if it is not there.
        first_step: The step that will be written first. Lines at or after it, which a stopped run
            wrote after its last checkpoint, are removed, and so is a line cut short by a kill.

    Raises:
        ConfigError: If the file holds a line that no such log has written.

    Example:
        >>> with MetricsLog(folder / "metrics.jsonl") as log:
        ...     log.write(0, {"actor.train/loss": 0.25})
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self.path = path
        lines = read_lines(path)
        kept = [
            line
            for number, line in enumerate(lines)
            if _values(path, number, line)[_STEP] < first_step
        ]
        write_text(path, "".join(f"{line}\n" for line in kept))
        self._next_step = first_step
        self._file = opened_to_append(path)

    def write(
        self, step: int, values: Mapping[str, float], wall_time_s: float | None = None
    ) -> None:
        """Append one step.

        Args:
            step: Higher than every step before it.
            values: Flat name -> number.
            wall_time_s: Seconds since the epoch; now by default.

        Raises:
            ValueError: If the step is not higher, or a value is named like a field of ours.
        """
        if step < self._next_step:
            raise ValueError(
                f"{self.path.name}: step {step} came after step {self._next_step - 1}; each step "
                "is written once, in order (a resumed run passes first_step)"
            )
        if reserved := {_STEP, _TIME} & set(values):
            raise ValueError(
                f"{self.path.name}: no metric may be called '{min(reserved)}'; rename it"
            )
        line = {_STEP: step, _TIME: time.time() if wall_time_s is None else wall_time_s}
        numbers = {name: finite_or_none(float(value)) for name, value in values.items()}
        content = json.dumps(line | numbers, allow_nan=False).encode() + b"\n"
        append(self.path, self._file.fileno(), content)
        self._next_step = step + 1

    def close(self) -> None:
        """Close the file; the log cannot be written afterwards."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonlTracker:
    """Writes a line per step; see `Tracker`.

    What an evaluation found after n steps may be part of line n, whose step began with those
    weights; after the last step it has a line of its own.
    """

    def __init__(self) -> None:
        self._noted: dict[int, Mapping[str, float]] = {}
        self._folders: Mapping[str, Path] = {}
        self._log: MetricsLog | None = None

    def start(self, run: RunInfo) -> None:
        """Remember where the stages' files are."""
        self._folders = run.folders

    def rewind(self, step: int, stage: str) -> None:
        """Open the stage's file without its lines from the step on; see `MetricsLog`."""
        self.finish(None)
        self._log = MetricsLog(self._folders[stage] / METRICS, first_step=step)

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Append a line."""
        assert self._log is not None, f"stage '{stage}' has not begun"
        self._log.write(step, {**metrics, **self._noted.pop(step, {})})

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep what was measured after so many steps for the line of that step."""
        self._noted[step] = metrics

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file."""
        if self._log is not None:
            for step, metrics in self._noted.items():
                self._log.write(step, metrics)
            self._noted.clear()
            self._log.close()
            self._log = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a `metrics.jsonl`, in order; nulls are None.

    Safe while the run is still writing.

    Raises:
        ConfigError: If a line is not one that `MetricsLog` writes.
    """
    return [_values(path, number, line) for number, line in enumerate(read_lines(path))]


def _values(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(line)
        known = type(found[_STEP]) is int and all(map(_is_value, found.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known, found = False, {}
    if not known:
        raise ConfigError(
            f"{path}:{number + 1}: expected a JSON object with an integer '{_STEP}' and numbers, "
            f"got {line[:80]!r}; remove the line or the file"
        )
    return found


def _is_value(value: object) -> bool:
    return (
        value is None
        or (type(value) is float and math.isfinite(value))
        or (type(value) is int and abs(value) < _MOST_WHOLE)
    )
