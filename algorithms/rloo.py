"""REINFORCE leave-one-out: each sample's baseline is the mean of the others of its prompt.

Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019; Ahmadian et al., "Back to
Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback", 2024. The KL to
the reference is in the score. A whole response is one action: the ratio is of whole responses. For
one update on fresh rollouts its gradient is REINFORCE's.
"""

from __future__ import annotations

from ..dataflow.options import NonNegativeFloat, option_class
from .losses.tokens import ClippedPolicyLoss
from .ops.advantages import broadcast_over_tokens, leave_one_out
from .options import PolicyUpdates, check_groups, score_less_kl, train_policy
from .roles import Policy, Prompts, Reward, Sampling, TrainMetrics


@option_class
class RLOO(PolicyUpdates):
    """Options of RLOO."""

    sampling: Sampling = Sampling(num_samples=4, max_new_tokens=53)
    """Sampling of the responses; 2 or 4 samples per prompt are usual."""
    kl_coef: NonNegativeFloat = 0.05
    """Score taken per nat of a response's KL to the reference; with 0 there is no reference."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(
        ratio_level="sequence_product", aggregation="seq-mean-token-mean", report_entropy=True
    )
    """Clipping of whole responses; the mean is over responses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


def rloo_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: RLOO
) -> TrainMetrics:
    """Sample groups of responses, score them, and train on how each compares with the others."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    score = score_less_kl(score, roll, ref, cfg.kl_coef, cfg.sampling.temperature)
    advantage = broadcast_over_tokens(leave_one_out(score, roll.prompt_id), roll.mask)
    return train_policy(actor, roll, advantage, cfg.loss, cfg)
