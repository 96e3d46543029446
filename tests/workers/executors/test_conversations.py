"""Conversations over processes that divide the model which speaks in them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from penstock.algorithms.agent_grpo import AgentGRPO, agent_grpo_step
from penstock.algorithms.roles import Sampling
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.agents.worker import AgentSpec
from penstock.workers.data.chat import TURNS
from penstock.workers.data.sources import PromptSource
from penstock.workers.data.task import task_alphabet
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec, TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rollout.generator_policy import SplitPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

from ...algorithms import runs
from ..echo_task import EchoSpec, EchoTask
from .backends import ON_RAY_AT_NIGHT, Backend
from .test_going_back import finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TASK = EchoSpec()
FATAL_TOKEN = 20
TOKENIZER = TokenizerSpec(kind="char", alphabet=task_alphabet(TASK.build()), chat_template=TURNS)


@dataclass(frozen=True)
class DyingSpec:
    """A generator one of whose processes kills itself once, while it computes a token."""

    spec: Any
    mark: str
    tensor_rank: int

    def build(self, context: WorkerContext) -> Role:
        worker: Any = self.spec.build(context)
        if context.tensor_rank == self.tensor_rank:
            network = worker.engine.network
            compute, calls = network.head, count(1)

            def head(states: Tensor) -> Tensor:
                if next(calls) == FATAL_TOKEN and not Path(self.mark).exists():
                    Path(self.mark).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                return compute(states)

            network.head = head
        return worker


class DeafTask(EchoTask):
    """Nothing answers."""

    def begin(self, index: int) -> Any:
        raise ValueError(f"no environment for {index}")


class DeafSpec(EchoSpec):
    """See `DeafTask`."""

    def build(self) -> DeafTask:
        return DeafTask(self)


def run_of(engine: str, task: EchoSpec = TASK) -> runs.Run:
    """GRPO on conversations with what an echo answers, trained by `engine`."""
    tokenizer = TOKENIZER.build()
    sizes = {"vocab_size": tokenizer.vocab_size, "num_key_value_heads": 4}
    fields = {**runs.model().architecture, **sizes, "max_position_embeddings": 128}
    own: dict[str, Any] = {
        "model": ModelSpec(architecture=fields),
        "end_ids": (tokenizer.eos_id,),
        "max_decode_rows": 16,
    }
    optimizer = OptimizerSpec(lr=1e-3)
    actor: Any = TorchPolicySpec(optimizer=optimizer, **own)
    if engine == "fsdp2":
        rollout = TorchGeneratorSpec(**own)
        del own["max_decode_rows"]
        train = FsdpPolicySpec(optimizer=optimizer, shards=2, **own)
        actor = SplitPolicySpec(train=train, rollout=rollout)
    cfg = AgentGRPO(
        sampling=Sampling(num_samples=4, max_new_tokens=6, max_total_tokens=48), max_turns=3
    )
    prompts = PromptSource(TASK.build(), tokenizer, batch_size=8, seed=0)
    agent = AgentSpec(task=task, tokenizer=TOKENIZER)
    return runs.Run(agent_grpo_step, cfg, {"prompts": prompts}, {"actor": actor, "agent": agent})


MAIN = {
    "fsdp2": DeviceGroup("main", tensor_parallel=2, devices=(0, 1)),
    "torch": DeviceGroup("main", 2, devices=(0, 1)),
}


def placed(run: runs.Run, engine: str, *, within: bool) -> Placement:
    """Two processes train, and on the same devices two that divide the model converse."""
    home = "main" if within else ""
    groups = MAIN[engine], DeviceGroup("rollout", tensor_parallel=2, devices=(0, 1), within=home)
    nodes = dict.fromkeys((n.name for n in run.graph.nodes if n.name != "prompts"), "main")
    return Placement(groups, {**nodes, "actor.converse": "rollout"}, num_chunks=2)


def found(
    run: runs.Run, placement: Placement, backend: Backend
) -> tuple[str, list[dict[str, float]]]:
    """The weights after some steps, and what was counted of their conversations."""
    executor = backend.executor()
    with Engine(run.graph, placement, workers=run.workers, executor=executor) as engine:
        steps = list(engine.run(run.sources, 3))
        weights = engine.call("actor", "weights_sha256")
    assert all(step.metrics["actor.train/rollout_logprob_max_diff"] < 1e-5 for step in steps)
    names = ("new_tokens", "heard", "reward/mean", "prefix_reused", "ended/last_turn")
    return weights, [
        {name: step.metrics[f"actor.converse/{name}"] for name in names} for step in steps
    ]


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("torch", marks=pytest.mark.nightly)])
@ON_RAY_AT_NIGHT
def test_processes_that_share_a_model_converse_as_one_does(backend: Backend, engine: str) -> None:
    run = run_of(engine)
    weights, counted = found(run, placed(run, engine, within=True), backend)
    assert found(run, placed(run, engine, within=False), backend) == (weights, counted)
    alone = replace(placed(run, engine, within=False).groups[1], tensor_parallel=1, devices=(0,))
    given = placed(run, engine, within=False)
    # Its sums are in another order, so tokens are the same and weights are not.
    assert found(run, replace(given, groups=(given.groups[0], alone)), backend)[1] == counted


@pytest.mark.parametrize("tensor_rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_death_of_either_process_changes_nothing(
    tmp_path: Path, spawned: Backend, tensor_rank: int
) -> None:
    run = run_of("fsdp2")
    given = placed(run, "fsdp2", within=True)
    plain = finish(run, given, spawned.executor())
    split: Any = run.workers["actor"]
    dying = DyingSpec(split.rollout, str(tmp_path / "mark"), tensor_rank)
    again = finish(
        *(run, given, spawned.executor()),
        folder=tmp_path / "checkpoints",
        actor=replace(split, rollout=dying),
    )
    assert (tmp_path / "mark").exists()
    assert again.weights == plain.weights
    assert len(again.told) == 1


def test_what_one_process_raises_ends_the_call_in_the_others(spawned: Backend) -> None:
    run = run_of("fsdp2", DeafSpec())
    since_s = time.monotonic()
    with pytest.raises(WorkerError, match="ValueError: no environment for"):
        found(run, placed(run, "fsdp2", within=True), spawned)
    assert time.monotonic() - since_s < Schedule().wait_s / 2
