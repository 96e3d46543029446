"""PPO whose KL coefficient follows the KL, as the first PPO on language models had it.

Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2: a
controller raises the coefficient while responses are further from the reference than a target, and
lowers it while they are closer. All else is PPO's.
"""

from __future__ import annotations

from ...dataflow.options import NonNegativeFloat, option_class
from ..controllers import KLController, KLTarget
from ..ops.kl import kl_penalized_reward, response_kl
from ..options import train_policy
from ..ppo import (
    PPO,
    critic_states,
    gae_targets,
    scored_states,
    token_rewards,
    train_critic,
    whitened_advantage,
)
from ..roles import PerSample, Policy, Prompts, Reward, TrainMetrics, ValueModel


@option_class
class AdaptivePPO(PPO):
    """Options of PPO with an adaptive KL coefficient."""

    kl_coef: NonNegativeFloat = 0.15
    """Reward taken per nat of KL to the reference, in the first step."""
    kl_target: KLTarget = KLTarget()
    """Adaptation of the coefficient."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kl_coef:
            raise ValueError("kl_coef is 0, which stays 0 however it is adapted; use ppo_step")


def adaptive_ppo_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    ref: Policy,
    reward: Reward,
    controller: KLController,
    cfg: AdaptivePPO,
) -> tuple[TrainMetrics, TrainMetrics, TrainMetrics, PerSample]:
    """As `ppo_step`, with this step's coefficient, which then moves; reports the KL as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    roll, states = critic_states(roll, cfg)
    value = critic.value(roll.tokens, states)
    ref_logprob = ref.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    kl = response_kl(roll.mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob)
    shaped = kl_penalized_reward(
        token_rewards(score, roll, None, cfg),
        roll.mask,
        logprob=roll.behavior_logprob,
        ref_logprob=ref_logprob,
        kl_coef=controller.coefficient(kl, cfg.kl_coef),
        kl_estimator=cfg.kl_estimator,
    )
    scored, states = scored_states(roll, states, score, cfg)
    target = gae_targets(scored, states, cfg, reward=shaped, value=value)
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, states, cfg, value=value, target=target.value_target),
        controller.follow(kl, cfg.kl_coef, cfg.kl_target),
        kl,
    )
