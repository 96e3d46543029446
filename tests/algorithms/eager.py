"""A step function called by hand and the same function run as a graph, compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.algorithms.roles import TrainMetrics
from penstock.dataflow.graph.role import Role, Worker
from penstock.dataflow.runtime.eager import run_eagerly
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import build_role
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext

from .configured import Configured

NUM_STEPS = 5


def weights_of(worker: Worker) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in worker.export_weights().items()}


def exact(metrics: dict[str, float]) -> dict[str, str]:
    """Every bit of the numbers; nan equals nan."""
    return {name: value.hex() for name, value in sorted(metrics.items())}


def reported(nodes: Sequence[str], returned: Any) -> dict[str, float]:
    """What a step function returned, under the names an engine reports it by."""
    found: dict[str, float] = {}
    values = returned if isinstance(returned, tuple) else (returned,)
    for node, value in zip(nodes, values, strict=True):
        if isinstance(value, TrainMetrics):
            found |= {f"{node}/{name}": metric.value for name, metric in value.metrics.items()}
        else:
            found[f"{node}/mean"] = float(value.double().sum()) / value.numel()
    return found


def by_hand(run: Configured, live: dict[str, Role]) -> list[Any]:
    """The step function, called directly."""
    constants = {} if run.cfg is None else {"cfg": run.cfg}
    return list(run_eagerly(run.step, run.sources, NUM_STEPS, workers=live, **constants))


def check_eager_equals_graph(run: Configured) -> None:
    """Run the step both ways for `NUM_STEPS`, and compare every bit; all roles must have learnt."""
    executor = InProcess()
    engine = Engine(run.graph, one_group(run.graph), workers=run.workers, executor=executor)
    metrics = [step.metrics for step in engine.run(run.sources, NUM_STEPS)]
    live = {role: build_role(role, spec, WorkerContext(role)) for role, spec in run.workers.items()}
    initial = {role: weights_of(live[role]) for role in run.trained}
    returned = by_hand(run, live)
    assert len(metrics) == NUM_STEPS
    for by_engine, called in zip(metrics, returned, strict=True):
        expected = reported(run.graph.results, called)
        assert exact({name: by_engine[name] for name in expected}) == exact(expected)
    for role in run.trained:
        assert math.isfinite(metrics[-1].get(f"{role}.train/loss", 0.0))  # one may have none
        weights = weights_of(live[role])
        assert weights == weights_of(executor.role("all", role))
        assert weights != initial[role], "nothing was learned, so equality says nothing"
