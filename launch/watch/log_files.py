"""Parts of `metrics.jsonl` and `trace.json`, which a running process may be writing.

A file is read by offsets and never as a whole: it may hold gigabytes, of which a page shows a
thousand lines. What follows the last line end is a line that is still being written, or that a kill
cut short, and does not count.

Of metrics with 100,000 lines about a thousand are read, at evenly spaced offsets, and both ends. A
range of steps is found by bisection, since each line's step is higher than the one before. While
the run goes on, only what was written since the last look is read. Of a trace the end is read line
by line until enough steps are complete. The names of its tracks stand where each was first met,
mostly at the beginning, of which a bounded part is read as well.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ...dataflow.files import open_regular
from ..run_dir.evaluations import Evaluations
from ..run_dir.step_logs import METRICS

_CHUNK_BYTES = 8192
# of a line; what is longer counts as damaged, so that no file fills the memory
MOST_LINE_BYTES = 4 << 20
# bytes searched for a line end: no line of ours is so long, and a hole can exceed any disk
_MOST_SEARCHED_BYTES = 16 * MOST_LINE_BYTES
_MARKED_BYTES = 64


class Gone(ConfigError):
    """Something that a request names is not there, or no longer; the page says so and goes on."""


@dataclass(frozen=True)
class LogLine:
    """A complete line."""

    start: int  # offset of its first byte
    stop: int  # offset behind its line end
    text: bytes  # its bytes without the line end; empty if it is longer than any line of ours


class RegularFile:
    """A file open for reading, as long as it was when it was opened."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self._inode = found.st_ino
        self.end = self._line_start(found.st_size)  # behind the last line end; 0 without any

    def read(self, start: int, num_bytes: int) -> bytes:
        return os.pread(self._descriptor, max(0, num_bytes), start)

    def mark(self, offset: int) -> str:
        # A resumed run writes its metrics anew, and the new file may be longer than the old one
        # was.
        before = self.read(max(0, offset - _MARKED_BYTES), min(offset, _MARKED_BYTES))
        return f"{self._inode:x}-{blake2b(before, digest_size=12).hexdigest()}"

    def line_from(self, offset: int) -> LogLine | None:
        start: int | None = offset
        if offset > 0 and self.read(offset - 1, 1) != b"\n":
            start = self._next_end(offset)
        stop = None if start is None else self._next_end(start)
        if start is None or stop is None:
            return None
        short = stop - start <= MOST_LINE_BYTES
        return LogLine(start, stop, self.read(start, stop - start - 1) if short else b"")

    def line_before(self, offset: int) -> LogLine | None:
        return self.line_from(self._line_start(offset - 1)) if offset > 0 else None

    def lines(self, start: int, stop: int) -> Iterator[LogLine]:
        while start < stop and (line := self.line_from(start)) is not None:
            yield line
            start = line.stop

    def lines_back(self) -> Iterator[LogLine]:
        line = self.line_before(self.end)
        while line is not None:
            yield line
            line = self.line_before(line.start)

    def _next_end(self, offset: int) -> int | None:
        begun = offset
        while offset < self.end:
            self._check_searched(offset - begun)
            chunk = self.read(offset, min(_CHUNK_BYTES, self.end - offset))
            if not chunk:
                return None  # it has become shorter
            found = chunk.find(b"\n")
            if found >= 0:
                return offset + found + 1
            offset += len(chunk)
        return None

    def _line_start(self, offset: int) -> int:
        begun = offset
        while offset > 0:
            self._check_searched(begun - offset)
            start = max(0, offset - _CHUNK_BYTES)
            found = self.read(start, offset - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            offset = start
        return 0

    def _check_searched(self, num_bytes: int) -> None:
        if num_bytes > _MOST_SEARCHED_BYTES:
            raise Gone(f"the file is damaged: no line ends within {num_bytes >> 20} MiB")


@contextmanager
def opened(path: Path) -> Generator[RegularFile]:
    try:
        descriptor = open_regular(path)
    except OSError as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
        raise Gone(f"{path.name}: {reason}") from error
    try:
        yield RegularFile(descriptor)
    finally:
        os.close(descriptor)


def _json_object(text: bytes) -> dict[str, Any] | None:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], content) if isinstance(content, dict) else None


# --- points of curves

# begins the names of what is measured now and then, whose lines are looked up one by one
EVALUATION = "evaluation/"

_WHOLE_BYTES = 1 << 20  # up to so many bytes every line is read
_MOST_APPENDED_BYTES = 4 << 20
_MOST_EVALUATIONS = 500
_MOST_DAMAGED_IN_A_ROW = 16
_EXACT = 1 << 53  # a browser could not tell larger numbers from their neighbors


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
    num_points: int = 1000,  # as many as a wide screen has room for
    first_step: int | None = None,
    last_step: int | None = None,
) -> Points:
    """About so many points of a stage's curves, evenly spaced in the file, with both ends."""
    num_points = max(2, num_points)
    with opened(home / METRICS) as file:
        low = 0 if first_step is None else _offset_of(file, first_step)
        high = file.end if last_step is None else _offset_of(file, last_step + 1)
        every = [*file.lines(low, high)] if high - low <= _WHOLE_BYTES else []
        is_whole = high - low <= _WHOLE_BYTES and len(every) <= 2 * num_points
        if is_whole:
            chosen = every
        elif every:
            spread = {round(i * (len(every) - 1) / (num_points - 1)) for i in range(num_points)}
            chosen = [every[i] for i in spread]
        else:
            offsets = (low + i * (high - low) // (num_points - 1) for i in range(num_points - 1))
            found = [*map(file.line_from, offsets)]
            chosen = [line for line in found if line is not None and line.start < high]
            last = file.line_before(high)
            chosen += [] if last is None else [last]
        lines = {line.start: line for line in chosen}
        if any(name.startswith(EVALUATION) for name in metrics) and not is_whole:
            lines |= _evaluated(file, home, low, high)
        ordered = [lines[start] for start in sorted(lines)]
        return _points(file, ordered, metrics, is_whole=is_whole)


def appended(home: Path, metrics: Sequence[str], offset: int, mark: str) -> Points | None:
    with opened(home / METRICS) as file:
        if offset > file.end or file.mark(offset) != mark:
            return None
        if file.end - offset > _MOST_APPENDED_BYTES:
            return None
        return _points(file, file.lines(offset, file.end), metrics, is_whole=True)


def metric_names(home: Path) -> list[str]:
    """The metrics of a stage: those of its first line, its last ones, and its last evaluation's."""
    with opened(home / METRICS) as file:
        found = [file.line_from(0), *islice(file.lines_back(), 16)]
        found += _evaluated(file, home, 0, file.end, most=1).values()
        points = [_parsed(line) for line in found if line is not None]
        return sorted({name for point in points if point for name in point.values})


def _evaluated(
    file: RegularFile, home: Path, low: int, high: int, most: int = _MOST_EVALUATIONS
) -> dict[int, LogLine]:
    steps = Evaluations(home).steps()[-most:]
    found = [file.line_from(_offset_of(file, step)) for step in steps]
    return {line.start: line for line in found if line is not None and low <= line.start < high}


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
        point = None if line is None else _parsed(line)
        if line is None or point is not None:
            return line, point
        offset = line.stop
    return line, None


def _points(
    file: RegularFile, lines: Iterable[LogLine], metrics: Sequence[str], *, is_whole: bool
) -> Points:
    parsed = [_parsed(line) for line in lines]
    points = [point for point in parsed if point is not None]
    _, first = _readable_from(file, 0)
    begun_s = 0.0 if first is None else first.wall_time_s
    return Points(
        steps=[point.step for point in points],
        seconds=[point.wall_time_s - begun_s for point in points],
        columns={
            name: [_number(point.values.get(name)) for point in points]
            for name in dict.fromkeys(metrics)
        },
        offset=file.end,
        mark=file.mark(file.end),
        is_whole=is_whole,
        num_damaged=len(parsed) - len(points),
    )


def _parsed(line: LogLine) -> _Point | None:
    values = _json_object(line.text)
    if values is None:
        return None
    step, wall_time_s = values.pop("step", None), _number(values.pop("wall_time_s", None))
    if type(step) is not int or wall_time_s is None or abs(step) > _EXACT:
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


# --- the timeline

_HEAD_BYTES = 256 << 10
_MOST_TAIL_BYTES = 8 << 20
_MOST_SLICES = 4000


def timeline(trace: Path, num_steps: int) -> dict[str, Any]:
    """Return the tasks of the last steps.

    `slices` have node, track, step, chunk, start and duration in seconds; `tracks` name a group and
    a rank; `is_cut`: some were left out.
    """
    with opened(trace) as file:
        events, is_cut = _tail(file, num_steps)
        head = file.read(0, min(_HEAD_BYTES, file.end)).split(b"\n")[:-1]
    first = [_trace_event(text) for text in head if text.startswith(b'{"ph": "M"')]
    names = {
        event["pid"]: str(event["args"].get("name", "?"))
        for event in (*first, *events)
        if event is not None and event["ph"] == "M" and event.get("name") == "process_name"
    }
    slices = [event for event in events if event["ph"] == "X"]
    steps = sorted({event["step"] for event in slices})[-num_steps:]
    slices = [event for event in slices if event["step"] in steps]
    slices.sort(key=lambda event: event["ts"])
    if len(slices) > _MOST_SLICES:
        slices, is_cut = slices[-_MOST_SLICES:], True
    begun_us = min((event["ts"] for event in slices), default=0)
    tracks = sorted({(event["pid"], event["tid"]) for event in slices})
    return {
        "tracks": [{"group": names.get(pid, f"group {pid}"), "rank": tid} for pid, tid in tracks],
        "slices": [
            {
                "node": str(event.get("name", "?")),
                "track": tracks.index((event["pid"], event["tid"])),
                "step": event["step"],
                "chunk": event["args"].get("chunk"),
                "start_s": (event["ts"] - begun_us) / 1e6,
                "duration_s": max(0, event["dur"]) / 1e6,
            }
            for event in slices
        ],
        "steps": steps,
        "is_cut": is_cut,
    }


def _tail(file: RegularFile, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
    events: list[dict[str, Any]] = []
    steps: set[int] = set()
    for line in file.lines_back():
        if line.start < file.end - _MOST_TAIL_BYTES:
            return events, True
        event = _trace_event(line.text)
        if event is not None:
            steps |= {event["step"]} if event["ph"] == "X" else set()
            # Steps overlap where generation runs ahead: a step's beginning may stand before the end
            # of the one before it, so two more are looked at than are wanted.
            if len(steps) > num_steps + 2:
                return events, False
            events.append(event)
    return events, False


def _trace_event(line: bytes) -> dict[str, Any] | None:
    """Parse the task or the track's name on a line; None if it is a counter or damaged."""
    event = _json_object(line.rstrip(b","))
    if event is None or not isinstance(event.get("args"), dict):
        return None
    if event.get("ph") not in ("M", "X"):
        return None
    whole = ("pid", "tid") if event["ph"] == "M" else ("pid", "tid", "ts", "dur", "step")
    if not all(type(event.get(name)) is int and abs(event[name]) < _EXACT for name in whole):
        return None
    return {"step": -1, **event}
