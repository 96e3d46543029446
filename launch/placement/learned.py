"""What a run has measured of its own plan, as a calibration for the next.

A run's folder holds the plan with what each call was predicted to take, and the summary with what
it took. The constants of that prediction are kept, and what a kind of call took instead of what was
predicted becomes its correction (`Constants.corrections`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ...dataflow.errors import PlanError
from ...planner.cost.calibration import Calibration
from ...planner.inputs.calls import CallKind
from ...planner.inputs.cluster import ClusterSpec
from ...planner.plan.plan import Plan
from ...workers.executors.registry import PARALLEL_EXECUTOR
from ..inputs.compose import check_calibration
from ..run_dir.run_files import optional_field, parse_object, parsed
from ..run_dir.run_folder import RunFolder
from .machine import machine_name, threads_of


def read_calibration(path: Path) -> Calibration:
    """The calibration of a file, or what the run of a folder has measured.

    Raises:
        PlanError: If the file is no calibration, or the run was not planned or has not ended.
    """
    if not path.is_dir():
        return Calibration.read(path)
    check_calibration(path)
    folder = RunFolder(path)
    plan = Plan.read(folder.plan)
    prediction, cluster = plan.prediction, plan.cluster
    if prediction is None or prediction.constants is None or not isinstance(cluster, ClusterSpec):
        raise _unusable(path, "its plan predicts nothing", "take a run that the planner has placed")
    constants = prediction.constants
    factors = _factors(prediction.durations_s, _measured(folder))
    if not factors:
        raise _unusable(path, "no predicted call was measured", "take a run that made a step")
    known = constants.corrections
    corrections = dict(known) | {kind: known.get(kind, 1.0) * f for kind, f in factors.items()}
    learned = constants.replaced(corrections=corrections, source=f"learned from {path.name}")
    first = cluster.node_groups[0]
    return Calibration(
        cluster=cluster,
        constants=learned,
        num_threads=threads_of(first.devices_per_node),
        executor=PARALLEL_EXECUTOR,
        machine=machine_name(cluster.device_type),
        date=datetime.fromtimestamp(folder.summary.stat().st_mtime, UTC).date().isoformat(),
    )


def _measured(folder: RunFolder) -> Mapping[str, float]:
    """Node -> seconds."""
    found = parsed(folder.summary, _seconds)
    if found is None:
        raise _unusable(folder.path, "the run has not ended", "wait for it, or take another")
    return found


def _seconds(summary: bytes) -> dict[str, float]:
    nodes = optional_field(parse_object(summary), "nodes", dict) or {}
    found = {name: optional_field(node, "measured_s", float) for name, node in nodes.items()}
    return {name: seconds for name, seconds in found.items() if seconds and seconds > 0}


def _factors(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[CallKind, float]:
    """Kind of call -> geometric mean of measured over predicted."""
    logs: dict[CallKind, list[float]] = {}
    for name, seconds in measured.items():
        if predicted.get(name):
            logs.setdefault(_kind(name), []).append(math.log(seconds / predicted[name]))
    return {kind: math.exp(sum(found) / len(found)) for kind, found in logs.items()}


def _kind(node: str) -> CallKind:
    """By the method of the role: `actor.train#2` trains."""
    method = node.rpartition(".")[2].partition("#")[0]
    if method == "train":
        return "train"
    return "generate" if method == "generate" else "forward"


def _unusable(path: Path, why: str, fix: str) -> PlanError:
    return PlanError(f"calibration {path}: {why}\n    {fix}")
