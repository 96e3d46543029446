"""P3O: a policy gradient on the difference of two responses' rewards; no critic, no baseline.

Wu et al., "Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for LLM Alignment",
2023. The KL to the reference is in the score. What both responses of a prompt have in common, such
as a reward model's offset, cancels.
"""

from __future__ import annotations

from ..dataflow.options import option_class
from .losses import P3OLoss
from .options.pair_updates import PairUpdates, train_on_pairs
from .options.reference_kl import score_less_kl
from .roles import Policy, Prompts, Reward, TrainMetrics


@option_class
class P3O(PairUpdates):
    """Options of P3O."""

    loss: P3OLoss = P3OLoss(report_entropy=True)
    """What is clipped, and how far."""


def p3o_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: P3O
) -> TrainMetrics:
    """Sample two responses per prompt, score them, and train on the difference."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    score = score_less_kl(score, roll, ref, cfg.kl_coef, cfg.sampling.temperature)
    return train_on_pairs(actor, roll, score, cfg.loss, cfg)
