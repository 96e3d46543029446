"""IMPALA: an actor and a critic trained on steps that somewhat older weights took.

Espeholt et al., "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures", 2018. V-trace weighs each step by how much likelier the weights to be trained are to
take it; `schedule.max_lag` says how much older those that took it may be. Losses are means over
steps where the paper has sums: Adam does not see the scale, but a bound on the gradient's norm, and
Adam's epsilon, do.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.option_checks import check_range
from .losses import ClippedValueLoss, ReinforceLoss
from .losses.actor_critic import ActorCriticLoss
from .ops.returns import vtrace
from .options.env_updates import train_actor_critic
from .roles import TrainMetrics
from .roles.environment import ActorCritic, Env, EnvRows


@dataclass(frozen=True, kw_only=True)
class Impala:
    """Options of IMPALA."""

    horizon: int = 20
    """Steps that every environment takes between updates."""
    discount: float = 0.99
    """gamma, per step."""
    trace_lambda: float = 1.0
    """lambda: how far later errors are carried back, besides the bounded ratios."""
    rho_bar: float = 1.0
    """Bound on the ratio of a step's own error, and of its advantage."""
    c_bar: float = 1.0
    """Bound on the ratio by which later errors are carried back."""
    policy_loss: ReinforceLoss = ReinforceLoss(entropy_coef=0.01)
    """The actor's, with the entropy bonus."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=None, coef=0.5)
    """The critic's, half a squared error times its `coef`."""

    def __post_init__(self) -> None:
        check_range(self, "horizon", at_least=1)
        check_range(self, "discount", "trace_lambda", at_least=0, at_most=1)
        check_range(self, "rho_bar", "c_bar", above=0)

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
