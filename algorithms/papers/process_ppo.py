"""PPO with a process reward model: rewards for the steps of a response, most of it for success.

Gao et al., "On Designing Effective RL Reward at Training Time for LLM Reasoning", 2024. Step scores
go through Clip and Delta, so that a policy gains nothing by more steps.
"""

from __future__ import annotations

from ...dataflow.options import FiniteFloat, option_class
from ..ops.rewards import known_throughout, process_shaped_reward
from ..options import reference_logprob, reported_kl, scored_rows, train_policy
from ..ppo import PPO, gae_targets, token_rewards, train_critic, whitened_advantage
from ..roles import PerSample, Policy, ProcessReward, Prompts, Reward, TrainMetrics, ValueModel


@option_class
class ProcessPPO(PPO):
    """Options of PPO, and how steps are rewarded."""

    step_coef: FiniteFloat = 0.02
    """Weight of the step rewards (alpha)."""
    step_clip: FiniteFloat | None = 0.5
    """Score at which a step loses nothing, near the model's mean; None goes without Clip."""
    step_delta: bool = True
    """Reward a step with its score less the next step's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_eos == "zero" or self.score_slot == "after_last":
            raise ValueError(
                "steps end with the last token, so no reward can follow it; "
                "choose another no_eos than 'zero', and score_slot 'last_token'"
            )


def process_ppo_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    ref: Policy,
    reward: Reward,
    prm: ProcessReward,
    cfg: ProcessPPO,
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """As `ppo_step`, with the rewards of steps added."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    steps = prm.score_steps(roll.tokens, roll.mask, roll.prompt_id)
    value = critic.value(roll.tokens, roll.mask)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = process_shaped_reward(
        token_rewards(score, roll, ref_logprob, cfg),
        roll.mask,
        step_score=steps.step_score,
        step_end=steps.step_end,
        coef=cfg.step_coef,
        clip=cfg.step_clip,
        delta=cfg.step_delta,
    )
    scored = scored_rows(roll, known_throughout(score, steps.step_score, steps.step_end))
    target = gae_targets(scored, scored.mask, cfg, reward=shaped, value=value)
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, scored.mask, cfg, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )
