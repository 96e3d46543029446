"""What the page says of one run: state, code, placement, evaluations, rewards, lag, memory.

Each part is read from the file that holds it. A part whose file is not there, or cannot be read, is
absent, and a line says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ..run_dir.evaluations import Evaluations
from ..run_dir.events import stage_events
from ..run_dir.run_files import read_object
from ..run_dir.run_folder import RunFolder, RunRecord
from ..run_dir.run_state import state_of
from .curve_points import last_values

_MOST_EVALUATIONS = 50
_MOST_WARNINGS = 50
_LAG = re.compile(r"lag|stale|version", re.IGNORECASE)
_RESTARTS = re.compile(r"restart|error|timeout|dropped|skipped|truncated", re.IGNORECASE)
_OF_SUMMARY = frozenset({"examples_after", "examples_before", "nodes", "suites"})
"""Entries of summary.json that have a part of their own, or are as long as a page."""


def overview(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """Everything the page says of a run, part by part.

    Args:
        folder: The run's folder.
        record: What its own files say.

    Returns:
        Part's name -> what it holds, or `{"absent": why}`.
    """
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
    return {name: _part(read) for name, read in parts.items()}


def _part(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (ConfigError, OSError) as error:
        return {"absent": str(error).split("\n")[0]}
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        return {"absent": f"what its files say of it is damaged ({type(error).__name__})"}


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
    """The newest numbers: of rewards and their parts, of lag, and of what went wrong."""
    found = last_values(folder.path)
    if found is None:
        return {"absent": "it has not taken a step yet"}
    step, values = found
    rewards = {name: value for name, value in values.items() if "reward" in name.lower()}
    faults = {name: value for name, value in values.items() if _RESTARTS.search(name)}
    lags = {name: value for name, value in values.items() if _LAG.search(name)}
    speed = {name: value for name, value in values.items() if name.startswith("run/")}
    return {"step": step, "rewards": rewards, "lag": lags, "faults": faults, "speed": speed}


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
    """What the plan expects each group's fullest device to hold, and what was measured.

    Raises:
        ConfigError: If plan.json cannot be read.
    """
    plan = read_object(folder.plan) or {}
    predicted = cast(dict[str, Any], (plan.get("prediction") or {}).get("memory") or {})
    groups = {name: _group_memory(group) for name, group in predicted.items()}
    measured = (record.summary or {}).get("peak_memory_bytes")
    if not groups and measured is None:
        return {
            "absent": "its plan was not predicted, and what was used is written at the end",
        }
    return {"groups": groups, "peak_memory_bytes": measured}


def _group_memory(group: Mapping[str, Any]) -> dict[str, Any]:
    """As `planner.plan.prediction.GroupMemory` has it, without importing the planner."""
    resident = {role: sum(parts.values()) for role, parts in group["resident_bytes"].items()}
    transient = {call: sum(parts.values()) for call, parts in group["transient_bytes"].items()}
    return {
        "resident_bytes": resident,
        "transient_bytes": transient,
        "peak_bytes": sum(resident.values()) + max(transient.values(), default=0),
        "capacity_bytes": group["capacity_bytes"],
    }


def _warnings(folder: RunFolder) -> dict[str, Any]:
    """The newest warnings of signs that it goes wrong, stage by stage."""
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
    """When it was resumed with other values, and what it says of itself at the end."""
    summary: Mapping[str, Any] = record.summary or {}
    restarts = {name: value for name, value in summary.items() if _RESTARTS.search(name)}
    return {
        "changes": list(record.changes),
        "resumed": summary.get("resumed"),
        "stopped": summary.get("stopped"),
        "restarts": restarts,
    }
