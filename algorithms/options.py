"""Groups of options that several algorithms share, each with what it makes of them in a step.

They serve steps that train on their own rollouts, those with a KL to a frozen reference, those that
compare pairs of responses, and those in environments. What a single algorithm decides stands in its
own file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ..dataflow.graph.role import Loss
from ..dataflow.options import NonNegativeFloat, PositiveInt, option_class
from .losses.sequence import ComparedPairBatch, PairLoss
from .ops.groups import finished_tokens, scored_tokens
from .ops.kl import response_kl
from .ops.returns import GaeTargets, gae
from .ops.rewards import kl_penalized_score
from .ops.rollout_correction import RolloutCorrection, corrected_batch
from .roles.environment import (
    ActorCritic,
    ActorCriticBatch,
    ActorCriticOutput,
    Trajectories,
    Values,
)
from .roles.language import Policy
from .roles.language_tables import (
    PerSample,
    PerToken,
    PolicyOutput,
    Rollout,
    Sampling,
    TrainMetrics,
)

B = TypeVar("B")
R = TypeVar("R", bound=Rollout)


class SampledUpdates(Protocol):
    """The options of every step that samples responses and trains on them."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def epochs(self) -> int: ...

    @property
    def num_minibatches(self) -> int: ...


@option_class
class PolicyUpdates:
    """Options of a step whose loss is proportional to the advantages of tokens."""

    sampling: Sampling = Sampling(max_new_tokens=53)
    """Sampling of the responses."""
    correction: RolloutCorrection | None = None
    """Importance weights for an engine that samples with other numbers than the trainer's."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    finished_only: bool = False
    """Leave responses that were cut off out of the policy's loss, though not out of their group."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()


def check_groups(options: SampledUpdates) -> None:
    """Require several samples per prompt, for steps that compare them with each other.

    Raises:
        ValueError: If there is only one.
    """
    if options.sampling.num_samples < 2:
        raise ValueError(
            f"sampling.num_samples is {options.sampling.num_samples}, but {type(options).__name__} "
            "compares samples of one prompt with each other; set it to 2 or more"
        )


def scored_rows(roll: R, score: PerSample) -> R:
    """Return the rows with empty masks where there is no score; see `scored_tokens`."""
    return replace(roll, mask=scored_tokens(roll.mask, score))


def learned_rows(roll: R, cfg: PolicyUpdates) -> R:
    """Return the rows as the policy learns from them; see `PolicyUpdates.finished_only`."""
    if not cfg.finished_only:
        return roll
    return replace(roll, mask=finished_tokens(roll.mask, roll.finished))


def train_on(
    actor: Policy, loss: Loss[B, PolicyOutput], batch: B, cfg: SampledUpdates
) -> TrainMetrics:
    """Train a policy at the temperature that its rollouts were sampled at."""
    return actor.train(
        loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=cfg.sampling.temperature,
    )


def train_policy(
    actor: Policy,
    roll: Rollout,
    advantage: PerToken,
    loss: Loss[Any, PolicyOutput],
    cfg: PolicyUpdates,
    *,
    ref_logprob: PerToken | None = None,
) -> TrainMetrics:
    """Train a policy on its rollouts and their advantages, corrected as `cfg` says.

    `loss` reads a `PolicyBatch`, or a `ReferencePolicyBatch` if there is a `ref_logprob`.
    """
    roll = learned_rows(roll, cfg)
    batch = corrected_batch(
        actor, roll, advantage, cfg.correction, cfg.sampling.temperature, ref_logprob
    )
    return train_on(actor, loss, batch, cfg)


def reference_logprob(
    ref: Policy, roll: Rollout, kl_coef: float, temperature: float
) -> PerToken | None:
    """The reference's log-probability of every sampled token.

    With `kl_coef` 0 the reference is not asked, and this is None: a graph recorded so has no such
    role.
    """
    if kl_coef == 0:
        return None
    return ref.logprob(roll.tokens, roll.mask, temperature=temperature)


def reported_kl(roll: Rollout, ref_logprob: PerToken | None) -> PerSample | None:
    """Each response's summed KL to the reference, for the log; None where there is none."""
    if ref_logprob is None:
        return None
    return response_kl(roll.mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob)


def score_less_kl(
    score: PerSample, roll: Rollout, ref: Policy, kl_coef: float, temperature: float
) -> PerSample:
    """The score minus `kl_coef` times the response's summed KL; see `reference_logprob`."""
    kl = reported_kl(roll, reference_logprob(ref, roll, kl_coef, temperature))
    return score if kl is None else kl_penalized_score(score, kl=kl, kl_coef=kl_coef)


@option_class
class PairUpdates:
    """Options of such steps.

    There is no `correction`: its weights are put on advantages of tokens, which a loss of pairs has
    not.
    """

    sampling: Sampling = Sampling(num_samples=2, max_new_tokens=53)
    """Sampling of the responses, two per prompt."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    kl_coef: NonNegativeFloat = 0.05
    """Score taken per nat of a response's KL to the reference; with 0 there is no reference."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        if self.sampling.num_samples != 2:
            raise ValueError(
                f"sampling.num_samples is {self.sampling.num_samples}, but "
                f"{type(self).__name__} compares exactly two samples of a prompt; set it to 2"
            )


def train_on_pairs(
    actor: Policy, roll: Rollout, score: PerSample, loss: PairLoss, cfg: PairUpdates
) -> TrainMetrics:
    """Train a policy on pairs of its rollouts and their scores."""
    batch = ComparedPairBatch(
        prompt_id=roll.prompt_id,
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        score=score,
    )
    return train_on(actor, loss, batch, cfg)


def gae_of(traj: Trajectories, values: Values, *, discount: float, gae_lambda: float) -> GaeTargets:
    """Advantages of trajectories, across the ends of their episodes; see `gae`."""
    return gae(
        traj.mask,
        reward=traj.reward,
        value=values.value,
        bootstrap_value=values.bootstrap_value,
        terminated=traj.terminated,
        truncated=traj.truncated,
        discount=discount,
        lam=gae_lambda,
    )


def actor_critic_batch(traj: Trajectories, values: Values, target: GaeTargets) -> ActorCriticBatch:
    """The batch of the losses of an actor and a critic; `values` are those before the update."""
    return ActorCriticBatch(
        obs=traj.obs,
        action=traj.action,
        action_mask=traj.action_mask,
        mask=traj.mask,
        recurrent_state=traj.recurrent_state,
        behavior_logprob=traj.behavior_logprob,
        advantage=target.advantage,
        old_value=values.value,
        value_target=target.value_target,
    )


def train_actor_critic(
    actor: ActorCritic,
    traj: Trajectories,
    values: Values,
    target: GaeTargets,
    loss: Loss[Any, ActorCriticOutput],
    *,
    epochs: int = 1,
    num_minibatches: int = 1,
) -> TrainMetrics:
    """Train the actor that acted and its critic at once; `loss` reads an `ActorCriticBatch`."""
    batch = actor_critic_batch(traj, values, target)
    return actor.train(loss, batch, epochs=epochs, num_minibatches=num_minibatches)
