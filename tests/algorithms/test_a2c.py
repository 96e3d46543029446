"""A2C is PPO with one pass, one minibatch and advantages as they are, and IMPALA without lag.

Huang, Kanervisto et al., "A2C is a special case of PPO", 2022. The other side is A2C as it is
written: returns of n steps, and one step of torch's own Adam on its own loss.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.algorithms.impala import Impala, impala_step
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss, ReinforceLoss
from penstock.algorithms.losses.actor_critic import ActorCriticLoss
from penstock.algorithms.roles.environment import Trajectories
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.envs.actors.actor_critic import TorchActorCritic, TorchActorCriticSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorker, EnvWorkerSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

ENV = EnvSpec(id="CartPole-v1")
NUM_ENVS, HORIZON, UPDATES = 4, 5, 40
DISCOUNT, ENTROPY, VALUE = 0.99, 0.01, 0.5
LR, EPS, BETAS, CLIP = 7e-4, 1e-5, (0.0, 0.99), 0.5


def workers() -> tuple[EnvWorker, TorchActorCritic]:
    optimizer = OptimizerSpec(lr=LR, eps=EPS, betas=BETAS, max_grad_norm=CLIP)
    env = EnvWorkerSpec(env=ENV).build(WorkerContext("env"))
    actor = TorchActorCriticSpec(env=ENV, optimizer=optimizer).build(WorkerContext("actor"))
    return env, actor


def flat(actor: TorchActorCritic) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in actor.export_weights().values()])


def by_step(step_function: Any, cfg: Any) -> list[Tensor]:
    env, actor = workers()
    rows, found = EnvRowSource(NUM_ENVS, NUM_ENVS), list[Tensor]()
    for step in range(UPDATES):
        with step_scope(step):
            step_function(rows.batch(step), env, actor, cfg)
        found.append(flat(actor))
    return found


def n_step_returns(traj: Trajectories, value: Tensor, bootstrap: Tensor) -> Tensor:
    """f32[envs, T]: discounted rewards to the end of the episode or of the columns."""
    after = bootstrap
    returns = torch.zeros_like(value)
    for t in reversed(range(value.shape[1])):
        over = traj.terminated[:, t]
        if t + 1 < value.shape[1]:  # a time limit: the state it was left in stands one column later
            after = torch.where(traj.truncated[:, t], value[:, t + 1], after)
        after = traj.reward[:, t] + DISCOUNT * torch.where(over, 0.0, after)
        returns[:, t] = after
    return returns


def by_a2c() -> list[Tensor]:
    env, actor = workers()
    module: Any = actor.module
    optimizer = torch.optim.Adam(module.parameters(), lr=LR, eps=EPS, betas=BETAS)
    rows, found = EnvRowSource(NUM_ENVS, NUM_ENVS).batch(0), list[Tensor]()
    for step in range(UPDATES):
        with step_scope(step):
            traj = env.rollout(rows.env, rows.group, actor, horizon=HORIZON)
        value = module.critic(traj.obs)[..., 0]
        last = module.critic(traj.last_obs)[..., 0].detach()
        returns = n_step_returns(traj, value.detach(), last)
        chosen = torch.distributions.Categorical(logits=module.actor(traj.obs))
        gain = (returns - value.detach()) * chosen.log_prob(traj.action[..., 0])
        error = 0.5 * (returns - value).square()
        loss = (-gain + VALUE * error - ENTROPY * chosen.entropy())[traj.mask].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        found.append(flat(actor))
    return found


def a2c(**other: Any) -> EnvPPO:
    loss = ActorCriticLoss(
        policy=ClippedPolicyLoss(entropy_coef=ENTROPY),
        value=ClippedValueLoss(eps=None, coef=VALUE),
        normalize_advantages=False,
    )
    options: dict[str, Any] = {"epochs": 1, "num_minibatches": 1, "gae_lambda": 1.0, "loss": loss}
    return EnvPPO(horizon=HORIZON, discount=DISCOUNT, **{**options, **other})


def test_ppo_so_configured_has_the_weights_of_a2c() -> None:
    ours, its = by_step(env_ppo_step, a2c()), by_a2c()
    for ppo, direct in zip(ours, its, strict=True):
        assert torch.allclose(ppo, direct, rtol=0, atol=2e-5)
    assert float((ours[-1] - ours[0]).abs().max()) > 1e-3, "nothing was learned"


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"epochs": 2}, {"gae_lambda": 0.95}])
def test_with_other_options_it_is_not_a2c(other: dict[str, Any]) -> None:
    ours, its = by_step(env_ppo_step, a2c(**other)), by_a2c()
    assert float((ours[-1] - its[-1]).abs().max()) > 1e-3


def impala() -> Impala:
    return Impala(
        horizon=HORIZON,
        discount=DISCOUNT,
        policy_loss=ReinforceLoss(entropy_coef=ENTROPY),
        value_loss=ClippedValueLoss(eps=None, coef=VALUE),
    )


def test_impala_on_its_own_steps_has_the_weights_of_a2c() -> None:
    """With equal policies V-trace's targets are returns of n steps."""
    for ours, direct in zip(by_step(impala_step, impala()), by_a2c(), strict=True):
        assert torch.allclose(ours, direct, rtol=0, atol=2e-5)


def with_lag(max_lag: int) -> tuple[str, float]:
    """The hash of the weights that ten steps of a graph end with, and the last ratio."""
    graph = build(impala_step, cfg=impala())
    optimizer = OptimizerSpec(lr=0.01)
    specs = {
        "env": EnvWorkerSpec(env=ENV),
        "actor": TorchActorCriticSpec(env=ENV, optimizer=optimizer),
    }
    nodes = {node.name: "learner" for node in graph.nodes if node.role or node.function}
    placement = Placement(
        (DeviceGroup("learner"), DeviceGroup("actors")), {**nodes, "env.rollout": "actors"}
    )
    rows = {"rows": EnvRowSource(NUM_ENVS, NUM_ENVS)}
    with Engine(graph, placement, workers=specs, schedule=Schedule(max_lag=max_lag)) as engine:
        metrics = [step.metrics for step in engine.run(rows, 10)]
        return engine.call("actor", "weights_sha256"), metrics[-1]["actor.train/ratio_mean"]


def test_impala_corrects_for_steps_of_older_weights_and_repeats_itself() -> None:
    fresh, ratio = with_lag(0)
    assert ratio == pytest.approx(1, abs=1e-6)
    lagging, ratio = with_lag(1)
    assert abs(ratio - 1) > 1e-5
    assert lagging != fresh
    assert with_lag(1) == (lagging, ratio)
