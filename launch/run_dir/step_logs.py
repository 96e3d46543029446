"""Files with a line for each step: metrics, warnings, the ledger of rows, and the timeline.

    metrics.jsonl   {"step": 3, "wall_time_s": 1795229694.1, "actor.train/loss": 0.25}
    events.jsonl    {"step": 9, "first_step": 7, "at": "2026-11-21T03:15:01+00:00",
                     "kind": "cut_off", "node": "actor.generate", "seen": "...", "means": "...",
                     "remedy": "..."}
    ledger.jsonl    {"step": 3, "read": {"prompts": 32}, "sha256": {"prompts": "..."}, "times": 1,
                     "made": {"actor.generate": 128}, "trained": {"actor.train": 128}, "unseen": []}
    trace.json      a Chrome trace, which Perfetto opens, with one event on each line

Each line is written at once, so a killed process loses at most the line that it was writing. A
resumed run removes the lines from its first step on before it writes them again, so no step is
there twice. All of them can be read while the run writes.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ...dataflow.errors import ConfigError
from ...dataflow.files import opened_to_append
from .files import append, finite_or_none, read_lines, write_text

if TYPE_CHECKING:
    from ...dataflow.graph.graph import Graph
    from ...dataflow.runtime.ledger import Ledger, Line
    from ...dataflow.runtime.messages import TaskSpan

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"  # absent as long as there is nothing to warn of
LEDGER = "ledger.jsonl"

_STEP, _TIME = "step", "wall_time_s"
_MOST_WHOLE = 1 << 1000  # bound on whole numbers of a row; a float holds less than 2^1024

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class _LineFormat(Generic[_Row]):
    """The lines of one kind of file."""

    expected: str
    parse: Callable[[Any], _Row]  # of JSON; raises if no run has written it
    step_of: Callable[[_Row], int]

    def read(self, path: Path) -> list[tuple[str, _Row]]:
        """Return every complete line with its content; none if there is no file."""
        found: list[tuple[str, _Row]] = []
        for number, line in enumerate(read_lines(path), 1):
            try:
                found.append((line, self.parse(json.loads(line))))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise ConfigError(
                    f"{path}:{number}: expected {self.expected}, got {line[:80]!r}; remove the "
                    "line or the file"
                ) from None
        return found

    def rewind(self, path: Path, step: int) -> None:
        """Remove the lines from a step on, and one that a kill cut short."""
        kept = [line for line, row in self.read(path) if self.step_of(row) < step]
        write_text(path, "".join(f"{line}\n" for line in kept))


def _append_line(path: Path, line: str) -> None:
    with opened_to_append(path) as file:
        append(path, file.fileno(), f"{line}\n".encode())


# --- metrics


def _metrics_row(row: Any) -> dict[str, Any]:
    def is_number(value: object) -> bool:
        is_float = type(value) is float and math.isfinite(value)
        return value is None or is_float or (type(value) is int and abs(value) < _MOST_WHOLE)

    if type(row[_STEP]) is not int or not all(map(is_number, row.values())):
        raise ValueError
    return row


_METRICS = _LineFormat(
    f"a JSON object with an integer '{_STEP}' and numbers", _metrics_row, lambda row: row[_STEP]
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`; null, for NaN and the infinities, is None."""
    return [row for _, row in _METRICS.read(path)]


class MetricsLog:
    """Writes `metrics.jsonl`, from `first_step` on."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self.path = path
        _METRICS.rewind(path, first_step)
        self._next_step = first_step
        self._file = opened_to_append(path)

    def write(
        self, step: int, values: Mapping[str, float], wall_time_s: float | None = None
    ) -> None:
        """Append a row; its step is higher than every step before, and the time is now."""
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
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- warnings


def _event_row(row: Any) -> dict[str, Any]:
    if type(row[_STEP]) is not int or not isinstance(row["kind"], str):
        raise ValueError
    return row


_EVENTS = _LineFormat(
    "a JSON object with a 'step' and a 'kind'", _event_row, lambda row: row[_STEP]
)


class EventLog:
    """Writes `events.jsonl`, from `first_step` on; the first warning makes the file."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        if path.exists():
            _EVENTS.rewind(path, first_step)

    def write(self, event: Mapping[str, Any]) -> None:
        """Append a warning with the time; `step` is one of its fields."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({_STEP: event[_STEP], "at": at, **event}, allow_nan=False)
        _append_line(self._path, line)


def read_events(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in _EVENTS.read(path)]


def stage_events(run: Path) -> list[dict[str, Any]]:
    """Return a run's warnings, each with its `stage`: "" for the main one, which comes last."""
    before = sorted((run / "stages").glob(f"*/{EVENTS}"), key=lambda file: file.parent.name)
    found = [{"stage": f.parent.name, **event} for f in before for event in read_events(f)]
    return found + [{"stage": "", **event} for event in read_events(run / EVENTS)]


def count_kinds(run: Path) -> dict[str, int]:
    return dict(Counter(event["kind"] for event in stage_events(run)))


# --- ledger


def _ledger_format() -> _LineFormat[Line]:
    # Imported here and below: it needs torch, and listing runs does without.
    from ...dataflow.runtime.ledger import from_json

    return _LineFormat("a line of a ledger", from_json, lambda line: line.step)


def read_ledger(path: Path) -> list[Line]:
    return [line for _, line in _ledger_format().read(path)]


def opened_ledger(graph: Graph, path: Path, first_step: int) -> Ledger:
    """Return a stage's ledger, which compares steps that are computed again with their lines."""
    from ...dataflow.runtime.ledger import Ledger, as_json

    lines, before = _ledger_format(), read_ledger(path)
    lines.rewind(path, first_step)
    last = [first_step - 1]

    def write(line: Line) -> None:
        if line.step <= last[0]:  # computed again, and so will be what follows it
            lines.rewind(path, line.step)
        _append_line(path, json.dumps(as_json(line)))
        last[0] = line.step

    return Ledger(graph, write, before)


# --- timeline

_COUNTERS = "run"  # the process that counters are shown under
_FIRST_KEY = '{"ph": "'  # every event's line begins so

_Event: TypeAlias = dict[str, Any]


class TraceLog:
    """Writes `trace.json`, from `first_step` on.

    A group is a process and a rank a thread of it, with one slice for each task; counters have a
    process of their own. The closing bracket of Chrome's array form may be missing. Times are
    microseconds since the epoch.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self.path = path
        kept = [event for event in read_trace(path) if event.get("step", -1) < first_step]
        self._pids: dict[str, int] = {}
        self._ranks: set[tuple[str, int]] = set()
        for event in kept:
            if event.get("name") == "process_name":
                self._pids[event["args"]["name"]] = event["pid"]
            elif event.get("name") == "thread_name":
                groups = {pid: group for group, pid in self._pids.items()}
                self._ranks.add((groups[event["pid"]], event["tid"]))
        write_text(path, "[\n" + ",\n".join(map(json.dumps, kept)))
        self._is_empty = not kept
        self._file = opened_to_append(path)

    def write(self, spans: Iterable[TaskSpan]) -> None:
        """Append a slice for each span; a worker not met before gets a track."""
        events: list[_Event] = []
        for span in spans:
            events += self._track(span.group, span.rank)
            # Both ends are rounded, not the duration: slices that follow each other then never
            # overlap.
            start_us, end_us = round(span.start_s * 1e6), round(span.end_s * 1e6)
            shown = {"node": span.node, "step": span.step, "chunk": span.chunk}
            events.append(
                {
                    "ph": "X",
                    "name": span.node,
                    "cat": "task",
                    "pid": self._pids[span.group],
                    "tid": span.rank,
                    "ts": start_us,
                    "dur": max(0, end_us - start_us),
                    "step": span.step,  # for us: a viewer shows what is in args
                    "args": {**shown, "versions": dict(span.versions)},
                }
            )
        self._append(events)

    def write_counters(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Append a point to a counter track for each finite value; seconds since the epoch."""
        events = self._track(_COUNTERS)
        at = {"pid": self._pids[_COUNTERS], "tid": 0, "ts": round(time_s * 1e6), "step": step}
        for name, value in values.items():
            if math.isfinite(value):
                # A counter draws each of its args as a series, so its step stands outside them.
                events.append({"ph": "C", "name": name, **at, "args": {"value": float(value)}})
        self._append(events)

    def close(self) -> None:
        if not self._file.closed:
            with self._file:
                bracket = b"]\n" if self._is_empty else b"\n]\n"
                append(self.path, self._file.fileno(), bracket)

    def _append(self, events: list[_Event]) -> None:
        if events:
            text = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
            content = (text if self._is_empty else ",\n" + text).encode()
            append(self.path, self._file.fileno(), content)
            self._is_empty = False

    def _track(self, group: str, rank: int | None = None) -> list[_Event]:
        """Return the events that name a group and one of its ranks, the first time."""
        events: list[_Event] = []
        if group not in self._pids:
            self._pids[group] = len(self._pids) + 1
            events.append(_named("process_name", self._pids[group], 0, group))
        if rank is not None and (group, rank) not in self._ranks:
            self._ranks.add((group, rank))
            events.append(_named("thread_name", self._pids[group], rank, f"rank {rank}"))
        return events

    def __enter__(self) -> TraceLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error that ends the run is reported, rather than that the bracket found no room either.
        with suppress(*(() if kind is None else (OSError,))):
            self.close()


def _named(what: str, pid: int, tid: int, name: str) -> _Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return every complete event of a trace, in the order written; none if there is no file."""
    lines = read_lines(path, complete=False)
    events: list[_Event] = []
    for number, line in enumerate(lines):
        is_last = number == len(lines) - 1
        if line == "[" and number == 0 or line == "]" and is_last:
            continue
        event: Any = None
        with suppress(ValueError, TypeError, RecursionError):
            parsed = json.loads(line.removesuffix(","))
            event = parsed if number and "ph" in parsed and "args" in parsed else None
        if event is not None:
            events.append(event)
        # A kill may leave the beginning of an event as the last line.
        elif not (number and is_last and line.startswith(_FIRST_KEY[: len(line)])):
            raise ConfigError(
                f"{path}:{number + 1}: expected one trace event per line, got {line[:80]!r}; "
                "remove the file"
            )
    return events
