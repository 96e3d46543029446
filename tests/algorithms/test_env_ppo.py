"""PPO in environments: the same by hand and as a graph, wherever it runs and whenever it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.algorithms.roles.environment import ActorCritic, Env, EnvRows
from penstock.dataflow.errors import PlanError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.eager import run_eagerly
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import build_role
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, flow_of, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.training.flat_parameters import tensors_sha256
from penstock.workers.training.optimizer import OptimizerSpec

CFG = EnvPPO(horizon=24, epochs=2, num_minibatches=2)
GRAPH = build(env_ppo_step, cfg=CFG)
SOURCES = {"rows": EnvRowSource(4, 2)}
CARTPOLE = EnvSpec(id="CartPole-v1")
SCALED = EnvSpec(id="Pendulum-v1", normalization=Normalization(observations=True, rewards=True))
STEPS = 6


def workers(env: EnvSpec = CARTPOLE) -> dict[str, WorkerSpec]:
    optimizer = OptimizerSpec(lr=1e-2, max_grad_norm=0.5)
    return {
        "env": EnvWorkerSpec(env=env),
        "actor": TorchActorCriticSpec(env=env, optimizer=optimizer),
    }


def placed(name: str) -> Placement:
    """Everything in one place, in two chunks, or with the environments on a group of their own."""
    nodes = dict(one_group(GRAPH).nodes)
    groups = (DeviceGroup("all"),)
    if name == "apart":
        groups = (*groups, DeviceGroup("acting"))
        nodes["env.rollout"] = "acting"
    return Placement(groups, nodes, num_chunks=1 if name == "together" else 2)


def trained(engine: Engine, **options: Any) -> tuple[str, int]:
    """The weights' hash after all steps, and how many steps it took to get there."""
    steps = list(engine.run(SOURCES, STEPS, **options))
    return engine.call("actor", "weights_sha256"), len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("env", [CARTPOLE, SCALED], ids=lambda env: env.id)
def test_by_hand_and_as_a_graph_bit_for_bit(env: EnvSpec) -> None:
    with Engine(GRAPH, one_group(GRAPH), workers=workers(env), seed=5) as engine:
        as_graph, _ = trained(engine)
    live: dict[str, Any] = {
        name: build_role(name, spec, WorkerContext(name, 5)) for name, spec in workers(env).items()
    }
    for _ in run_eagerly(env_ppo_step, SOURCES, STEPS, workers=live, seed=5, cfg=CFG):
        pass
    assert tensors_sha256(live["actor"].export_weights()) == as_graph


@pytest.mark.parametrize("max_lag", [0, 1])
def test_one_result_wherever_it_runs(max_lag: int) -> None:
    found = set()
    for name in ("together", "chunks", "apart"):
        schedule = Schedule(max_lag=max_lag)
        with Engine(GRAPH, placed(name), workers=workers(), schedule=schedule) as engine:
            found.add(trained(engine)[0])
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "name"), [(0, "together"), (1, "apart")])
def test_a_run_that_was_stopped_ends_the_same(max_lag: int, name: str, tmp_path: Path) -> None:
    def engine() -> Engine:
        schedule = Schedule(max_lag=max_lag)
        return Engine(GRAPH, placed(name), workers=workers(SCALED), schedule=schedule)

    with engine() as one:
        expected, _ = trained(one)
    store = CheckpointStore(tmp_path, keep=2)
    with engine() as stopped:
        run = stopped.run(SOURCES, STEPS, checkpoint_every=2, checkpoints=store)
        while next(run).step < 4:
            pass
        run.close()
    with engine() as resumed:
        found, num_steps = trained(resumed, checkpoint_every=2, checkpoints=store)
    assert found == expected
    assert num_steps == 2


def test_environments_have_one_home() -> None:
    def step(rows: EnvRows, env: Env, actor: ActorCritic, cfg: EnvPPO) -> Any:
        first = env.rollout(rows.env, rows.group, actor, horizon=cfg.horizon)
        second = env.rollout(rows.env, rows.group, actor, horizon=cfg.horizon)
        return first.reward, second.reward

    graph = build(step, cfg=CFG)
    nodes = {"env.rollout": "a", "env.rollout#2": "b"}
    said = r"role 'env' keeps state, but is asked on groups \['a', 'b'\]; its state has one home"
    with pytest.raises(PlanError, match=said):
        flow_of(graph, Placement((DeviceGroup("a"), DeviceGroup("b")), nodes))
