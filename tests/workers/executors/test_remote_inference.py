"""Roles that other processes serve, with real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.remote_inference import Array
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule

from ...dataflow.counter import seen
from ...dataflow.runtime import watched
from .backends import Backend

pytestmark = pytest.mark.slow


def test_who_answers_changes_nothing(backend: Backend) -> None:
    max_lag = 1
    placement = watched.placed("server", num_ranks=2, num_servers=2)
    look = Program(watched.LOOK, watched.on(placement, watched.LOOK))
    engine = Engine(
        watched.WATCH,
        placement,
        workers=watched.WORKERS,
        schedule=Schedule(max_lag=max_lag, deadline_s=60.0),
        executor=backend.executor(),
        also={"look": look},
    )
    with engine:
        steps = list(engine.run(watched.SOURCES, 4))
        assert seen(steps) == [100.0 * max(0, step - max_lag) + 1.5 for step in range(4)]
        (looked,) = engine.run(watched.SOURCES, 1, program="look")
        assert looked.metrics["watcher.watch/mean"] == 401.5


@dataclass(frozen=True)
class MortalSpec:
    """Where it does not train, its process ends when it is asked after the first training."""

    def build(self, context: WorkerContext) -> Role:
        return watched.CountTeller() if "train" in context.methods else Mortal()


class Mortal(watched.CountTeller):
    def tell(self, key: Array) -> watched.Told:
        if self.weight > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tell(key)


def test_a_server_that_dies_is_named(spawned: Backend) -> None:
    engine = Engine(
        watched.WATCH,
        watched.placed("server"),
        workers={**watched.WORKERS, "model": MortalSpec()},
        schedule=Schedule(deadline_s=60.0),
        executor=spawned.executor(),
    )
    with engine:
        run = engine.run(watched.SOURCES, 3)
        next(run)
        with pytest.raises(WorkerError, match="calling 'model.tell' of group 'server' failed"):
            next(run)
