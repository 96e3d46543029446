"""A run's timeline as a Chrome trace, which Perfetto opens: who did what, when, with which weights.

One track per worker (a group is a process, a rank a thread of it), one slice per task, counters on
a process of their own. The file is Chrome's array form, one event per line. Its closing bracket may
be missing, and a viewer does not mind; so the file is readable at any moment and after any kill.
Times are microseconds since the epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from ...dataflow.errors import ConfigError
from ...dataflow.regular_files import opened_to_append
from ...dataflow.runtime.executor import TaskSpan
from .atomic import append, write_text
from .run_files import read_lines

_COUNTERS = "run"
"""The process that counters are shown under."""

_FIRST_KEY = '{"ph": "'
"""How every event's line begins."""

_Event: TypeAlias = dict[str, Any]


class TraceLog:
    """Writes `trace.json`.

    Args:
        path: The file; made if it is not there.
        first_step: The step that will be written first. What the file holds of steps at or after
            it, written after the last checkpoint of a stopped run, is removed.

    Raises:
        ConfigError: If the file is not such a trace.

    Example:
        >>> with TraceLog(folder / "trace.json") as trace:
        ...     for result in engine.run(sources, num_steps=200):
        ...         trace.write(result.spans)
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self.path = path
        kept = [event for event in read_trace(path) if event.get("step", -1) < first_step]
        self._pids: dict[str, int] = {}
        self._ranks: set[tuple[str, int]] = set()
        for event in kept:
            self._recall(event)
        write_text(path, "[\n" + ",\n".join(map(json.dumps, kept)))
        self._is_empty = not kept
        self._file = opened_to_append(path)

    def write(self, spans: Iterable[TaskSpan]) -> None:
        """Append a slice for each span; a worker not met before gets a track."""
        events: list[_Event] = []
        for span in spans:
            events += self._track(span.group, span.rank)
            events.append(_slice(span, self._pids[span.group]))
        self._append(events)

    def write_counters(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Append a point to a counter track for each finite value.

        Args:
            step: The step the values belong to.
            time_s: When they held, in seconds since the epoch.
            values: Track's name -> value.
        """
        events = self._track(_COUNTERS)
        for name, value in values.items():
            if math.isfinite(value):
                events.append(_counter(name, value, self._pids[_COUNTERS], step, time_s))
        self._append(events)

    def close(self) -> None:
        """Close the array and the file; reopened with a later `first_step`, it goes on."""
        if not self._file.closed:
            with self._file:
                self._write(b"]\n" if self._is_empty else b"\n]\n")

    def _append(self, events: list[_Event]) -> None:
        if events:
            text = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
            self._write((text if self._is_empty else ",\n" + text).encode())
            self._is_empty = False

    def _write(self, content: bytes) -> None:
        append(self.path, self._file.fileno(), content)

    def _track(self, group: str, rank: int | None = None) -> list[_Event]:
        """The events that name a group and one of its ranks, the first time they are met."""
        events: list[_Event] = []
        if group not in self._pids:
            self._pids[group] = len(self._pids) + 1
            events.append(_named("process_name", self._pids[group], 0, group))
        if rank is not None and (group, rank) not in self._ranks:
            self._ranks.add((group, rank))
            events.append(_named("thread_name", self._pids[group], rank, f"rank {rank}"))
        return events

    def _recall(self, event: _Event) -> None:
        """Take up the numbering of tracks where the file left it."""
        if event.get("name") == "process_name":
            self._pids[event["args"]["name"]] = event["pid"]
        elif event.get("name") == "thread_name":
            groups = {pid: group for group, pid in self._pids.items()}
            self._ranks.add((groups[event["pid"]], event["tid"]))

    def __enter__(self) -> TraceLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What ends the run is said, rather than that the bracket found no room either.
        with suppress(*(() if kind is None else (OSError,))):
            self.close()


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Every complete event of a trace, in the order written; none if there is no file.

    Safe while the run is still writing.

    Raises:
        ConfigError: If the file is not a trace that `TraceLog` wrote.
    """
    lines = read_lines(path, complete=False)
    events: list[_Event] = []
    for number, line in enumerate(lines):
        is_last = number == len(lines) - 1
        if line == "[" and number == 0 or line == "]" and is_last:
            continue
        event = _parse(line) if number else None
        if event is not None:
            events.append(event)
        elif not (number and is_last and _is_cut(line)):
            raise ConfigError(
                f"{path}:{number + 1}: expected one trace event per line, got {line[:80]!r}; "
                "remove the file"
            )
    return events


def _parse(line: str) -> _Event | None:
    """The event on a line, or None if there is none."""
    try:
        event: Any = json.loads(line.removesuffix(","))
        return event if "ph" in event and "args" in event else None
    except (ValueError, TypeError, RecursionError):
        return None


def _is_cut(line: str) -> bool:
    """Whether a kill may have left a last line so: the beginning of an event."""
    return _FIRST_KEY.startswith(line) or line.startswith(_FIRST_KEY)


def _named(what: str, pid: int, tid: int, name: str) -> _Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(span: TaskSpan, pid: int) -> _Event:
    # Both ends are rounded, not the duration: slices that follow each other then never overlap.
    start_us, end_us = round(span.start_s * 1e6), round(span.end_s * 1e6)
    return {
        "ph": "X",
        "name": span.node,
        "cat": "task",
        "pid": pid,
        "tid": span.rank,
        "ts": start_us,
        "dur": max(0, end_us - start_us),
        "step": span.step,  # For us: a viewer shows what is in args.
        "args": {
            "node": span.node,
            "step": span.step,
            "chunk": span.chunk,
            "versions": dict(span.versions),
        },
    }


def _counter(name: str, value: float, pid: int, step: int, time_s: float) -> _Event:
    # A counter draws each of its args as a series, so its step stands outside them.
    return {
        "ph": "C",
        "name": name,
        "pid": pid,
        "tid": 0,
        "ts": round(time_s * 1e6),
        "step": step,
        "args": {"value": float(value)},
    }
