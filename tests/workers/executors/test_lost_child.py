"""A process whose own child has died counts as dead itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from killer import killing
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Recovered, Restart, Told, WorkerLost
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ...dataflow import counter
from .backends import Backend

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class ParentSpec:
    """A counter that needs a process of its own where `method` is asked for."""

    folder: str
    method: str

    def build(self, context: WorkerContext) -> counter.Counter:
        if self.method not in context.methods:
            return counter.Counter()
        return Parent(Path(self.folder) / "child", self.method)


class Parent(counter.Counter):
    def __init__(self, file: Path, method: str) -> None:
        super().__init__()
        code = "import sys; sys.stdin.read()"
        self.child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        self.file, self.method = file, method

    def sample(self, key: counter.Key) -> counter.Score:
        found = super().sample(key)
        if self.weight > 0 and self.method == "sample":
            self.work()
        return found

    def train(self, loss: object, batch: counter.Batch) -> counter.Metrics:
        if self.weight > 0 and self.method == "train":
            self.work()
        return super().train(counter.AnyLoss(), batch)

    def work(self) -> None:
        """What the child does; the first one dies of it."""
        if not self.file.exists():
            self.file.write_text(str(self.child.pid))
            self.child.wait(60)
        if self.child.poll() is not None:
            raise WorkerLost(f"its child ended with exit code {self.child.returncode}")

    def close(self) -> None:
        self.child.communicate(timeout=60)


def engine_of(backend: Backend, folder: Path, method: str, told: Told) -> Engine:
    return Engine(
        counter.COUNT,
        counter.apart(counter.COUNT, model__sample="rollout"),
        workers={"model": ParentSpec(str(folder), method)},
        schedule=Schedule(deadline_s=60.0),
        executor=backend.executor(),
        recovered=told,
    )


def pids(file: Path) -> list[int]:
    return [int(text)] if file.exists() and (text := file.read_text()) else []


def test_its_rank_is_started_again(
    spawned: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, restarts = tmp_path / "child", list[Recovered | Restart]()
    engine = engine_of(spawned, tmp_path, "sample", restarts.append)
    with engine, killing(lambda: pids(file), file.exists):
        steps = list(engine.run(counter.SOURCES, 3))
    assert counter.seen(steps) == [0.0, 1.0, 2.0]
    (restart,) = restarts
    assert isinstance(restart, Restart)
    assert (restart.group, restart.ranks) == ("rollout", (0,))
    (told,) = [r.getMessage() for r in caplog.records if r.name == "penstock.executor"]
    assert told == (
        "rank 0 of group 'rollout' died: its child ended with exit code -9; it is started again"
    )


def test_where_weights_are_lost_with_it_the_run_goes_back(spawned: Backend, tmp_path: Path) -> None:
    file, recovered = tmp_path / "child", list[Recovered | Restart]()
    engine = engine_of(spawned, tmp_path, "train", recovered.append)
    with engine, killing(lambda: pids(file), file.exists):
        store = CheckpointStore(tmp_path / "checkpoints")
        steps = list(engine.run(counter.SOURCES, 3, checkpoint_every=1, checkpoints=store))
    assert counter.seen(steps) == [0.0, 1.0, 2.0]
    (told,) = recovered
    assert isinstance(told, Recovered)
    assert told.said == "rank 0 of group 'main' died: its child ended with exit code -9"
    assert told.completed == 1
