"""Where acting happens is the plan's choice, and nothing else: weights and schedule stay the same.

With real processes, several workers, and delays that nobody can foresee.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Executor, Recovery
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.overlapped_groups import NumOverlapped
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.training.optimizer import OptimizerSpec
from safetensors.torch import load_file

from ..executors.spawned import SpawnedBackend, SpawnedExecutor

CFG = EnvPPO(horizon=16, epochs=2, num_minibatches=2)
GRAPH = build(env_ppo_step, cfg=CFG)
SOURCES = {"rows": EnvRowSource(8, 2)}
CARTPOLE = EnvSpec(id="CartPole-v1")
STEPS = 4

Order = Literal["step", "arrival"]
Found = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Delayed:
    """Now and then lets a call of the worker it wraps wait, for a time that nobody can foresee."""

    spec: Any
    methods: tuple[str, ...]
    random_s: float
    least_s: float = 0.0

    def build(self, context: WorkerContext) -> Role:
        worker = self.spec.build(context)
        for name in self.methods:
            setattr(worker, name, self._delayed(getattr(worker, name)))
        return worker

    def _delayed(self, method: Any) -> Any:
        system = random.SystemRandom()

        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.least_s)
            if system.random() < 0.3:
                time.sleep(system.random() * self.random_s)
            return method(*args, **kwargs)

        return call


@dataclass(frozen=True)
class Mortal:
    """The worker's process ends when it is trained for the fourth time, unless `mark` exists.

    That is once the checkpoint before the third is complete: its ranks are asked for it in the
    third, which is long, and answer before the fourth.
    """

    spec: Any
    mark: str

    def build(self, context: WorkerContext) -> Role:
        worker = self.spec.build(context)
        train = worker.train
        count = 0

        def mortal(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            mark, until = Path(self.mark), time.monotonic() + 60.0
            if count >= 3 and not mark.exists():
                time.sleep(1.0)
                if count == 4:
                    while not list(mark.parent.glob("checkpoints/step-*[0-9]")):
                        assert time.monotonic() < until, "there was no checkpoint"
                        time.sleep(0.01)
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return train(*args, **kwargs)

        worker.train = mortal
        return worker


def workers(
    num_overlapped: NumOverlapped = 1,
    random_s: float = 0.0,
    least_s: float = 0.0,
    recurrent_units: int = 0,
    env: EnvSpec = CARTPOLE,
) -> dict[str, Any]:
    actor = TorchActorCriticSpec(
        env=env,
        network=PerceptronSpec(recurrent_units=recurrent_units),
        optimizer=OptimizerSpec(lr=1e-2, max_grad_norm=0.5),
    )
    steps = EnvWorkerSpec(env=env, num_overlapped=num_overlapped)
    if not random_s:
        return {"env": steps, "actor": actor}
    return {
        "env": Delayed(steps, ("rollout",), 10 * random_s, least_s),
        "actor": Delayed(actor, ("act", "answer_all", "value", "train"), random_s),
    }


def placed(server: str, num_workers: int, num_trainers: int = 1) -> Placement:
    """Acting inline in the only group, decoupled from it, or served by it or by another."""
    acting = {"inline": "main", "decoupled": "acting"}.get(server, "acting")
    served = {"actor": server} if server in ("main", "policy") else {}
    groups = [DeviceGroup("main", num_trainers)]
    if acting == "acting":
        groups.append(DeviceGroup("acting", num_workers, served=served))
    if server == "policy":
        groups.append(DeviceGroup("policy"))
    nodes = {"env.rollout": acting} | {
        node.name: "main"
        for node in GRAPH.nodes
        if node.name not in (*GRAPH.sources, "env.rollout")
    }
    return Placement(tuple(groups), nodes, num_chunks=max(2, num_workers))


def schedule_of(steps: list[StepResult]) -> tuple[Any, ...]:
    spans = [span for step in steps for span in step.spans]
    return tuple(sorted((span.node, span.step, span.chunk or 0, span.versions) for span in spans))


def finish(
    executor: Executor,
    server: str,
    max_lag: int,
    *,
    num_workers: int = 1,
    order: Order = "step",
    **options: Any,
) -> Found:
    """Weights after all steps, and the schedule."""
    engine = Engine(
        GRAPH,
        placed(server, num_workers),
        workers=workers(**options),
        schedule=Schedule(max_lag=max_lag, order=order, deadline_s=120.0),
        executor=executor,
        seed=3,
    )
    with engine:
        steps = list(engine.run(SOURCES, STEPS))
        return engine.call("actor", "weights_sha256"), schedule_of(steps)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], Found]:
    """By lag and the actor's recurrent units: what one process with one worker does."""
    return {
        (max_lag, units): finish(InProcess(), "inline", max_lag, recurrent_units=units)
        for max_lag, units in ((0, 0), (1, 0), (1, 8))
    }


@pytest.mark.parametrize("server", ["decoupled", "main", "policy"])
@pytest.mark.parametrize(
    ("max_lag", "num_overlapped", "units"), [(0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0), (1, 2, 8)]
)
def test_in_one_process(
    server: str, max_lag: int, num_overlapped: int, units: int, expected: dict[Any, Found]
) -> None:
    options: dict[str, Any] = {"num_overlapped": num_overlapped, "recurrent_units": units}
    assert finish(InProcess(), server, max_lag, **options) == expected[max_lag, units]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "max_lag", "num_workers", "units"),
    [
        ("decoupled", 0, 2, 0),
        ("decoupled", 1, 1, 0),
        ("main", 0, 1, 0),
        ("main", 1, 2, 0),
        ("policy", 0, 1, 0),
        ("policy", 1, 2, 0),
        ("policy", 1, 2, 8),
    ],
)
def test_in_processes_of_their_own(
    server: str,
    max_lag: int,
    num_workers: int,
    units: int,
    expected: dict[Any, Found],
    apart: SpawnedBackend,
) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "num_overlapped": 2, "random_s": 0.01}
    found = finish(SpawnedExecutor(apart, 1), server, max_lag, recurrent_units=units, **options)
    assert found == expected[max_lag, units]


@pytest.mark.slow
def test_two_trainers_learn_from_three_workers_what_one_does(
    tmp_path: Path, apart: SpawnedBackend
) -> None:
    """Gradients of two ranks are added up: the same up to rounding."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, executor, placement in (
        ("one", InProcess(), placed("inline", 1)),
        ("several", SpawnedExecutor(apart, 1), placed("policy", 3, 2)),
    ):
        engine = Engine(
            GRAPH,
            placement,
            workers=workers(),
            schedule=Schedule(max_lag=1, deadline_s=120.0),
            executor=executor,
            seed=3,
        )
        with engine:
            assert len(list(engine.run(SOURCES, STEPS))) == STEPS
            engine.call("actor", "save_pretrained", tmp_path / name)
        found[name] = load_file(tmp_path / name / "model.safetensors")
    torch.testing.assert_close(found["several"], found["one"], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_in_order_of_arrival_it_is_another_run(
    expected: dict[Any, Found], apart: SpawnedBackend
) -> None:
    """The control: whatever weights are there. By the second chunk they are newer."""
    options: dict[str, Any] = {"order": "arrival", "random_s": 0.01, "least_s": 0.7}
    found = finish(SpawnedExecutor(apart, 1), "decoupled", 1, **options)
    assert found[1] != expected[1, 0][1]
    assert found[0] != expected[1, 0][0]


@pytest.mark.slow
def test_killed_and_resumed_it_ends_the_same(
    expected: dict[Any, Found], tmp_path: Path, apart: SpawnedBackend
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    given = workers(num_overlapped=2)

    def engine(executor: Executor) -> Engine:
        return Engine(
            GRAPH,
            placed("policy", 2 if isinstance(executor, SpawnedExecutor) else 1),
            workers={**given, "actor": Mortal(given["actor"], str(tmp_path / "died"))},
            schedule=Schedule(max_lag=1, deadline_s=120.0),
            executor=executor,
            seed=3,
            recovery=Recovery(max_restarts=0),
        )

    saving: dict[str, Any] = {"checkpoint_every": 2, "checkpoints": store}
    with engine(SpawnedExecutor(apart, 1)) as killed, pytest.raises(WorkerError, match="died"):
        list(killed.run(SOURCES, STEPS, **saving))
    with engine(InProcess()) as resumed:
        steps = list(resumed.run(SOURCES, STEPS, **saving))
        assert [step.step for step in steps] == [2, 3]
        assert resumed.call("actor", "weights_sha256") == expected[1, 0][0]
