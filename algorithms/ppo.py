"""Proximal policy optimization with a critic, and the KL to a reference in the reward.

Schulman et al., 2017, as applied by Huang et al., "The N+ Implementation Details of RLHF with PPO",
2024, whose numbers are the defaults. One default differs: the score is paid on a response's last
token; `score_slot="after_last"` pays it one slot later, as they do. Start the critic from the
reward model, and the policy and reference from SFT.

A response that was cut off is treated as ended, and only its score may change; with `no_eos="zero"`
it is expected to go on as the critic says of the state after its last token.
"""

from __future__ import annotations

from dataclasses import dataclass

from .losses import ClippedPolicyLoss, ClippedValueLoss
from .ops.advantages import GaeTargets
from .ops.final_state import bootstrap_of, with_final_state
from .options.gae import Estimates
from .options.kl_score import reference_logprob, reported_kl
from .options.policy_updates import Updates, train_policy
from .options.reference_kl import KLReward
from .roles import (
    PerSample,
    PerToken,
    Policy,
    Prompts,
    Reward,
    Rollout,
    Sampling,
    TokenMask,
    TrainMetrics,
    ValueBatch,
    ValueModel,
)

__all__ = ["PPO", "learn", "ppo_step"]


@dataclass(frozen=True, kw_only=True)
class PPO(KLReward, Estimates, Updates):
    """Options of PPO."""

    sampling: Sampling = Sampling(temperature=0.7, max_new_tokens=53)
    """How responses are drawn."""
    policy_loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """The actor's loss."""
    value_loss: ClippedValueLoss = ClippedValueLoss(coef=0.1)
    """The critic's loss."""
    epochs: int = 4
    """Passes over each step's rollouts."""

    def __post_init__(self) -> None:
        KLReward.__post_init__(self)
        Estimates.__post_init__(self)
        Updates.__post_init__(self)
        if self.no_eos == "zero" and self.score_slot == "after_last":
            raise ValueError(
                "no_eos 'zero' expects what the critic says after the last token, and score_slot "
                "'after_last' pays the score there; choose one of them"
            )

    def judged(self, roll: Rollout) -> tuple[Rollout, TokenMask]:
        """The rollout, and the states a critic is asked about: one more per row if need be."""
        if self.no_eos != "zero" and self.score_slot != "after_last":
            return roll, roll.mask
        lengthened = with_final_state(roll)
        return lengthened, lengthened.states

    def trained_states(self, roll: Rollout, states: TokenMask) -> TokenMask:
        """The states a critic is trained on: those with a reward of their own."""
        return states if self.score_slot == "after_last" else roll.mask

    def targets(
        self, roll: Rollout, states: TokenMask, *, reward: PerToken, value: PerToken
    ) -> GaeTargets:
        """Advantages, not whitened, and what the critic should have said."""
        steps = self.trained_states(roll, states)
        bootstrap = self.after_last(roll, states, value)
        return self.estimated(steps, reward=reward, value=value, bootstrap_value=bootstrap)

    def after_last(self, roll: Rollout, states: TokenMask, value: PerToken) -> PerSample | None:
        """What is expected after a response that was cut off; None if nothing is."""
        if self.no_eos != "zero":
            return None
        return bootstrap_of(value, roll.mask, states, roll.finished)

    def train_critic(
        self,
        critic: ValueModel,
        roll: Rollout,
        states: TokenMask,
        *,
        value: PerToken,
        target: PerToken,
    ) -> TrainMetrics:
        """Train a critic towards `target`; `value` is what it said before."""
        batch = ValueBatch(
            tokens=roll.tokens,
            mask=self.trained_states(roll, states),
            old_value=value,
            value_target=target,
        )
        return critic.train(
            self.value_loss, batch, epochs=self.epochs, num_minibatches=self.num_minibatches
        )


def ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: PPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """Sample, score, estimate advantages, and train actor and critic; reports the KL as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    return learn(roll, score, actor, critic, ref, cfg)


def learn(
    roll: Rollout, score: PerSample, actor: Policy, critic: ValueModel, ref: Policy, cfg: PPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """What PPO does with scored responses, for steps that come by theirs in another way."""
    roll, states = cfg.judged(roll)
    value = critic.value(roll.tokens, states)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = cfg.token_reward(roll, score, ref_logprob)
    target = cfg.targets(roll, states, reward=shaped, value=value)
    advantage = cfg.scaled(target.advantage, roll.mask)
    return (
        train_policy(actor, roll, advantage, cfg.policy_loss, cfg),
        cfg.train_critic(critic, roll, states, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )
