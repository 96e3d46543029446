"""Whole algorithms on the Megatron engine: three steps end with the torch engine's parameters.

Every process is real (Ray, gloo), and both engines train on what one torch policy samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerSpec
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec, MegatronValueSpec
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec, TorchValueSpec
from penstock.workers.executors.on_ray.executor import RayExecutor, connect_ray, shutdown_ray
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generator_policy import SplitPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec
from safetensors.torch import load_file
from torch import Tensor

from ...algorithms import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# A larger eps than usual: Adam blows up the rounding of gradients that are nearly zero.
OPTIMIZER = OptimizerSpec(lr=1e-3, eps=1e-5, max_grad_norm=0.3)
LAYOUTS = {"tp2": {"tensor_parallel": 2}, "pp2": {"pipeline_parallel": 2}, "dp2": {"num_ranks": 2}}
MICRO_BATCH_TOKENS = {"tp2": 50, "pp2": 90, "dp2": 4096}
"""Every layout cuts a step into a different number of micro-batches; the torch engine into one."""


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    connect_ray()
    yield
    shutdown_ray()


def model() -> ModelSpec:
    """Return a model whose vocabulary two processes can share, larger than the tokenizer's."""
    return ModelSpec(architecture={**runs.model().architecture, "vocab_size": 32})


def workers(run: runs.Run, tokens: int | None) -> Mapping[str, WorkerSpec]:
    """The run's workers: on torch, or on Megatron with micro-batches of that many tokens."""
    known = runs.model().architecture["vocab_size"]
    policy: dict[str, Any] = {"model": model(), "end_ids": (2,), "num_words": known}
    learn: dict[str, Any] = {"optimizer": OPTIMIZER}
    found: dict[str, WorkerSpec] = {**run.workers, "reward": runs.LengthRewardSpec()}
    if tokens is None:
        found["actor"], found["ref"] = TorchPolicySpec(**policy, **learn), TorchPolicySpec(**policy)
        found["critic"] = TorchValueSpec(model=model(), zero_init_head=False, **learn)
    else:
        cut: dict[str, Any] = {"micro_batch_tokens": tokens}
        trained = MegatronPolicySpec(**policy, **learn, **cut)
        found["actor"] = SplitPolicySpec(train=trained, rollout=TorchPolicySpec(**policy))
        found["ref"] = MegatronPolicySpec(**policy, **cut)
        found["critic"] = MegatronValueSpec(model=model(), zero_init_head=False, **learn, **cut)
    return {role: found[role] for role in run.graph.roles}


def learnt(
    run: runs.Run, placement: Placement, tokens: int | None, executor: Executor, folder: Path
) -> dict[str, Tensor]:
    """Parameters of all trained roles after three steps, by role and name."""
    found: dict[str, Tensor] = {}
    roles = workers(run, tokens)
    with Engine(run.graph, placement, workers=roles, executor=executor) as engine:
        assert len(list(engine.run(run.sources, 3))) == 3
        for role in run.trained:
            engine.call(role, "save_pretrained", folder / role)
            saved = load_file(folder / role / "model.safetensors")
            found |= {f"{role}/{name}": weight for name, weight in saved.items()}
    return found


@pytest.fixture(
    scope="module", params=[pytest.param("reference_grpo", marks=pytest.mark.nightly), "ppo"]
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[runs.Run, dict[str, Tensor]]:
    """A run, and what the torch engine has learnt at its end."""
    run = runs.make(request.param)
    folder = tmp_path_factory.mktemp("torch")
    return run, learnt(run, one_group(run.graph), None, InProcess(), folder)


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("pp2", "dp2"))]
)
def test_three_steps_end_with_the_torch_engines_parameters(
    tmp_path: Path, case: tuple[runs.Run, dict[str, Tensor]], layout: str
):
    run, expected = case
    sampling = ("actor.generate", "reward")
    nodes = {
        node.name: "rollout" if node.name.startswith(sampling) else "train"
        for node in run.graph.nodes
        if node.name not in run.graph.sources
    }
    train = dataclasses.replace(DeviceGroup("train"), **LAYOUTS[layout])
    placement = Placement((train, DeviceGroup("rollout")), nodes, num_chunks=train.num_ranks)
    found = learnt(run, placement, MICRO_BATCH_TOKENS[layout], RayExecutor(1), tmp_path)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    name = "model.layers.1.mlp.up_proj.weight"
    initial = model().causal_lm("cpu").state_dict()[name]
    # A hundred times the tolerance.
    assert float((found[f"actor/{name}"] - initial).abs().mean()) > 1e-3
