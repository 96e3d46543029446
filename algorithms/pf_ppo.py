"""PF-PPO: PPO on those responses whose scores can be relied on.

Shen and Zhang, "Policy Filtration in RLHF to Fine-Tune LLM for Code Generation", 2024. Actor and
critic both train on the responses that are kept.
"""

from __future__ import annotations

from typing import Literal

from ..dataflow.options import NonNegativeFloat, PositiveInt, option_class
from .ops.filtration import Strategy, filtered_batch, filtered_groups
from .options.policy_updates import check_groups, train_policy
from .options.reference_kl import reference_logprob, reported_kl
from .ppo import (
    PPO,
    critic_states,
    gae_targets,
    scored_states,
    token_rewards,
    train_critic,
    whitened_advantage,
)
from .roles import PerSample, Policy, Prompts, Reward, Sampling, TrainMetrics, ValueModel


@option_class
class PFPPO(PPO):
    """Options of PF-PPO."""

    sampling: Sampling = Sampling(num_samples=5, temperature=0.7, max_new_tokens=53)
    """How responses are sampled, before they are filtered."""
    strategy: Strategy = "best_worst"
    """Which responses are kept."""
    num_kept: PositiveInt = 2
    """Responses kept per prompt; of "best" one says all."""
    power: NonNegativeFloat = 2.0
    """How strategy "power" prefers large scores."""
    filter_scope: Literal["prompt", "batch"] = "prompt"
    """Whether responses compete with those to the same prompt, or with the whole batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


def pf_ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: PFPPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """As `ppo_step`, with a filter after the scores: what is not kept is not trained on."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    choose = filtered_groups if cfg.filter_scope == "prompt" else filtered_batch
    kept = choose(roll, score, count=cfg.num_kept, strategy=cfg.strategy, power=cfg.power)
    roll, states = critic_states(kept, cfg)
    value = critic.value(roll.tokens, states)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = token_rewards(kept.score, roll, ref_logprob, cfg)
    scored, states = scored_states(roll, states, kept.score, cfg)
    target = gae_targets(scored, states, cfg, reward=shaped, value=value)
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, states, cfg, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )
