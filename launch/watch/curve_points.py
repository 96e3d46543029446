"""Points of curves out of `metrics.jsonl`, without reading all of it.

Of a file with 100,000 lines about a thousand are read, at evenly spaced offsets, and both ends. A
range of steps is found by bisection, since each line's step is higher than the one before. While
the run goes on, only what was written since the last look is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..run_dir.evaluations import Evaluations
from ..run_dir.step_logs import METRICS
from .known_runs import LogLine, RegularFile, opened

NUM_POINTS = 1000  # of a curve, about: as many as a wide screen has room for

# begins the names of what is measured now and then, whose lines are looked up one by one
EVALUATION = "evaluation/"

_WHOLE_BYTES = 1 << 20  # up to so many bytes every line is read
_MOST_APPENDED_BYTES = 4 << 20
_MOST_EVALUATIONS = 500
_MOST_DAMAGED_IN_A_ROW = 16


@dataclass(frozen=True)
class _Point:
    step: int
    wall_time_s: float
    values: dict[str, Any]


@dataclass(frozen=True)
class Points:
    """Points of some curves of one stage; each is a line that stands in the file."""

    steps: list[int]
    # since the stage's first line, by the clock: pauses of a resumed run count
    seconds: list[float]
    # metric -> its value at each, None where the line has none
    columns: dict[str, list[float | None]]
    offset: int  # up to which byte the file has been seen
    mark: str  # of the bytes before; see `RegularFile.mark`
    is_whole: bool  # whether every line of the range is among them
    num_damaged: int  # lines met that no run has written


def sampled(
    home: Path,
    metrics: Sequence[str],
    *,
    num_points: int = NUM_POINTS,
    first_step: int | None = None,
    last_step: int | None = None,
) -> Points:
    """About so many points of a stage's curves, evenly spaced in the file, with both ends."""
    with opened(home / METRICS) as file:
        low = 0 if first_step is None else _offset_of(file, first_step)
        high = file.end if last_step is None else _offset_of(file, last_step + 1)
        lines, is_whole = _spread(file, low, high, num_points)
        if any(name.startswith(EVALUATION) for name in metrics) and not is_whole:
            lines |= _evaluated(file, home, low, high)
        ordered = [lines[start] for start in sorted(lines)]
        return _points(file, ordered, metrics, file.end, is_whole=is_whole)


def appended(home: Path, metrics: Sequence[str], offset: int, mark: str) -> Points | None:
    with opened(home / METRICS) as file:
        if offset > file.end or file.mark(offset) != mark:
            return None
        if file.end - offset > _MOST_APPENDED_BYTES:
            return None
        return _points(file, file.lines(offset, file.end), metrics, file.end, is_whole=True)


def metric_names(home: Path) -> list[str]:
    """The metrics of a stage: those of its first line, its last ones, and its last evaluation's."""
    with opened(home / METRICS) as file:
        found = [file.line_from(0), *_last_lines(file, 16)]
        found += list(_evaluated(file, home, 0, file.end, most=1).values())
        points = [_parsed(line) for line in found if line is not None]
        return sorted({name for point in points if point for name in point.values})


def last_values(home: Path) -> tuple[int, dict[str, float]] | None:
    """The last complete step of a stage and its numbers; None before the first."""
    with opened(home / METRICS) as file:
        points = [point for line in _last_lines(file, 2) if (point := _parsed(line)) is not None]
    if not points:
        return None
    # What the last evaluation found has a line of its own behind that of the last step.
    taken = [one for one in points if any(not name.startswith(EVALUATION) for name in one.values)]
    point = (taken or points)[0]
    numbers = {name: _number(value) for name, value in point.values.items()}
    return point.step, {name: value for name, value in numbers.items() if value is not None}


def _spread(
    file: RegularFile, low: int, high: int, num_points: int
) -> tuple[dict[int, LogLine], bool]:
    num_points = max(2, num_points)
    if high - low <= _WHOLE_BYTES:
        every = list(file.lines(low, high))
        if len(every) <= 2 * num_points:
            return {line.start: line for line in every}, True
        chosen = {round(i * (len(every) - 1) / (num_points - 1)) for i in range(num_points)}
        return {every[i].start: every[i] for i in chosen}, False
    lines: dict[int, LogLine] = {}
    for index in range(num_points - 1):
        line = file.line_from(low + index * (high - low) // (num_points - 1))
        if line is not None and line.start < high:
            lines[line.start] = line
    last = file.line_before(high)
    if last is not None:
        lines[last.start] = last
    return lines, False


def _evaluated(
    file: RegularFile, home: Path, low: int, high: int, most: int = _MOST_EVALUATIONS
) -> dict[int, LogLine]:
    lines: dict[int, LogLine] = {}
    for step in Evaluations(home).steps()[-most:]:
        line = file.line_from(_offset_of(file, step))
        if line is not None and low <= line.start < high:
            lines[line.start] = line
    return lines


def _offset_of(file: RegularFile, step: int) -> int:
    low, high = 0, file.end
    while low < high:
        middle = (low + high) // 2
        line, point = _readable_from(file, middle)
        if line is None or point is None or point.step >= step:
            high = middle
        else:
            low = line.stop
    line = file.line_from(low)
    return file.end if line is None else line.start


def _readable_from(file: RegularFile, offset: int) -> tuple[LogLine | None, _Point | None]:
    line: LogLine | None = None
    for _ in range(_MOST_DAMAGED_IN_A_ROW):
        line = file.line_from(offset)
        if line is None:
            return None, None
        point = _parsed(line)
        if point is not None:
            return line, point
        offset = line.stop
    return line, None


def _last_lines(file: RegularFile, most: int) -> list[LogLine]:
    lines: list[LogLine] = []
    line = file.line_before(file.end)
    while line is not None and len(lines) < most:
        lines.append(line)
        line = file.line_before(line.start)
    return lines


def _points(
    file: RegularFile,
    lines: Iterable[LogLine],
    metrics: Sequence[str],
    offset: int,
    *,
    is_whole: bool,
) -> Points:
    parsed = [_parsed(line) for line in lines]
    points = [point for point in parsed if point is not None]
    _, first = _readable_from(file, 0)
    begun_s = 0.0 if first is None else first.wall_time_s
    columns = {
        name: [_number(point.values.get(name)) for point in points]
        for name in dict.fromkeys(metrics)
    }
    return Points(
        steps=[point.step for point in points],
        seconds=[point.wall_time_s - begun_s for point in points],
        columns=columns,
        offset=offset,
        mark=file.mark(offset),
        is_whole=is_whole,
        num_damaged=len(parsed) - len(points),
    )


def _parsed(line: LogLine) -> _Point | None:
    try:
        content: Any = json.loads(line.text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    values = cast(dict[str, Any], content)
    step, wall_time_s = values.pop("step", None), _number(values.pop("wall_time_s", None))
    if not isinstance(step, int) or isinstance(step, bool) or wall_time_s is None:
        return None
    if abs(step) > 1 << 53:  # a browser could not tell it from its neighbors
        return None
    return _Point(step, wall_time_s, values)


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
