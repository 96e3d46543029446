"""Group relative policy optimization with a KL term to a reference policy in the loss.

Shao et al., "DeepSeekMath", 2024, section 4. A step of its own and not an option of `grpo`, because
only here is there a reference model.
"""

from __future__ import annotations

from ..dataflow.options import FiniteFloat, option_class
from .grpo import GRPO
from .losses.tokens import KLGradient, ReferenceKLPolicyLoss
from .ops.advantages import broadcast_over_tokens, group_advantage
from .ops.kl import KLEstimator
from .options import train_policy
from .roles import Policy, Prompts, Reward, TrainMetrics


@option_class
class ReferenceGRPO(GRPO):
    """Options of GRPO, and of its KL term."""

    kl_coef: FiniteFloat = 0.04
    """Weight of the KL term; to go without one, use `grpo_step`."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL."""
    kl_gradient: KLGradient = "as_is"
    """Gradient of that estimate."""

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
    advantage = group_advantage(
        score,
        roll.prompt_id,
        divide_by_std=cfg.divide_by_std,
        variance=cfg.std_variance,
        eps=cfg.std_eps,
    )
    per_token = broadcast_over_tokens(advantage, roll.mask)
    ref_logprob = ref.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    return train_policy(actor, roll, per_token, cfg.kl_loss(), cfg, ref_logprob=ref_logprob)
