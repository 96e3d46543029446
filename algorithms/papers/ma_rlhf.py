"""MA-RLHF: PPO whose actions are runs of tokens.

Chai et al., "MA-RLHF: Reinforcement Learning from Human Feedback with Macro Actions", 2024.
Advantages are estimated from macro action to macro action and given to every token of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import PositiveFloat, option_class
from ..losses.tokens import ClippedPolicyLoss, token_metric
from ..ops.macro_actions import (
    MacroId,
    MacroReward,
    MacroValue,
    Termination,
    macro_actions,
    macro_gae,
    macro_mask,
    sum_over_macros,
)
from ..ops.reductions import aggregation_totals, zero_where_masked_out
from ..options import (
    learned_rows,
    reference_logprob,
    reported_kl,
    scored_rows,
    train_on,
    train_policy,
)
from ..ppo import PPO, token_rewards, train_critic, whitened_advantage
from ..roles import PerSample, PerToken, Policy, Prompts, Reward, Rollout, TrainMetrics, ValueModel
from ..roles.language_tables import PolicyBatch, PolicyOutput


@dataclass(frozen=True, kw_only=True)
class MacroPolicyBatch(PolicyBatch):
    """A `PolicyBatch` that says which macro action each token belongs to."""

    macro_id: MacroId


@dataclass(frozen=True, kw_only=True)
class MacroPolicyLoss(Loss[MacroPolicyBatch, PolicyOutput]):
    """`ClippedPolicyLoss` of macro actions: a ratio is the product over a macro action's tokens.

    Its metrics are per macro action, and so is its aggregation. The clip is in effect tighter than
    per token, since the log-ratios of up to n tokens add up.
    """

    policy: ClippedPolicyLoss = ClippedPolicyLoss()
    """Clipping, and how macro actions are weighed."""

    def __post_init__(self) -> None:
        if self.policy.entropy_coef:
            raise ValueError(
                "MacroPolicyLoss has no entropy bonus: the entropy is a token's; set "
                "policy.entropy_coef to 0"
            )

    @property
    def needs_entropy(self) -> bool:
        return self.policy.needs_entropy

    def totals(self, batch: MacroPolicyBatch) -> Tensor:
        """f64[3], `aggregation_totals` with macro actions for tokens."""
        return aggregation_totals(macro_mask(batch.macro_id))

    def divisor(self, totals: Tensor) -> Tensor | None:
        return self.policy.divisor(totals)

    def __call__(self, output: PolicyOutput, batch: MacroPolicyBatch, totals: Tensor) -> LossSum:
        inside = (batch.macro_id >= 0).to(batch.advantage)
        size = sum_over_macros(inside, batch.macro_id)
        of_macros = PolicyBatch(
            tokens=batch.tokens,
            mask=macro_mask(batch.macro_id),
            behavior_logprob=sum_over_macros(batch.behavior_logprob, batch.macro_id),
            advantage=sum_over_macros(batch.advantage, batch.macro_id) / size.clamp(min=1),
        )
        logprob = zero_where_masked_out(output.logprob, batch.mask)
        made = PolicyOutput(logprob=sum_over_macros(logprob, batch.macro_id))
        result = self.policy(made, of_macros, totals)
        if output.entropy is None:
            return result
        entropy = {"entropy": token_metric(output.entropy, batch.mask)}
        return LossSum(result.total, {**result.metrics, **entropy})


@option_class
class MARLHF(PPO):
    """Options of MA-RLHF."""

    termination: Termination = "fixed"
    """End of a macro action: after `macro_length` tokens ("fixed"), after a number sampled from
    `macro_lengths` ("random"), or where likelihood stops rising ("perplexity")."""
    macro_length: int | None = 5
    """Tokens of a fixed macro action; None for one per response."""
    macro_lengths: tuple[int, ...] = (1, 2, 3, 5, 10)
    """Lengths that random macro actions are sampled from."""
    macro_value: MacroValue = "equal"
    """Rule that makes a macro action's value of its tokens' values."""
    macro_reward: MacroReward = "sum"
    """Whether tokens' rewards add up, or are averaged as values are ("mean")."""
    macro_ratio: Literal["token", "joint"] = "token"
    """Ratios per token with a shared advantage, or one product per macro action ("joint")."""
    score_clip: PositiveFloat | None = 2.5
    """Bound on the size of a score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_eos == "zero" or self.score_slot == "after_last":
            raise ValueError(
                "macro actions end with the last token, so no reward can follow "
                "it; choose another no_eos than 'zero', and score_slot 'last_token'"
            )
        if self.whiten_rewards or self.gae_masking != "transparent":
            raise ValueError(
                "macro actions take their tokens' rewards as they are, and pass over what the "
                "policy did not sample; leave whiten_rewards and gae_masking out"
            )
        if self.macro_ratio == "joint" and self.correction is not None:
            raise ValueError(
                "a correction weighs tokens; set macro_ratio to 'token' or leave it out"
            )


def ma_rlhf_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: MARLHF
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """As `ppo_step`, with macro actions for tokens."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    value = critic.value(roll.tokens, roll.mask)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    scored = scored_rows(roll, score)
    macro_id = macro_actions(
        roll.tokens,
        scored.mask,
        roll.behavior_logprob,
        termination=cfg.termination,
        length=cfg.macro_length,
        lengths=cfg.macro_lengths,
    )
    target = macro_gae(
        scored.mask,
        macro_id,
        reward=token_rewards(score, roll, ref_logprob, cfg),
        value=value,
        discount=cfg.discount,
        lam=cfg.gae_lambda,
        macro_value=cfg.macro_value,
        macro_reward=cfg.macro_reward,
    )
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    return (
        train_actor(actor, scored, macro_id, advantage, cfg),
        train_critic(critic, scored, scored.mask, cfg, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )


def train_actor(
    actor: Policy, roll: Rollout, macro_id: MacroId, advantage: PerToken, cfg: MARLHF
) -> TrainMetrics:
    """Train on ratios of tokens, or of macro actions."""
    if cfg.macro_ratio == "token":
        return train_policy(actor, roll, advantage, cfg.policy_loss, cfg)
    batch = MacroPolicyBatch(
        tokens=roll.tokens,
        mask=learned_rows(roll, cfg).mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=advantage,
        macro_id=macro_id,
    )
    return train_on(actor, MacroPolicyLoss(policy=cfg.policy_loss), batch, cfg)
