"""KTO: learn from single responses that people liked or did not.

Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024. Responses
have a label each; of a pair both are used on their own. The reference point, an estimate of the
policy's KL to the reference, is taken from prompts with other prompts' responses, once per step and
before its update.
"""

from __future__ import annotations

import torch

from ..dataflow.graph.tracer import op
from ..dataflow.options import PositiveInt, option_class
from .losses.preference import KTOLoss, kto_kl
from .ops.pairs import mismatched
from .ops.reductions import zero_where_masked_out
from .roles import Feedback, FeedbackBatch, PerSample, PerToken, Policy, TokenMask, TrainMetrics


@option_class
class KTO:
    """Options of KTO."""

    loss: KTOLoss = KTOLoss()
    """beta, and the weights of the two kinds of responses."""
    epochs: PositiveInt = 1
    """Passes over each step's responses."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


@op(scope="batch")
def reference_point(mask: TokenMask, *, logprob: PerToken, ref_logprob: PerToken) -> PerSample:
    """The same `kto_kl` for every row: f32[rows] from token columns of mismatched responses."""
    log_ratio = zero_where_masked_out(logprob - ref_logprob, mask).sum(dim=1)
    return torch.zeros_like(log_ratio) + kto_kl(log_ratio)


def kto_step(pairs: Feedback, actor: Policy, ref: Policy, cfg: KTO) -> TrainMetrics:
    """Make liked responses likelier and others less so, measured against the reference."""
    other = mismatched(pairs.tokens, pairs.mask, pairs.pair_id)
    kl = reference_point(
        other.mask,
        logprob=actor.logprob(other.tokens, other.mask),
        ref_logprob=ref.logprob(other.tokens, other.mask),
    )
    return actor.train(
        cfg.loss,
        FeedbackBatch(
            tokens=pairs.tokens,
            mask=pairs.mask,
            desirable=pairs.chosen,
            ref_logprob=ref.logprob(pairs.tokens, pairs.mask),
            kl=kl,
        ),
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
    )
