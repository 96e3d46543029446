"""The last steps of a run's timeline, from the end of `trace.json`.

The file may hold hundreds of megabytes, so it is read backward, line by line, until enough steps
are complete. The names of the tracks stand where each was first met, mostly at the beginning, of
which a bounded part is read as well.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ..run_dir.run_files import read_object
from ..run_dir.run_folder import RunFolder, RunRecord
from .regular_file import Line, RegularFile, opened

_TRACE = "trace.json"
_HEAD_BYTES = 256 << 10
_MOST_TAIL_BYTES = 8 << 20
_MOST_SLICES = 4000


def timeline(home: Path, num_steps: int) -> dict[str, Any]:
    """The tasks of the last steps.

    Args:
        home: The stage's folder.
        num_steps: How many of the newest steps.

    Returns:
        `slices`, each with node, track, step, chunk, start and duration in seconds; `tracks`,
        which name a group and a rank; `begun_s`, when the first of them began, since the epoch;
        and whether some were left out.

    Raises:
        Gone: If there is no trace.json.
    """
    with opened(home / _TRACE) as file:
        events, is_cut = _tail(file, num_steps)
        names = _track_names(file) | _names([event for event in events if event["ph"] == "M"])
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
        "slices": [_slice(event, tracks, begun_us) for event in slices],
        "steps": steps,
        "begun_s": begun_us / 1e6,
        "is_cut": is_cut,
    }


def node_times(folder: RunFolder, record: RunRecord, shown: dict[str, Any]) -> dict[str, Any]:
    """Of each node what the plan predicted and what was measured, in seconds of a step.

    Args:
        folder: The run's folder.
        record: What its own files say.
        shown: What `timeline` said.

    Returns:
        Node -> `predicted_s`, `measured_s` (the median over the run, of one that has ended) and
        `last_s` (mean of the steps that are shown: the slowest rank's sum over chunks).
    """
    try:
        plan = read_object(folder.plan) or {}
    except ConfigError:
        plan = {}
    predicted = cast(dict[str, Any], (plan.get("prediction") or {}).get("nodes") or {})
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
    """How long the plan expects a step to take; None where nothing was predicted."""
    try:
        plan = read_object(folder.plan) or {}
    except ConfigError:
        return None
    value = (plan.get("prediction") or {}).get("step_time_s")
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
    """The events at the end of the file, the last one first, and whether too much was there."""
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


def _track_names(file: RegularFile) -> dict[int, str]:
    head = file.read(0, min(_HEAD_BYTES, file.end)).split(b"\n")[:-1]
    found = [_event(Line(0, 0, text)) for text in head if text.startswith(b'{"ph": "M"')]
    return _names([event for event in found if event is not None])


def _names(events: list[dict[str, Any]]) -> dict[int, str]:
    processes = [event for event in events if event.get("name") == "process_name"]
    return {event["pid"]: str(event["args"].get("name", "?")) for event in processes}


def _event(line: Line) -> dict[str, Any] | None:
    """The task or the track's name on a line; None if it is a counter or damaged."""
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


def _slice(event: dict[str, Any], tracks: list[tuple[int, int]], begun_us: int) -> dict[str, Any]:
    return {
        "node": str(event.get("name", "?")),
        "track": tracks.index((event["pid"], event["tid"])),
        "step": event["step"],
        "chunk": event["args"].get("chunk"),
        "start_s": (event["ts"] - begun_us) / 1e6,
        "duration_s": max(0, event["dur"]) / 1e6,
    }
