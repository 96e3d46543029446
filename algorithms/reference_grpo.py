"""Group relative policy optimization with a KL term to a reference policy in the loss.

Shao et al., "DeepSeekMath", 2024, section 4. A step of its own and not an option of `grpo`, because
only here is there a reference model.
"""

from __future__ import annotations

from dataclasses import dataclass

from .grpo import GroupRelative
from .losses import ClippedPolicyLoss, KLGradient, ReferenceKLPolicyLoss
from .ops.kl import KLEstimator
from .options.policy_updates import train_policy
from .roles import Policy, Prompts, Reward, TrainMetrics

__all__ = ["ReferenceGRPO", "reference_grpo_step"]


@dataclass(frozen=True, kw_only=True)
class ReferenceGRPO(GroupRelative):
    """Options of GRPO, and of its KL term."""

    loss: ClippedPolicyLoss = ClippedPolicyLoss(
        aggregation="seq-mean-token-mean", report_entropy=True
    )
    """Clipping, and how tokens and rows are weighed."""
    kl_coef: float = 0.04
    """Weight of the KL term; to go without one, use `grpo_step`."""
    kl_estimator: KLEstimator = "k3"
    """Which estimate of the KL."""
    kl_gradient: KLGradient = "as_is"
    """How that estimate is differentiated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kl_loss()  # refuses what does not make one

    def kl_loss(self) -> ReferenceKLPolicyLoss:
        """The policy loss with the KL term added."""
        return ReferenceKLPolicyLoss(
            policy=self.loss,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            kl_gradient=self.kl_gradient,
        )


def reference_grpo_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: ReferenceGRPO
) -> TrainMetrics:
    """As `grpo_step`, with the KL to `ref` added to the loss."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = cfg.advantage(score, roll)
    ref_logprob = ref.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    return train_policy(actor, roll, advantage, cfg.kl_loss(), cfg, ref_logprob=ref_logprob)
