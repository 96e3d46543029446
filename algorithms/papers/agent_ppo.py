"""PPO on conversations: what each turn earns, less the KL to a reference, and a critic's values.

The losses and options of `ppo`. Advantages are estimated token by token over all turns, or turn by
turn, each turn being one action, as in Zhou et al., "ArCHer", 2024, section 3, whose discount is
per turn as well.
"""

from __future__ import annotations

from typing import Literal

from ...dataflow.graph.tracer import op
from ...dataflow.options import option_class
from ..ops.final_state import bootstrap_of, with_next_turn
from ..ops.kl import KLEstimator, kl_estimate
from ..ops.macro_actions import macro_gae
from ..ops.reductions import check_token_columns, zero_where_masked_out
from ..ops.returns import gae
from ..options import reference_logprob, reported_kl, scored_rows, train_policy
from ..ppo import PPO, train_critic, whitened_advantage, whitened_reward
from ..roles import (
    Agent,
    Conversations,
    PerSample,
    PerToken,
    Policy,
    Prompts,
    Sampling,
    TrainMetrics,
    ValueModel,
)
from ..roles.language_tables import TokenMask


@op(scope="row")
def turn_rewards(
    mask: TokenMask,
    reward: PerToken,
    *,
    logprob: PerToken,
    ref_logprob: PerToken,
    kl_coef: float,
    kl_estimator: KLEstimator = "k1",
) -> PerToken:
    """Token rewards: what each turn earned on its last token, less the KL to a reference.

    Args:
        mask: bool[rows, T].
        reward: f32[rows, T], of `Conversations`.
        logprob: f32[rows, T], under the policy that sampled the tokens.
        ref_logprob: f32[rows, T], under the reference.
        kl_coef: Reward taken per nat.
        kl_estimator: Which estimate of the KL.

    Returns:
        f32[rows, T], without gradient.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, reward=reward)
    kl = kl_estimate(mask, logprob=logprob, ref_logprob=ref_logprob, estimator=kl_estimator)
    return zero_where_masked_out(reward - kl_coef * kl, mask).detach()


@option_class
class AgentPPO(PPO):
    """Options of PPO on conversations."""

    sampling: Sampling = Sampling(max_new_tokens=256, max_total_tokens=2048)
    """Sampling of turns; see `Policy.converse` for its lengths."""
    max_turns: int = 8
    """Most turns of the policy in a conversation."""
    credit: Literal["token", "turn"] = "token"
    """Whether each token has an advantage of its own, or each turn; `discount` and `gae_lambda`
    count tokens or turns."""
    cut_off: Literal["bootstrap", "ended"] = "bootstrap"
    """Value after a conversation that ran out of turns or tokens: the critic's value of a next turn
    ("bootstrap"), or 0, as if the other side had "ended" it."""
    no_eos: Literal["none"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    """None: the environment scores every turn, also one that was cut off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score_clip is not None or self.score_slot != "last_token" or self.no_eos != "none":
            raise ValueError(
                "what a turn earns is added on its last token as the environment says; leave "
                "score_clip, score_slot and no_eos out"
            )
        if self.credit == "turn" and (self.whiten_rewards or self.gae_masking != "transparent"):
            raise ValueError(
                "credit 'turn' adds up a turn's rewards as they are; leave whiten_rewards and "
                "gae_masking out"
            )


def agent_ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, agent: Agent, cfg: AgentPPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """Hold conversations, estimate advantages, and train actor and critic; reports the KL too."""
    held = actor.converse(
        prompts.prompt, prompts.prompt_id, agent, cfg.sampling, max_turns=cfg.max_turns
    )
    held, value, after_last = critic_values(critic, held, cfg)
    ref_logprob = reference_logprob(ref, held, cfg.kl_coef, cfg.sampling.temperature)
    reward = turn_rewards(
        held.mask,
        held.reward,
        logprob=held.behavior_logprob,
        ref_logprob=held.behavior_logprob if ref_logprob is None else ref_logprob,
        kl_coef=cfg.kl_coef,
        kl_estimator=cfg.kl_estimator,
    )
    scored = scored_rows(held, held.score)
    if cfg.credit == "turn":
        target = macro_gae(
            scored.mask,
            scored.turn,
            reward=reward,
            value=value,
            bootstrap_value=after_last,
            discount=cfg.discount,
            lam=cfg.gae_lambda,
        )
    else:
        target = gae(
            scored.mask,
            reward=whitened_reward(reward, scored.mask, cfg),
            value=value,
            bootstrap_value=after_last,
            discount=cfg.discount,
            lam=cfg.gae_lambda,
            masking=cfg.gae_masking,
        )
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, scored.mask, cfg, value=value, target=target.value_target),
        reported_kl(held, ref_logprob),
    )


def critic_values(
    critic: ValueModel, held: Conversations, cfg: AgentPPO
) -> tuple[Conversations, PerToken, PerSample | None]:
    """Return the conversations, the critic's values, and its value after each that was cut off."""
    if cfg.cut_off == "ended":
        return held, critic.value(held.tokens, held.mask), None
    longer = with_next_turn(held)
    value = critic.value(longer.tokens, longer.states)
    return longer, value, bootstrap_of(value, longer.mask, longer.states, longer.ended)
