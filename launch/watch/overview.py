"""The overview of one run: state, code, placement, evaluations, rewards, memory, timeline.

Each part is read from the file that holds it. A part whose file is not there, or cannot be read, is
absent, with a line that says why. Of `trace.json`, which may hold hundreds of megabytes, the end is
read line by line until enough steps are complete. The names of its tracks stand where each was
first met, mostly at the beginning, of which a bounded part is read as well.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ..run_dir.evaluations import Evaluations
from ..run_dir.files import read_object
from ..run_dir.run_folder import RunFolder, RunRecord, state_of
from ..run_dir.step_logs import stage_events
from .curve_points import last_values
from .known_runs import LogLine, RegularFile, opened

_MOST_EVALUATIONS = 50
_MOST_WARNINGS = 50
_REWARDS, _SPEED = re.compile("reward", re.IGNORECASE), re.compile("^run/")
_LAG = re.compile(r"lag|stale|version", re.IGNORECASE)
_RESTARTS = re.compile(r"restart|error|timeout|dropped|skipped|truncated", re.IGNORECASE)
# Entries of summary.json that have a part of their own, or are as long as a page.
_OF_SUMMARY = frozenset({"examples_after", "examples_before", "nodes", "suites"})


def overview(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """Return all parts of a run's overview: what each holds, or `{"absent": why}`."""
    parts: dict[str, Callable[[], Any]] = {
        "about": lambda: _about(record),
        "placement": lambda: _placement(folder),
        "last_step": lambda: _last_step(folder),
        "evaluations": lambda: _evaluations(folder),
        "results": lambda: _results(record),
        "suites": lambda: _suites(record),
        "memory": lambda: memory(folder, record),
        "warnings": lambda: _warnings(folder),
        "events": lambda: _events(record),
    }
    found: dict[str, Any] = {}
    for name, read in parts.items():
        try:
            found[name] = read()
        except (ConfigError, OSError) as error:
            found[name] = {"absent": str(error).split("\n")[0]}
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            said = f"what its files say of it is damaged ({type(error).__name__})"
            found[name] = {"absent": said}
    return found


def _about(record: RunRecord) -> dict[str, Any]:
    if record.fault:
        return {"absent": record.fault}
    return {
        "state": state_of(record),
        "name": record.name,
        "seed": record.seed,
        "created": record.created.isoformat(),
        "code": str(record.code),
        "data": record.data,
        "not_reproducible": record.not_reproducible,
    }


def _placement(folder: RunFolder) -> dict[str, Any]:
    plan = read_object(folder.plan)
    if plan is None:
        return {"absent": "there is no plan.json: a version that wrote none made this run"}
    return {
        "groups": plan.get("groups", []),
        "nodes": plan.get("nodes", {}),
        "default_group": plan.get("default_group"),
        "layouts": plan.get("layouts"),
    }


def _last_step(folder: RunFolder) -> dict[str, Any]:
    found = last_values(folder.path)
    if found is None:
        return {"absent": "it has not taken a step yet"}
    step, values = found
    kinds = {"rewards": _REWARDS, "lag": _LAG, "faults": _RESTARTS, "speed": _SPEED}
    return {"step": step} | {
        kind: {name: value for name, value in values.items() if pattern.search(name)}
        for kind, pattern in kinds.items()
    }


def _evaluations(folder: RunFolder) -> dict[str, Any]:
    kept = Evaluations(folder.path)
    steps = kept.steps()
    if not steps:
        return {"absent": "nothing has been evaluated yet, or evaluation is switched off"}
    rows: list[dict[str, Any]] = []
    for step in steps[-_MOST_EVALUATIONS:]:
        try:
            suites = {name: found.values for name, found in kept.read(step).items()}
        except ConfigError as error:
            rows.append({"step": step, "absent": str(error).split("\n")[0]})
        else:
            rows.append({"step": step, "suites": suites})
    return {"rows": rows, "num_evaluations": len(steps)}


def _results(record: RunRecord) -> dict[str, Any]:
    if record.summary is None:
        return {"absent": "there is no summary.json: it is written at the end"}
    return {name: value for name, value in record.summary.items() if name not in _OF_SUMMARY}


def _suites(record: RunRecord) -> dict[str, Any]:
    if record.summary is None:
        return {"absent": "they are compared at the end"}
    suites = record.summary.get("suites")
    return dict(suites) if suites else {"absent": "this run evaluated nothing before and after"}


def memory(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """Return the memory that the plan expects of each group's fullest device, and the peak."""
    groups: dict[str, Any] = {}
    # As `planner.plan.prediction.GroupMemory` has it, without importing the planner.
    for name, group in (_prediction(folder).get("memory") or {}).items():
        resident = {role: sum(parts.values()) for role, parts in group["resident_bytes"].items()}
        transient = {call: sum(parts.values()) for call, parts in group["transient_bytes"].items()}
        groups[name] = {
            "resident_bytes": resident,
            "transient_bytes": transient,
            "peak_bytes": sum(resident.values()) + max(transient.values(), default=0),
            "capacity_bytes": group["capacity_bytes"],
        }
    measured = (record.summary or {}).get("peak_memory_bytes")
    if not groups and measured is None:
        return {"absent": "its plan was not predicted, and what was used is written at the end"}
    return {"groups": groups, "peak_memory_bytes": measured}


def _prediction(folder: RunFolder) -> dict[str, Any]:
    return (read_object(folder.plan) or {}).get("prediction") or {}


def _warnings(folder: RunFolder) -> dict[str, Any]:
    found = stage_events(folder.path)
    if not found:
        return {"absent": "it has warned of nothing"}
    shown = [
        {name: str(event.get(name, "")) for name in ("stage", "seen", "means", "remedy", "node")}
        | {"step": event["step"], "first_step": event.get("first_step", event["step"])}
        for event in found[-_MOST_WARNINGS:]
    ]
    return {"rows": shown, "num_warnings": len(found)}


def _events(record: RunRecord) -> dict[str, Any]:
    summary: Mapping[str, Any] = record.summary or {}
    restarts = {name: value for name, value in summary.items() if _RESTARTS.search(name)}
    return {
        "changes": list(record.changes),
        "resumed": summary.get("resumed"),
        "stopped": summary.get("stopped"),
        "restarts": restarts,
    }


_TRACE = "trace.json"
_HEAD_BYTES = 256 << 10
_MOST_TAIL_BYTES = 8 << 20
_MOST_SLICES = 4000


def timeline(home: Path, num_steps: int) -> dict[str, Any]:
    """Return the tasks of the last steps.

    `slices` have node, track, step, chunk, start and duration in seconds; `tracks` name a group and
    a rank; `begun_s` is when the first slice began, since the epoch; `is_cut`: some were left out.
    """
    with opened(home / _TRACE) as file:
        events, is_cut = _tail(file, num_steps)
        head = file.read(0, min(_HEAD_BYTES, file.end)).split(b"\n")[:-1]
    first = [_event(LogLine(0, 0, text)) for text in head if text.startswith(b'{"ph": "M"')]
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
        "begun_s": begun_us / 1e6,
        "is_cut": is_cut,
    }


def node_times(folder: RunFolder, record: RunRecord, shown: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of each node in a step: predicted, measured and in the steps shown.

    Measured is the median over a run that has ended, and `last_s` the mean over the steps shown of
    the slowest rank's sum over chunks.
    """
    predicted: dict[str, Any] = {}
    with suppress(ConfigError):
        predicted = _prediction(folder).get("nodes") or {}
    measured = cast(dict[str, Any], (record.summary or {}).get("nodes") or {})
    last = _last_times(shown)
    nodes = dict.fromkeys([*last, *measured, *predicted])
    return {
        node: {
            "predicted_s": (predicted.get(node) or {}).get("duration_s"),
            "measured_s": (measured.get(node) or {}).get("measured_s"),
            "last_s": last.get(node),
        }
        for node in nodes
    }


def predicted_step_s(folder: RunFolder) -> float | None:
    value = None
    with suppress(ConfigError):
        value = _prediction(folder).get("step_time_s")
    return float(value) if isinstance(value, int | float) else None


def _last_times(shown: dict[str, Any]) -> dict[str, float]:
    sums: dict[tuple[str, int, int], float] = {}
    for one in shown["slices"]:
        key = one["node"], one["step"], one["track"]
        sums[key] = sums.get(key, 0.0) + one["duration_s"]
    slowest: dict[tuple[str, int], float] = {}
    for (node, step, _), seconds in sums.items():
        slowest[node, step] = max(seconds, slowest.get((node, step), 0.0))
    nodes = dict.fromkeys(node for node, _ in slowest)
    return {
        node: statistics.fmean(s for (name, _), s in slowest.items() if name == node)
        for node in nodes
    }


def _tail(file: RegularFile, num_steps: int) -> tuple[list[dict[str, Any]], bool]:
    events: list[dict[str, Any]] = []
    steps: set[int] = set()
    line = file.line_before(file.end)
    least = max(0, file.end - _MOST_TAIL_BYTES)
    while line is not None and line.start >= least:
        event = _event(line)
        if event is not None:
            steps |= {event["step"]} if event["ph"] == "X" else set()
            # Steps overlap where generation runs ahead: a step's beginning may stand before the end
            # of the one before it, so two more are looked at than are wanted.
            if len(steps) > num_steps + 2:
                return events, False
            events.append(event)
        line = file.line_before(line.start)
    return events, line is not None


def _event(line: LogLine) -> dict[str, Any] | None:
    """Parse the task or the track's name on a line; None if it is a counter or damaged."""
    try:
        event: Any = json.loads(line.text.rstrip(b","))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("args"), dict):
        return None
    known = cast(dict[str, Any], event)
    whole = ("pid", "tid") if known.get("ph") == "M" else ("pid", "tid", "ts", "dur", "step")
    if known.get("ph") not in ("M", "X"):
        return None
    if not all(type(known.get(name)) is int and abs(known[name]) < 1 << 53 for name in whole):
        return None
    return {"step": -1, **known}
