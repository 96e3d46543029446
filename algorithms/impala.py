"""IMPALA: an actor and a critic trained on steps that somewhat older weights took.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018. V-trace weighs each step by how much likelier the weights to be trained are to
take it; `schedule.max_lag` says how much older those that took it may be. Losses are means over
steps where the paper has sums: Adam does not see the scale, but a bound on the gradient's norm, and
Adam's epsilon, do.
"""

from __future__ import annotations

from ..dataflow.options import Fraction, PositiveFloat, PositiveInt, option_class
from .losses.actor_critic import ActorCriticLoss
from .losses.tokens import ClippedValueLoss, ReinforceLoss
from .ops.returns import vtrace
from .options import train_actor_critic
from .roles import TrainMetrics
from .roles.environment import ActorCritic, Env, EnvRows


@option_class
class Impala:
    """Options of IMPALA."""

    horizon: PositiveInt = 20
    """Steps that every environment takes between updates."""
    discount: Fraction = 0.99
    """gamma, per step."""
    trace_lambda: Fraction = 1.0
    """lambda: how far later errors are carried back, besides the bounded ratios."""
    rho_bar: PositiveFloat = 1.0
    """Bound on the ratio of a step's own error, and of its advantage."""
    c_bar: PositiveFloat = 1.0
    """Bound on the ratio by which later errors are carried back."""
    policy_loss: ReinforceLoss = ReinforceLoss(entropy_coef=0.01)
    """The actor's, with the entropy bonus."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=None, coef=0.5)
    """The critic's, half a squared error times its `coef`."""

    @property
    def loss(self) -> ActorCriticLoss:
        """Both losses; advantages stay as V-trace has made them."""
        return ActorCriticLoss(
            policy=self.policy_loss, value=self.value_loss, normalize_advantages=False
        )


def impala_step(rows: EnvRows, env: Env, actor: ActorCritic, cfg: Impala) -> TrainMetrics:
    """Act, evaluate the actions by the weights to be trained, and train on V-trace's targets."""
    traj = env.rollout(rows.env, rows.group, actor, horizon=cfg.horizon)
    now = actor.evaluate(traj.obs, traj.action, traj.action_mask, traj.recurrent_state, traj.mask)
    values = actor.value(traj.obs, traj.last_obs, traj.recurrent_state, traj.mask)
    target = vtrace(
        traj.mask,
        reward=traj.reward,
        value=values.value,
        logprob=now.logprob,
        behavior_logprob=traj.behavior_logprob,
        bootstrap_value=values.bootstrap_value,
        terminated=traj.terminated,
        truncated=traj.truncated,
        discount=cfg.discount,
        lam=cfg.trace_lambda,
        rho_bar=cfg.rho_bar,
        c_bar=cfg.c_bar,
        policy_rho_bar=cfg.rho_bar,
    )
    return train_actor_critic(actor, traj, values, target, cfg.loss)
