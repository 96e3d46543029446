"""PPO whose critic, advantages and observations do not depend on the scale of rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.env_ppo import EnvPPO
from penstock.algorithms.impala import Impala
from penstock.algorithms.losses import ClippedValueLoss
from penstock.algorithms.losses.actor_critic import ActorCriticLoss
from penstock.algorithms.ops.value_transforms import percentile_scaled, two_hot_loss, value_bins
from penstock.algorithms.roles.environment import ActorCriticBatch, ActorCriticOutput
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TorchActorCritic, TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.live import Normalization, Normalizer
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.training.optimizer import OptimizerSpec

from .configured import configured
from .eager import check_eager_equals_graph

FLAGS = (
    "algorithm.cfg.loss.two_hot=true",
    "+model.architecture.value_bins=51",
    "algorithm.cfg.percentile_scaling=true",
    "algorithm.cfg.loss.normalize_advantages=false",
    "task.normalization.symlog=true",
)


def batch(target: float, rows: int = 6) -> ActorCriticBatch:
    zeros = torch.zeros(rows, 1)
    return ActorCriticBatch(
        obs=torch.randn(rows, 1, 4, generator=torch.Generator().manual_seed(0)),
        action=torch.zeros(rows, 1, 1),
        action_mask=torch.ones(rows, 1, 0, dtype=torch.bool),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        recurrent_state=torch.zeros(rows, 0),
        behavior_logprob=zeros,
        advantage=zeros,
        old_value=zeros,
        value_target=torch.full((rows, 1), target),
    )


def critic(bins: int | None) -> TorchActorCritic:
    return TorchActorCriticSpec(
        env=EnvSpec(id="CartPole-v1"),
        network=PerceptronSpec(hidden_sizes=(32,), value_bins=bins),
        optimizer=OptimizerSpec(lr=1e-2),
    ).build(WorkerContext("actor"))


@pytest.mark.slow
def test_with_all_flags_by_hand_equals_the_graph() -> None:
    check_eager_equals_graph(configured("env_ppo", *FLAGS))


def test_a_critic_of_weights_begins_with_zero() -> None:
    values = critic(255).value(torch.randn(2, 3, 4), torch.randn(2, 4))
    assert values.value.abs().max() < 1e-5
    assert values.bootstrap_value.shape == (2,)


@pytest.mark.slow
@pytest.mark.parametrize(("bins", "near"), [(255, True), (None, False)])
def test_it_learns_values_of_any_scale_in_as_many_updates(bins: int | None, near: bool) -> None:
    """300 updates bring a critic over bins to 5000; one that says its value gets nowhere near."""
    actor = critic(bins)
    loss = ActorCriticLoss(
        two_hot=bins is not None, value=ClippedValueLoss(eps=None), normalize_advantages=False
    )
    learned = batch(5000.0)
    for step in range(300):
        with step_scope(step):
            actor.train(loss, learned)
    found = actor.value(learned.obs, learned.obs[:, 0]).value
    assert (float((found / 5000 - 1).abs().max()) < 0.1) is near


def test_the_two_hot_loss_is_the_cross_entropy_times_coef() -> None:
    loss = ActorCriticLoss(two_hot=True, value=ClippedValueLoss(coef=0.25))
    logits = torch.randn(6, 1, 15)
    zeros = torch.zeros(6, 1)
    output = ActorCriticOutput(logprob=zeros, entropy=zeros, value=zeros, value_logits=logits)
    both = batch(3.0)
    total = loss(output, both, loss.totals(both)).total
    expected = 0.25 * two_hot_loss(logits, both.value_target, value_bins(15)).mean()
    assert float(total) == pytest.approx(float(expected))


def test_a_two_hot_loss_needs_weights() -> None:
    with pytest.raises(ValueError, match="give the network value_bins"), step_scope(0):
        critic(None).train(ActorCriticLoss(two_hot=True), batch(1.0))


@pytest.mark.parametrize("algorithm", ["env_ppo", "impala"])
def test_weights_need_a_two_hot_loss(algorithm: str) -> None:
    cfg = EnvPPO() if algorithm == "env_ppo" else Impala()
    with pytest.raises(ValueError, match="set algorithm.cfg.loss.two_hot=true"), step_scope(0):
        critic(15).train(cfg.loss, batch(1.0))


@pytest.mark.parametrize(("name", "who"), [("dqn", "a Q-network"), ("mappo", "a team's critic")])
def test_who_says_one_value_refuses_weights(name: str, who: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(name, "+model.architecture.value_bins=51")
    assert str(caught.value) == (
        f"{who} cannot weigh values (51 of them): its loss is a squared error\n"
        "    leave out model.architecture.value_bins; env_ppo, a2c, self_play and population have "
        "a loss for it, two_hot"
    )


def test_advantages_are_divided_by_the_spread_of_returns() -> None:
    mask = torch.ones(1, 101, dtype=torch.bool)
    returns = torch.arange(101.0)[None]
    found = percentile_scaled(mask, advantage=returns + 1, value_target=returns)
    assert torch.allclose(found.advantage, (returns + 1) / 90)
    assert torch.equal(found.value_target, returns)
    small = percentile_scaled(mask, advantage=returns, value_target=returns / 1000)
    assert torch.equal(small.advantage, returns)  # scaled down, never up
    nothing = percentile_scaled(~mask, advantage=returns, value_target=returns)
    assert not nothing.advantage.any()


def test_two_ways_of_scaling_advantages_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="turn one of them off"):
        EnvPPO(percentile_scaling=True)


def test_observations_are_squeezed() -> None:
    normalizer = Normalizer(Normalization(symlog=True), 1, 3)
    seen: Any = normalizer.obs(np.array([[-10.0, 0.0, 100.0]], np.float32))
    assert seen.dtype == np.float32
    assert np.allclose(seen, [[-2.397895, 0.0, 4.615121]])
