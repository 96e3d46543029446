"""Losses that take a whole response as one action: mirror descent, pairs, offline advantages.

`sequence_logprob` is the log-probability of a whole response, the sum over its tokens; see
`sequence_sum`. What metrics mean is said in `losses`. A mean over responses is over those with at
least one sampled token; one over pairs is over all of them, as each response of a pair counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import PositiveFloat, option_class
from ..ops.kl import kl_estimate
from ..ops.reductions import aggregation_totals, check_token_columns, unknown, zero_where_masked_out
from ..roles.language_tables import (
    PerSample,
    PerToken,
    PolicyBatch,
    PolicyOutput,
    PromptId,
    TokenIds,
    TokenMask,
)
from .tokens import CountedMean, token_metric

EtaForm = Literal["paper", "scaled"]
"""`(difference / eta - reward difference)^2`, or that times `eta^2`, as in the authors' code."""


LOG_RATIO_CLAMP = 20.0


def sequence_sum(column: Tensor, mask: Tensor) -> Tensor:
    """Sum over the sampled tokens of each response: f32[rows] from f32[rows, T]."""
    check_token_columns(mask, column=column)
    return zero_where_masked_out(column, mask).sum(dim=1)


def rebel_loss(
    *,
    sequence_logprob: Tensor,
    behavior_sequence_logprob: Tensor,
    score: Tensor,
    eta: float = 1.0,
    form: EtaForm = "paper",
) -> Tensor:
    """`((log_ratio_1 - log_ratio_2) / eta - (score_1 - score_2))^2` per pair of responses.

    Relative rewards as a regression on log-probabilities. Gao et al., "REBEL: Reinforcement
    Learning via Regressing Relative Rewards", 2024, algorithm 1.

    Args:
        sequence_logprob: f32[pairs, 2], differentiable.
        behavior_sequence_logprob: f32[pairs, 2], under the policy the iteration began with.
        score: f32[pairs, 2]; only differences within a pair matter.
        eta: Step size; larger moves the policy further.
        form: See `EtaForm`.

    Returns:
        f32[pairs], to be minimized.

    Raises:
        ValueError: If `form` is unknown.
    """
    log_ratio = sequence_logprob - behavior_sequence_logprob
    predicted = log_ratio[..., 0] - log_ratio[..., 1]
    wanted = score[..., 0] - score[..., 1]
    if form == "paper":
        return (predicted / eta - wanted).square()
    if form == "scaled":
        return (predicted - eta * wanted).square()
    raise unknown("form", form, EtaForm)


@dataclass(frozen=True, kw_only=True)
class ComparedPairBatch:
    """Columns of a loss on two scored responses to one prompt; they share `prompt_id`."""

    prompt_id: PromptId
    tokens: TokenIds
    mask: TokenMask
    behavior_logprob: PerToken
    score: PerSample


def _movement(
    output: PolicyOutput, batch: PolicyBatch | ComparedPairBatch
) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics of the distance to the policy that sampled, and of the entropy if it was computed."""
    logprob = output.logprob.detach()
    log_ratio = zero_where_masked_out(logprob - batch.behavior_logprob, batch.mask)
    k3 = kl_estimate(
        batch.mask, logprob=batch.behavior_logprob, ref_logprob=logprob, estimator="k3"
    )
    metrics = {
        "sequence_log_ratio": (log_ratio.sum(), (batch.mask.any(dim=1)).sum()),
        "approx_kl_k3": token_metric(k3, batch.mask),
    }
    if output.entropy is not None:
        metrics["entropy"] = token_metric(output.entropy, batch.mask)
    return metrics


@dataclass(frozen=True, kw_only=True)
class SequenceLoss(Loss[PolicyBatch, PolicyOutput]):
    """Base of losses on single responses."""

    report_entropy: bool = False
    """Compute and log the entropy."""

    @property
    def needs_entropy(self) -> bool:
        return self.report_entropy

    def totals(self, batch: PolicyBatch) -> Tensor:
        return aggregation_totals(batch.mask)

    def divisor(self, totals: Tensor) -> Tensor:
        """Responses with a sampled token, at least 1."""
        return totals[1].clamp(min=1)

    def __call__(self, output: PolicyOutput, batch: PolicyBatch, totals: Tensor) -> LossSum:
        loss = self.row_loss(output, batch).sum()
        metrics = {
            "policy_loss": (loss.detach(), aggregation_totals(batch.mask)[1]),
            **_movement(output, batch),
        }
        return LossSum(loss / self.divisor(totals).to(loss), metrics)

    def row_loss(self, output: PolicyOutput, batch: PolicyBatch) -> Tensor:
        """f32[rows]; 0 for a row without sampled tokens."""
        raise NotImplementedError


def of_row(column: Tensor, mask: Tensor) -> Tensor:
    """A row's number from a column that gives it to each of the row's tokens: f32[rows]."""
    return sequence_sum(column, mask) / mask.sum(dim=1).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class PairLoss(CountedMean, Loss[ComparedPairBatch, PolicyOutput]):
    """Losses of two responses to one prompt; a pair without both scores is left out."""

    unit: ClassVar[Literal["row", "group"]] = "group"

    report_entropy: bool = False
    """Compute and log the entropy."""

    @property
    def needs_entropy(self) -> bool:
        return self.report_entropy

    def totals(self, batch: ComparedPairBatch) -> Tensor:
        return torch.tensor([len(_scored_pairs(batch))], dtype=torch.float64)

    def __call__(self, output: PolicyOutput, batch: ComparedPairBatch, totals: Tensor) -> LossSum:
        rows = _scored_pairs(batch)
        score = batch.score[rows]
        loss = self.pair_loss(
            sequence_sum(output.logprob, batch.mask)[rows],
            sequence_sum(batch.behavior_logprob, batch.mask)[rows],
            score,
        ).sum()
        pairs = totals.new_tensor(float(len(rows)))
        metrics = {
            "policy_loss": (loss.detach(), pairs),
            "score_gap": ((score[:, 0] - score[:, 1]).abs().sum(), pairs),
            **_movement(output, batch),
        }
        return LossSum(loss / self.divisor(totals).to(loss), metrics)

    def pair_loss(self, logprob: Tensor, behavior_logprob: Tensor, score: Tensor) -> Tensor:
        """f32[pairs] from log-probabilities of whole responses and scores, f32[pairs, 2]."""
        raise NotImplementedError


def _scored_pairs(batch: ComparedPairBatch) -> Tensor:
    """Return the two rows of every prompt that both have a score: i64[pairs, 2]."""
    ids, counts = torch.unique(batch.prompt_id, return_counts=True)
    if bool((counts != 2).any()):
        wrong = int((counts != 2).nonzero()[0])
        raise ValueError(
            f"prompt {int(ids[wrong])} has {int(counts[wrong])} responses; this loss compares "
            "exactly two of each prompt: set sampling.num_samples to 2"
        )
    rows = torch.argsort(batch.prompt_id, stable=True).view(-1, 2)
    return rows[~batch.score[rows].isnan().any(dim=1)]


@option_class
class RebelLoss(PairLoss):
    """Relative rewards as a regression; see `rebel_loss`."""

    eta: PositiveFloat = 1.0
    """Step size; larger moves the policy further."""
    form: EtaForm = "paper"
    """The paper's loss, or the authors' code's, which is `eta^2` times that."""

    def pair_loss(self, logprob: Tensor, behavior_logprob: Tensor, score: Tensor) -> Tensor:
        return rebel_loss(
            sequence_logprob=logprob,
            behavior_sequence_logprob=behavior_logprob,
            score=score,
            eta=self.eta,
            form=self.form,
        )
