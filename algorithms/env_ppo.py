"""Proximal policy optimization in environments.

Schulman et al., 2017, with the details of Huang et al., "The 37 Implementation Details of Proximal
Policy Optimization", 2022, whose numbers for classic control are the defaults. One thing differs
from their code: an episode that a time limit cuts off is bootstrapped with the value of its final
state, and the step that resets an environment is not trained on.

With `epochs` 1, `num_minibatches` 1 and advantages as they are it is A2C (Huang, Kanervisto et al.,
"A2C is a special case of PPO", 2022).
"""

from __future__ import annotations

from ..dataflow.options import Fraction, PositiveInt, option_class
from .losses.actor_critic import ActorCriticLoss
from .ops.value_transforms import percentile_scaled
from .options import gae_of, train_actor_critic
from .roles import TrainMetrics
from .roles.environment import ActorCritic, Env, EnvRows, Trajectories


@option_class
class EnvPPO:
    """Options of PPO in environments."""

    horizon: PositiveInt = 128
    """Steps that every environment takes between updates."""
    discount: Fraction = 0.99
    """gamma, per step."""
    gae_lambda: Fraction = 0.95
    """lambda of the advantage estimate; 0 trusts the critic fully, 1 not at all."""
    percentile_scaling: bool = False
    """Divide advantages by the distance between the 5th and the 95th percentile of the batch's
    value targets, where it is above 1. Instead of `loss.normalize_advantages`."""
    loss: ActorCriticLoss = ActorCriticLoss()
    """The actor's and the critic's."""
    epochs: PositiveInt = 4
    """Passes over the steps taken."""
    num_minibatches: PositiveInt = 4
    """Optimizer steps in a pass, each on as many steps sampled at random."""

    def __post_init__(self) -> None:
        if self.percentile_scaling and self.loss.normalize_advantages:
            raise ValueError(
                "percentile_scaling and loss.normalize_advantages both scale advantages; turn one "
                "of them off"
            )


def env_ppo_step(rows: EnvRows, env: Env, actor: ActorCritic, cfg: EnvPPO) -> TrainMetrics:
    """Act, estimate advantages, and train actor and critic."""
    traj = env.rollout(rows.env, rows.group, actor, horizon=cfg.horizon)
    return learn(traj, actor, cfg)


def learn(traj: Trajectories, actor: ActorCritic, cfg: EnvPPO) -> TrainMetrics:
    """Train on trajectories as PPO does; also for steps that make trajectories in another way."""
    values = actor.value(traj.obs, traj.last_obs, traj.recurrent_state, traj.mask)
    target = gae_of(traj, values, discount=cfg.discount, gae_lambda=cfg.gae_lambda)
    if cfg.percentile_scaling:
        target = percentile_scaled(
            traj.mask, advantage=target.advantage, value_target=target.value_target
        )
    return train_actor_critic(
        actor,
        traj,
        values,
        target,
        cfg.loss,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
    )
