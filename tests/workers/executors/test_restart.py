"""Groups that train nothing survive the death of a process, and the run is none the worse."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.executors.supervisor import Supervisor
from penstock.workers.weight_sync.registry import CHANNELS, DEFAULT_TRANSPORT, Transport

from ...algorithms import runs
from .backends import Backend

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class MortalSpec:
    """The worker kills its process at some of its rollouts, each once in all."""

    spec: Any
    folder: str
    fatal: tuple[int, ...] = (1, 4)

    def build(self, context: WorkerContext) -> Role:
        worker = self.spec.build(context)
        if "generate" in context.methods and "train" not in context.methods and context.rank == 1:
            generate, mark = worker.generate, Path(self.folder)

            def mortal(*args: Any, **kwargs: Any) -> Any:
                rollout = generate(*args, **kwargs)
                count = len(list(mark.glob("call-*")))
                (mark / f"call-{count}").touch()
                if count in self.fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return rollout

            worker.generate = mortal
        return worker


def finish(
    run: runs.Run,
    placement: Placement,
    executor: Executor,
    max_lag: int,
    num_offers: list[int] | None = None,
    **workers: Any,
) -> tuple[dict[str, str], list[StepResult]]:
    engine = Engine(
        run.graph,
        placement,
        workers={**run.workers, **workers},
        executor=executor,
        schedule=Schedule(max_lag=max_lag),
    )
    steps: list[StepResult] = []
    with engine:
        for step in engine.run(run.sources, 4):
            steps.append(step)
            if isinstance(executor, Supervisor) and num_offers is not None:
                num_offers.append(executor.num_offers)
        return {role: engine.call(role, "weights_sha256") for role in run.trained}, steps


@pytest.mark.parametrize("transport", CHANNELS)
def test_a_rollout_process_that_dies_loses_nothing_and_adds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, backend: Backend, transport: Transport
) -> None:
    check_that_nothing_is_lost(tmp_path, caplog, backend, transport, ())


def test_nor_does_one_that_shares_a_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spawned: Backend
) -> None:
    check_that_nothing_is_lost(tmp_path, caplog, spawned, DEFAULT_TRANSPORT, (0,))


def check_that_nothing_is_lost(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    backend: Backend,
    transport: Transport,
    main: tuple[int, ...],
) -> None:
    run = runs.make("grpo")
    here = replace(one_group(run.graph), num_chunks=2)
    expected, plain = finish(run, here, InProcess(), max_lag=1)

    names = [node.name for node in run.graph.nodes if node.name not in run.graph.sources]
    nodes = {name: "rollout" if name == "actor.generate" else "main" for name in names}
    groups = (DeviceGroup("main", devices=main), DeviceGroup("rollout", 2, devices=(0, 1)))
    apart = Placement(groups, nodes, num_chunks=2)
    mortal = MortalSpec(run.workers["actor"], str(tmp_path))
    executor = backend.executor(transport=transport)
    num_offers: list[int] = []
    found, steps = finish(run, apart, executor, max_lag=1, num_offers=num_offers, actor=mortal)

    assert found == expected
    assert [step.num_rows for step in steps] == [step.num_rows for step in plain]
    assert any(num_offers)
    assert max(num_offers) <= 2  # older snapshots are given up
    assert len(list(tmp_path.iterdir())) == 6  # of four steps, two again
    told = [r.getMessage() for r in caplog.records if r.name == "penstock.executor"]
    assert len(told) == 2
    assert all(text.startswith("rank 1 of group 'rollout' died: ") for text in told)
