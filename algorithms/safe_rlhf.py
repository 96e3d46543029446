"""Safe RLHF: PPO for reward, under a constraint on the mean cost.

Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback", 2023. Reward and cost have
a model and a critic each; a multiplier mixes their advantages and rises while responses cost more
than is allowed. A cost above 0 means unsafe; `cost_modelling_step` trains a model of it.
"""

from __future__ import annotations

from typing import Literal

from ..dataflow.options import NonNegativeFloat, PositiveFloat, PositiveInt, option_class
from .controllers.multiplier import Ascent, Multiplier
from .losses import ClippedValueLoss
from .ops.lagrangian import mixed_advantage
from .options.policy_updates import scored_rows, train_policy
from .options.reference_kl import reference_logprob, reported_kl
from .ppo import PPO, gae_targets, token_rewards, train_critic, whitened_advantage
from .roles import PerSample, Policy, Prompts, Reward, Sampling, TrainMetrics, ValueModel


@option_class
class SafeRLHF(PPO):
    """Options of Safe RLHF."""

    sampling: Sampling = Sampling(max_new_tokens=512)
    """How responses are sampled."""
    ascent: Ascent = Ascent()
    """The constraint, and how the multiplier follows it."""
    kl_split: Literal["full", "half"] = "full"
    """Whether reward and cost each account for all of the KL, or for half of it."""
    kl_coef: NonNegativeFloat = 0.02
    """Reward taken, and cost added, per nat of KL to the reference."""
    score_clip: PositiveFloat | None = 50.0
    """Bound on the size of scores and costs."""
    whiten_advantages: bool = False
    """Shift the mixed advantages to mean 0 and scale them to variance 1 over the batch."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=5.0)
    """The loss of both critics."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_eos == "zero" or self.score_slot == "after_last":
            raise ValueError(
                "Safe RLHF puts scores and costs on the last token and expects nothing after it; "
                "choose another no_eos than 'zero', and score_slot 'last_token'"
            )

    @property
    def kl_share(self) -> float:
        """What is taken off the reward, and added to the cost, per nat of KL."""
        return self.kl_coef if self.kl_split == "full" else self.kl_coef / 2


def safe_rlhf_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    cost_critic: ValueModel,
    ref: Policy,
    reward: Reward,
    cost: Reward,
    multiplier: Multiplier,
    cfg: SafeRLHF,
) -> tuple[TrainMetrics, TrainMetrics, TrainMetrics, TrainMetrics, PerSample, PerSample | None]:
    """As `ppo_step`, with a second stream of rewards; reports costs and the KL as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    cost_score = cost.score(roll.tokens, roll.mask, roll.prompt_id)
    value = critic.value(roll.tokens, roll.mask)
    cost_value = cost_critic.value(roll.tokens, roll.mask)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = token_rewards(score, roll, ref_logprob, cfg, kl_coef=cfg.kl_share)
    costs = token_rewards(cost_score, roll, ref_logprob, cfg, kl_coef=-cfg.kl_share, no_eos="none")
    scored = scored_rows(scored_rows(roll, score), cost_score)
    target = gae_targets(scored, scored.mask, cfg, reward=shaped, value=value)
    cost_target = gae_targets(scored, scored.mask, cfg, reward=costs, value=cost_value)
    ascended = multiplier.update(cost_score, cfg.ascent)
    mixed = mixed_advantage(
        scored.mask,
        reward=target.advantage,
        cost=cost_target.advantage,
        multiplier=multiplier.price(cost_score),
    )
    advantage = whitened_advantage(mixed, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, scored.mask, cfg, value=value, target=target.value_target),
        train_critic(
            cost_critic, scored, scored.mask, cfg, value=cost_value, target=cost_target.value_target
        ),
        ascended,
        cost_score,
        reported_kl(roll, ref_logprob),
    )
