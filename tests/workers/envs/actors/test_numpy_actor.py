"""Acting on the host: groups asked together get what they get alone, and copies follow."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.losses.actor_critic import ActorCriticLoss
from penstock.algorithms.roles.environment import ActionSpace, ActorCriticBatch
from penstock.dataflow.graph.role import LossSum
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors import actor_critic as torch_actor_critic
from penstock.workers.envs.actors.actor_critic import TorchActorCritic, TorchActorCriticSpec
from penstock.workers.envs.actors.numpy_actor import NumpyActor, NumpyRecurrent, OnHost
from penstock.workers.envs.actors.perceptron import ActorCriticNetwork, PerceptronSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.training.flat_parameters import FlatParameters
from penstock.workers.training.optimizer import OptimizerSpec
from torch import nn

SPACES = {
    "choices": ActionSpace("discrete", sizes=(5,)),
    "several": ActionSpace("discrete", sizes=(3, 2, 7)),
    "masked": ActionSpace("discrete", sizes=(4, 3), masked=True),
    "numbers": ActionSpace("continuous", low=(-1.0,) * 3, high=(1.0,) * 3),
}


def actor(actions: ActionSpace, num_features: int, width: int, units: int = 0) -> NumpyActor:
    spec = PerceptronSpec(hidden_sizes=(width, width), init_seed=3, recurrent_units=units)
    network = ActorCriticNetwork(spec, num_features, actions)
    with torch.no_grad():
        network.actor[-1].weight.mul_(100.0)  # pyright: ignore[reportArgumentType, reportCallIssue]
    held = None if network.memory is None else NumpyRecurrent(network.memory)
    return NumpyActor(network.actor, actions, network.log_std, held)


def call(
    random: Any, actions: ActionSpace, num_envs: int, num_features: int, units: int = 0
) -> Any:
    width = actions.num_components
    obs = random.standard_normal((num_envs, num_features)).astype(np.float32)
    noise = random.random((num_envs, width))
    if actions.kind == "continuous":
        noise = random.standard_normal((num_envs, width))
    held = None
    if units and random.random() < 0.7:
        held = random.standard_normal((num_envs, units)).astype(np.float32)
    if not actions.masked:
        return obs, noise, None, held
    mask = random.random((num_envs, actions.num_choices)) < 0.7
    mask[:, [0, 4]] = True
    return obs, noise, mask, held


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SPACES)),
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 17]), min_size=1, max_size=12),
    st.sampled_from([1, 4, 33]),
    st.sampled_from([8, 64, 100]),
    st.sampled_from([0, 1, 16, 33]),
    st.integers(0, 1000),
)
def test_company_changes_no_bit(
    kind: str, groups: list[int], num_features: int, width: int, units: int, seed: int
) -> None:
    actions, random = SPACES[kind], np.random.default_rng(seed)
    one = actor(actions, num_features, width, units)
    calls = [call(random, actions, num_envs, num_features, units) for num_envs in groups]
    for ours, arguments in zip(one.act_all(calls), calls, strict=True):
        alone = one.act(*arguments)
        assert ours.action.tobytes() == alone.action.tobytes()
        assert ours.logprob.tobytes() == alone.logprob.tobytes()
        assert (ours.recurrent_state is None) == (alone.recurrent_state is None) == (units == 0)
        if ours.recurrent_state is not None and alone.recurrent_state is not None:
            assert ours.recurrent_state.tobytes() == alone.recurrent_state.tobytes()
        assert ours.action.shape == (len(arguments[0]), actions.num_components)


def test_nobody_is_answered_nothing() -> None:
    assert actor(SPACES["choices"], 4, 8).act_all([]) == []


SPEC = TorchActorCriticSpec(env=EnvSpec(id="CartPole-v1"), optimizer=OptimizerSpec(lr=0.1))


def acts(worker: TorchActorCritic) -> np.ndarray:
    random = np.random.default_rng(0)
    obs = random.normal(size=(20, 4)).astype(np.float32)
    return worker.act(obs, random.random((20, 1)), None).logprob


def batch() -> ActorCriticBatch:
    random = torch.Generator().manual_seed(0)
    rows: Any = {"generator": random}
    return ActorCriticBatch(
        obs=torch.randn(4, 8, 4, **rows),
        action=torch.randint(0, 2, (4, 8, 1), **rows).float(),
        action_mask=torch.zeros(4, 8, 0, dtype=torch.bool),
        mask=torch.ones(4, 8, dtype=torch.bool),
        behavior_logprob=torch.full((4, 8), -0.7),
        advantage=torch.randn(4, 8, **rows),
        old_value=torch.zeros(4, 8),
        value_target=torch.randn(4, 8, **rows),
        recurrent_state=torch.zeros(4, 0),
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


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> TorchActorCritic:
    """Acts with a copy, as one on a GPU does."""
    with monkeypatch.context() as patch:
        patch.setattr(torch_actor_critic, "OnHost", partial(OnHost, always=True))
        return SPEC.build(WorkerContext("actor"))


def test_a_copy_follows_its_network(copied: TorchActorCritic) -> None:
    check_it_acts_as(copied, SPEC.build(WorkerContext("actor")), 0.0)


def test_a_change_while_the_copy_is_taken_is_not_missed() -> None:
    class Changing(FlatParameters):
        """Weights that another thread changes as soon as they have been read."""

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name != "data" or meanwhile.empty():
                return found
            meanwhile.get()
            before = found.clone()
            found.add_(1)
            host.is_stale = True
            return before

    meanwhile: SimpleQueue[None] = SimpleQueue()
    flat = Changing(module := nn.Linear(2, 2))
    host = OnHost(module, flat, always=True)
    meanwhile.put(None)
    host.is_stale = True
    host.follow()
    assert not torch.equal(host.module.weight, module.weight)
    host.follow()
    assert torch.equal(host.module.weight, module.weight)


def test_who_is_asked_during_training_does_not_keep_what_is_half_trained(
    copied: TorchActorCritic,
) -> None:
    class Asking(ActorCriticLoss):
        """Looks at what the actor would do, each time before the weights change."""

        def __call__(self, *args: Any) -> LossSum:
            acts(copied)
            return super().__call__(*args)

    plain = SPEC.build(WorkerContext("actor"))
    for worker, loss in ((copied, Asking()), (plain, ActorCriticLoss())):
        with call_scope(0, 0):
            worker.train(loss, batch())
    assert acts(copied).tobytes() == acts(plain).tobytes()


@pytest.mark.gpu
def test_a_network_on_a_gpu_acts_as_one_on_the_host() -> None:
    on_gpu = SPEC.build(WorkerContext("actor", device="cuda:0"))
    check_it_acts_as(on_gpu, SPEC.build(WorkerContext("actor")), 1e-4)
