"""Constrained reward-ranked fine-tuning: imitate each prompt's best response that passes.

Xu et al., "The Perfect Blend: Redefining RLHF with Mixture of Judges", 2024: CGPO's optimizer
CRRAFT. A response counts as much as it is likely to beat the reference's own, which takes its place
where no response passes near enough to the reference.
"""

from __future__ import annotations

from ..dataflow.options import option_class
from .losses import ReinforceLoss
from .ops.advantages import broadcast_over_tokens
from .ops.constrained import best_passing
from .options.constrained_updates import Constrained, sample_and_judge
from .roles import PerSample, Policy, PolicyBatch, Prompts, Reward, TrainMetrics


@option_class
class CRRAFT(Constrained):
    """Options of constrained reward-ranked fine-tuning."""

    loss: ReinforceLoss = ReinforceLoss(aggregation="seq-mean-token-sum", report_entropy=True)
    """The log-likelihood of whole responses, weighed by their score."""


def crraft_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: CRRAFT
) -> tuple[TrainMetrics, PerSample, PerSample]:
    """Sample, judge, choose, and imitate; reports who passed, and the KL."""
    compared = sample_and_judge(prompts, actor, ref, reward, judges, cfg)
    other = compared.baseline
    rows = best_passing(
        compared.roll,
        other,
        score=compared.score,
        passed=compared.passed,
        kl=compared.kl,
        fallback_passed=judges.score(other.tokens, other.mask, other.prompt_id),
        kl_max=cfg.kl_max,
    )
    batch = PolicyBatch(
        tokens=rows.tokens,
        mask=rows.mask,
        behavior_logprob=rows.behavior_logprob,
        advantage=broadcast_over_tokens(rows.weight, rows.mask),
    )
    report = actor.train(
        cfg.loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=cfg.sampling.temperature,
    )
    return report, compared.passed, compared.kl
