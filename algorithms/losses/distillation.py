"""Distillation: divergences between two views of what might stand in a token's place.

Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
2023, equations 1 to 3. With t the teacher's distribution and s the student's,

    KL(t || s)                                            beta = 0, forward: covers what t may say
    beta KL(t || m) + (1 - beta) KL(s || m)               m = beta t + (1 - beta) s
    KL(s || t)                                            beta = 1, reverse: keeps to what t prefers

The ends are as in TRL: the mixture itself vanishes there, and its gradient divided by beta, or by
1 - beta, goes to that of the KL.

Both are over the words that the teacher finds likeliest. What `Rest` says of all others keeps the
sums complete; with as many words as the vocabulary has, there are none.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import Fraction, option_class
from ..ops.reductions import aggregation_totals, unknown
from ..roles.language_tables import DistillationBatch, PolicyOutput
from .tokens import TokenAggregation, token_metric

Rest = Literal["one_word", "left_out"]
"""Treatment of words that are not among the likeliest.

`one_word`: all of them together are one more word, so that the divergence is at most that over the
whole vocabulary, and a student that says other things is told so. `left_out`: probabilities of the
likeliest are scaled to add up to 1.
"""

_LEAST_REST = 1e-6
"""Least probability of all other words together: float32 sums of probabilities are this exact."""


def complete_distribution(logprob: Tensor, rest: Rest) -> Tensor:
    """Log-probabilities that add up to 1, of some words of a vocabulary.

    Args:
        logprob: f32[..., k], over the whole vocabulary.
        rest: See `Rest`.

    Returns:
        f32[..., k + 1], or f32[..., k] if the rest is left out.

    Raises:
        ValueError: If `rest` is unknown.
    """
    total = logprob.logsumexp(-1, keepdim=True)
    match rest:
        case "left_out":
            return logprob - total
        case "one_word":
            others = (-torch.expm1(total.clamp(max=math.log1p(-_LEAST_REST)))).log()
            return torch.cat([logprob, others], dim=-1)
        case _:
            raise unknown("rest", rest, Rest)


def jensen_shannon_divergence(*, logprob: Tensor, teacher_logprob: Tensor, beta: float) -> Tensor:
    """The generalized Jensen-Shannon divergence of each token; see the top of this module.

    Args:
        logprob: f32[..., k], the student's, complete and differentiable.
        teacher_logprob: f32[..., k], complete.
        beta: The teacher's share of the mixture, in [0, 1]; 0 and 1 are the two KLs.

    Returns:
        f32[...], in nats.
    """
    if beta == 0:
        return _kl(teacher_logprob, logprob)
    if beta == 1:
        return _kl(logprob, teacher_logprob)
    mixture = torch.logaddexp(teacher_logprob + math.log(beta), logprob + math.log1p(-beta))
    return beta * _kl(teacher_logprob, mixture) + (1 - beta) * _kl(logprob, mixture)


def _kl(logprob: Tensor, other: Tensor) -> Tensor:
    """KL(p || q) over the last axis from log-probabilities."""
    return (logprob.exp() * (logprob - other)).sum(-1)


@option_class
class DistillationLoss(TokenAggregation, Loss[DistillationBatch, PolicyOutput]):
    """A divergence of the student from its teacher, on whatever responses.

    Its metrics:

    - `divergence`: what is minimized, as aggregated, in nats.
    - `forward_kl`: KL(teacher || student) per token, in nats, over the same words.
    - `reverse_kl`: KL(student || teacher) per token, likewise.
    - `teacher_share`: what the teacher's likeliest words have of its probability.
    - `student_share`: what the same words have of the student's.
    """

    tolerates_lag: ClassVar[bool] = True  # its targets do not depend on who wrote the responses

    beta: Fraction = 1.0
    """1: reverse KL, the student keeps to what the teacher prefers. 0: forward KL, it covers all
    that the teacher may say. Between: the generalized Jensen-Shannon divergence."""
    rest: Rest = "one_word"
    """Treatment of all other words: they count as one more, or are left out."""

    def totals(self, batch: DistillationBatch) -> Tensor:
        return aggregation_totals(batch.mask)

    def __call__(self, output: PolicyOutput, batch: DistillationBatch, totals: Tensor) -> LossSum:
        if output.word_logprob is None:
            raise ValueError(
                "the forward pass gave no log-probabilities of the batch's words; a worker must "
                "compute PolicyOutput.word_logprob where a batch has a column 'words'"
            )
        mask = batch.mask
        asked, told = output.word_logprob[mask], batch.teacher_logprob[mask]
        student = complete_distribution(asked, self.rest)
        teacher = complete_distribution(told, self.rest)

        def column(found: Tensor) -> Tensor:
            return found.new_zeros(mask.shape).masked_scatter(mask, found)

        divergence = column(
            jensen_shannon_divergence(logprob=student, teacher_logprob=teacher, beta=self.beta)
        )
        with torch.no_grad():
            shown = {
                "forward_kl": _kl(teacher, student),
                "reverse_kl": _kl(student, teacher),
                "teacher_share": told.exp().sum(-1),
                "student_share": asked.exp().sum(-1),
            }
        metrics = {name: token_metric(column(found), mask) for name, found in shown.items()}
        metrics["divergence"] = self.reduced_metric(divergence, mask)
        return LossSum(self.reduce(divergence, mask, totals), metrics)
