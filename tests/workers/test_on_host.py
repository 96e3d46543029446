"""Acting on the host with weights that lie elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.env_losses import ActorCriticLoss
from penstock.algorithms.env_roles import ActorCriticBatch
from penstock.dataflow.context import call_scope
from penstock.dataflow.worker import WorkerContext
from penstock.workers import torch_actor_critic
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.on_host import OnHost
from penstock.workers.optimizer import OptimizerSpec
from penstock.workers.torch_actor_critic import TorchActorCritic, TorchActorCriticSpec

SPEC = TorchActorCriticSpec(env=EnvSpec(id="CartPole-v1"), optimizer=OptimizerSpec(lr=0.1))


def acts(worker: TorchActorCritic) -> np.ndarray:
    random = np.random.default_rng(0)
    obs = random.normal(size=(20, 4)).astype(np.float32)
    return worker.act(obs, random.random((20, 1)), None).logprob


def batch() -> ActorCriticBatch:
    draw = torch.Generator().manual_seed(0)
    rows: Any = {"generator": draw}
    return ActorCriticBatch(
        obs=torch.randn(4, 8, 4, **rows),
        action=torch.randint(0, 2, (4, 8, 1), **rows).float(),
        action_mask=torch.zeros(4, 8, 0, dtype=torch.bool),
        mask=torch.ones(4, 8, dtype=torch.bool),
        behavior_logprob=torch.full((4, 8), -0.7),
        advantage=torch.randn(4, 8, **rows),
        old_value=torch.zeros(4, 8),
        value_target=torch.randn(4, 8, **rows),
        memory=torch.zeros(4, 0),
    )


def check_it_acts_as(copied: TorchActorCritic, plain: TorchActorCritic, atol: float) -> None:
    def same() -> bool:
        return bool(np.allclose(acts(copied), acts(plain), atol=atol, rtol=0))

    before = acts(copied)
    assert same()
    for worker in (copied, plain):
        with call_scope(0, 0):
            worker.train(ActorCriticLoss(), batch())
    assert same()
    assert not np.allclose(acts(copied), before, atol=1e-3)
    for worker in (copied, plain):
        worker.load_weights({n: w + 0.5 for n, w in worker.export_weights().items()})
    after = acts(copied)
    assert same()
    assert not np.allclose(after, before, atol=1e-3)
    for worker in (copied, plain):  # as another process's weights are written
        for tensor in worker.local_tensors().values():
            tensor.mul_(2)
        worker.weights_changed()
    assert same()
    assert not np.allclose(acts(copied), after, atol=1e-3)


def test_a_copy_follows_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # as they are from a GPU
        patch.setattr(torch_actor_critic, "OnHost", partial(OnHost, always=True))
        copied = SPEC.build(WorkerContext("actor"))
    check_it_acts_as(copied, SPEC.build(WorkerContext("actor")), 0.0)


@pytest.mark.gpu
def test_a_network_on_a_gpu_acts_as_one_on_the_host() -> None:
    on_gpu = SPEC.build(WorkerContext("actor", device="cuda:0"))
    check_it_acts_as(on_gpu, SPEC.build(WorkerContext("actor")), 1e-4)
