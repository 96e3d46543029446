"""Constrained online DPO: the best response that passes all judges, against the worst that fails.

Xu et al., "The Perfect Blend: Redefining RLHF with Mixture of Judges", 2024: CGPO's optimizer
CODPO. A prompt of which no response passes is left out; where all pass, the worst is rejected.
"""

from __future__ import annotations

from ..dataflow.options import option_class
from .losses import DPOLoss
from .ops.constrained import passing_and_failing
from .options.constrained_updates import Constrained, sample_and_judge
from .roles import PerSample, Policy, Prompts, ReferencePairBatch, Reward, TrainMetrics


@option_class
class CODPO(Constrained):
    """Options of constrained online DPO; `kl_max` is not read."""

    loss: DPOLoss = DPOLoss(sft_coef=1.0)
    """The loss of pairs; `sft_coef` weighs the likelihood of the response that passed."""


def codpo_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: CODPO
) -> tuple[TrainMetrics, PerSample, PerSample]:
    """Sample, judge, pair, and train on the pairs; reports who passed, and the KL."""
    temperature = cfg.sampling.temperature
    compared = sample_and_judge(prompts, actor, ref, reward, judges, cfg)
    pairs = passing_and_failing(compared.roll, compared.score, passed=compared.passed)
    batch = ReferencePairBatch(
        pair_id=pairs.pair_id,
        tokens=pairs.tokens,
        mask=pairs.mask,
        chosen=pairs.chosen,
        ref_logprob=ref.logprob(pairs.tokens, pairs.mask, temperature=temperature),
    )
    report = actor.train(
        cfg.loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=temperature,
    )
    return report, compared.passed, compared.kl
