"""Decoupled PPO: an update is bounded around today's weights, not around those that sampled.

Hilton et al., "Batch size-invariance for policy optimization", 2021; Fu et al., "AReaL", 2025. The
loss's ratio is against the trainer's weights before the update (the proximal policy); how these
differ from the weights that sampled is a bounded factor on every token's loss. Run it with
`schedule=one_step_off` or a larger `schedule.max_lag`.
"""

from __future__ import annotations

from ...dataflow.options import option_class
from ..ops.rollout_correction import RolloutCorrection, corrected_batch
from ..options import learned_rows, reference_logprob, reported_kl, train_on
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
class DecoupledPPO(PPO):
    """Options of decoupled PPO."""

    correction: RolloutCorrection | None = RolloutCorrection(cap=5.0)
    """The factor's bounds; "token_mask" leaves tokens above the cap out and still counts them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction is None:
            raise ValueError(
                "without a correction the ratio is against the weights that sampled, which is "
                "ppo_step; set correction, with cap=None for factors without a bound"
            )


def decoupled_ppo_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    ref: Policy,
    reward: Reward,
    cfg: DecoupledPPO,
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """As `ppo_step`, with one more forward pass of the actor, for today's log-probabilities."""
    temperature = cfg.sampling.temperature
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    roll, states = critic_states(roll, cfg)
    value = critic.value(roll.tokens, states)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, temperature)
    shaped = token_rewards(score, roll, ref_logprob, cfg)
    scored, states = scored_states(roll, states, score, cfg)
    target = gae_targets(scored, states, cfg, reward=shaped, value=value)
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    # The batch's `behavior_logprob` is the proximal policy's: today's weights, before the update.
    learned = learned_rows(scored, cfg)
    batch = corrected_batch(actor, learned, advantage, cfg.correction, temperature)
    return (
        train_on(actor, cfg.policy_loss, batch, cfg),
        train_critic(critic, scored, states, cfg, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )
