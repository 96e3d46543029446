"""Roles that other processes serve, with real processes."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.remote_inference import Array
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule

from ...dataflow.counter import seen
from ...dataflow.runtime import watched
from .backends import ON_RAY_AT_NIGHT, Backend

pytestmark = pytest.mark.slow


@ON_RAY_AT_NIGHT
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
    """Where it does not train, its process ends when it is asked, so many times in all."""

    folder: str
    deaths: int
    moves: bool = False

    def build(self, context: WorkerContext) -> Role:
        if "train" in context.methods:
            return watched.CountTeller()
        port = Path(self.folder) / "port"
        if self.moves and port.exists():
            # Where it listened another listens now; kept until the process ends.
            TAKEN.append(socket.create_server(("", int(port.read_text()))))
        return Mortal(self)


TAKEN: list[socket.socket] = []


class Mortal(watched.CountTeller):
    def __init__(self, spec: MortalSpec) -> None:
        super().__init__()
        self.spec = spec

    def tell(self, key: Array) -> watched.Told:
        folder = Path(self.spec.folder)
        count = len(list(folder.glob("death-*")))
        if self.weight > 0 and count < self.spec.deaths and key[0] % 2:
            listening = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
            if self.spec.moves:
                (folder / "port").write_text(str(max(c.laddr.port for c in listening)))
            (folder / f"death-{count}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tell(key)


@dataclass(frozen=True)
class AskerSpec:
    """Its process ends in the middle of asking, once."""

    folder: str

    def build(self, context: WorkerContext) -> Role:
        return MortalAsker(Path(self.folder) / "asker")


class MortalAsker(watched.AskingWatcher):
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def watch(self, key: Any, model: watched.Teller) -> Any:
        model.tell(np.array([0]))
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().watch(key, model)


def steps_with(backend: Backend, **workers: Any) -> list[StepResult]:
    engine = Engine(
        watched.WATCH,
        watched.placed("server"),
        workers={**watched.WORKERS, **workers},
        schedule=Schedule(deadline_s=60.0),
        executor=backend.executor(),
    )
    with engine:
        return list(engine.run(watched.SOURCES, 3))


EXPECTED = [100.0 * step + 1.5 for step in range(3)]


@ON_RAY_AT_NIGHT
def test_a_server_that_dies_is_asked_again(
    backend: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = steps_with(backend, model=MortalSpec(str(tmp_path), 2))
    assert seen(steps) == EXPECTED
    assert len(list(tmp_path.glob("death-*"))) == 2
    told = [r.getMessage() for r in caplog.records if r.name == "penstock.executor"]
    assert [text.partition(" died")[0] for text in told] == ["rank 0 of group 'server'"] * 2


def test_one_that_has_to_listen_elsewhere_is_found_there(
    spawned: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert seen(steps_with(spawned, model=MortalSpec(str(tmp_path), 1, moves=True))) == EXPECTED
    told = [r.getMessage() for r in caplog.records if r.name == "penstock.executor"]
    died = [text.partition(" died")[0] for text in told]
    assert died == ["rank 0 of group 'server'", "rank 0 of group 'watch'"]  # who waited in vain


def test_who_asks_may_die_as_well(spawned: Backend, tmp_path: Path) -> None:
    assert seen(steps_with(spawned, watcher=AskerSpec(str(tmp_path)))) == EXPECTED
    assert (tmp_path / "asker").exists()


@pytest.mark.nightly
def test_a_server_that_dies_of_every_question_is_named(spawned: Backend, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="rank 0 of group 'server' died: "):
        steps_with(spawned, model=MortalSpec(str(tmp_path), 100))
    assert len(list(tmp_path.glob("death-*"))) == 4
