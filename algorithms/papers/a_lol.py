"""A-LoL: offline, imitate the given responses that are better than a prompt's expected reward.

Baheti et al., "Leftover Lunch: Advantage-based Offline Reinforcement Learning for Language Models",
2023. A whole response is one action. Two things differ from the paper: the value of a prompt is
learned along with the policy by a critic, and responses are repeated in proportion to their
advantage, without chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ...dataflow.options import Fraction, NonNegativeFloat, PositiveInt, option_class
from ..losses.sequence import LOG_RATIO_CLAMP, SequenceLoss, of_row, sequence_sum
from ..losses.tokens import ClippedValueLoss
from ..ops.advantages import broadcast_over_tokens
from ..ops.groups import scored_tokens
from ..ops.reductions import check_token_columns, zero_where_masked_out
from ..ops.rewards import check_known
from ..roles import (
    Policy,
    PolicyBatch,
    PreferencePairs,
    Reward,
    TrainMetrics,
    ValueBatch,
    ValueModel,
)
from ..roles.language_tables import PerSample, PerToken, PolicyOutput, TokenIds, TokenMask


@dataclass(frozen=True, kw_only=True)
class WeighedResponses:
    """Prompts with responses, and how much better than expected each is."""

    tokens: TokenIds
    mask: TokenMask
    advantage: PerSample


@op(scope="row")
def first_token(mask: TokenMask) -> TokenMask:
    """True on each row's first masked token only: bool[rows, T].

    A critic's value there is of the state after the prompt.
    """
    return mask & (mask.long().cumsum(dim=1) == 1)


@op(scope="row")
def value_of_prompt(value: PerToken, first: TokenMask) -> PerSample:
    """The value at each row's first token: f32[rows] from f32[rows, T] and `first_token`."""
    check_token_columns(first, value=value)
    return zero_where_masked_out(value, first).sum(dim=1)


def priority(advantage: Tensor) -> Tensor:
    """Share of each row: its advantage over the sum of all that are positive, 0 if it is not.

    Baheti et al., "Leftover Lunch", 2023, section 3.3.

    Args:
        advantage: f32[rows].

    Returns:
        f32[rows], adding up to 1; equal shares where no advantage is positive.

    Raises:
        FloatingPointError: If an advantage is not finite.
    """
    check_known("advantage", advantage, finite=True)
    positive = advantage.clamp(min=0)
    total = positive.sum()
    even = torch.full_like(positive, 1 / max(len(positive), 1))
    return torch.where(total > 0, positive / torch.where(total > 0, total, 1.0), even)


def systematic_rows(share: Tensor, count: int) -> Tensor:
    """`count` row numbers, each row as often as `count * share`, rounded up or down.

    Systematic resampling with the offset in the middle, which needs no random number (Kitagawa,
    "Monte Carlo Filter and Smoother", 1996).

    Args:
        share: f32[rows], adding up to 1.
        count: Number of responses to take.

    Returns:
        i64[count], ascending.

    Raises:
        FloatingPointError: If a share is not finite.
    """
    check_known("share", share, finite=True)
    if not len(share):
        return torch.zeros(0, dtype=torch.int64)
    ends = share.double().cumsum(dim=0)
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count * ends[-1]
    return torch.searchsorted(ends, points, right=True).clamp(max=len(share) - 1)


@op(scope="batch", makes_rows=True)
def better_responses(
    tokens: TokenIds,
    mask: TokenMask,
    *,
    score: PerSample,
    value: PerSample,
    prioritized: bool = True,
) -> WeighedResponses:
    """The responses that score above `value`, with `advantage = score - value`.

    Args:
        tokens: i64[rows, T].
        mask: bool[rows, T].
        score: f32[rows]; a response without one has advantage 0.
        value: f32[rows], expected of each row's prompt.
        prioritized: Take responses in proportion to their advantage, and as many as there were
            rows. Otherwise take each row once, with advantage 0 if it scores below its value.

    Returns:
        As many rows as came in.

    Raises:
        FloatingPointError: If responses are sampled by advantages that are not finite.
    """
    advantage = torch.where(score.isnan(), 0.0, (score - value).clamp(min=0))
    rows = torch.arange(len(tokens))
    if prioritized:
        rows = systematic_rows(priority(advantage), len(tokens))
    return WeighedResponses(tokens=tokens[rows], mask=mask[rows], advantage=advantage[rows])


ALoLRatio = Literal["sequence", "token", "none"]
"""Importance weights of whole responses, of tokens, or none (the reference-free variant)."""


def a_lol_loss(
    *, logprob: Tensor, ref_logprob: Tensor, advantage: Tensor, ratio_clip: float | None = 0.9
) -> Tensor:
    """`-A weight logprob`, the weight being policy over reference within `1 +- ratio_clip`.

    The weight has no gradient. Columns may be per response (the paper's main form, with
    log-probabilities of whole responses) or per token. Baheti et al., "Leftover Lunch:
    Advantage-based Offline Reinforcement Learning for Language Models", 2023, equation 4.

    Args:
        logprob: f32[...], differentiable.
        ref_logprob: f32[...], of the same shape, under the reference.
        advantage: f32[...]; responses worse than expected must have been dropped or have 0.
        ratio_clip: Weights lie in `1 - ratio_clip` to `1 + ratio_clip`; None goes without weights
            (the reference-free variant).

    Returns:
        f32[...], to be minimized.
    """
    if ratio_clip is None:
        return -advantage * logprob
    log_ratio = (logprob - ref_logprob).detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    weight = log_ratio.exp().clamp(1 - ratio_clip, 1 + ratio_clip)
    return -advantage * weight * logprob


def a_lol_kl_loss(
    *,
    sequence_logprob: Tensor,
    ref_sequence_logprob: Tensor,
    advantage: Tensor,
    kl_coef: float = 0.1,
) -> Tensor:
    """`-A logprob + kl_coef (logprob - ref_logprob)` per response: A-LoL's KL variant, unweighted.

    Args:
        sequence_logprob: f32[rows], differentiable.
        ref_sequence_logprob: f32[rows].
        advantage: f32[rows].
        kl_coef: Weight of the penalty.

    Returns:
        f32[rows], to be minimized.
    """
    penalty = sequence_logprob - ref_sequence_logprob
    return -advantage * sequence_logprob + kl_coef * penalty


@option_class
class ALoLLoss(SequenceLoss):
    """Advantage-weighted likelihood of given responses; `behavior_logprob` is the reference's."""

    tolerates_lag: ClassVar[bool] = True

    ratio: ALoLRatio = "sequence"
    """Importance weights of whole responses, of tokens, or "none"."""
    ratio_clip: Fraction = 0.9
    """Weights lie within 1 plus and minus this."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of a KL penalty in place of the importance weights; needs `ratio` "none"."""

    def __post_init__(self) -> None:
        if self.kl_coef and self.ratio != "none":
            raise ValueError(
                f"kl_coef is {self.kl_coef} and ratio {self.ratio!r}, but the KL variant has no "
                "importance weights; set ratio to 'none'"
            )

    def row_loss(self, output: PolicyOutput, batch: PolicyBatch) -> Tensor:
        mask = batch.mask
        if self.ratio == "token":
            token_loss = a_lol_loss(
                logprob=zero_where_masked_out(output.logprob, mask),
                ref_logprob=zero_where_masked_out(batch.behavior_logprob, mask),
                advantage=zero_where_masked_out(batch.advantage, mask),
                ratio_clip=self.ratio_clip,
            )
            return token_loss.sum(dim=1)
        logprob, ref_logprob = (
            sequence_sum(column, mask) for column in (output.logprob, batch.behavior_logprob)
        )
        advantage = of_row(batch.advantage, mask)
        if self.kl_coef:
            return a_lol_kl_loss(
                sequence_logprob=logprob,
                ref_sequence_logprob=ref_logprob,
                advantage=advantage,
                kl_coef=self.kl_coef,
            )
        return a_lol_loss(
            logprob=logprob,
            ref_logprob=ref_logprob,
            advantage=advantage,
            ratio_clip=None if self.ratio == "none" else self.ratio_clip,
        )


@option_class
class ALoL:
    """Options of A-LoL."""

    loss: ALoLLoss = ALoLLoss()
    """Importance weights, or the reference-free or the KL variant."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=None)
    """The critic's loss, on the state before a response's first token."""
    prioritized: bool = True
    """Repeat responses in proportion to their advantage; False trains on each once."""
    epochs: PositiveInt = 1
    """Passes over each step's responses."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def a_lol_step(
    pairs: PreferencePairs,
    actor: Policy,
    critic: ValueModel,
    ref: Policy,
    reward: Reward,
    cfg: ALoL,
) -> tuple[TrainMetrics, TrainMetrics]:
    """Score the given responses against what their prompt promises, and imitate the better ones."""
    start = first_token(pairs.mask)
    value = critic.value(pairs.tokens, start)
    score = reward.score(pairs.tokens, pairs.mask, pairs.pair_id)
    rows = better_responses(
        pairs.tokens,
        pairs.mask,
        score=score,
        value=value_of_prompt(value, start),
        prioritized=cfg.prioritized,
    )
    times = {"epochs": cfg.epochs, "num_minibatches": cfg.num_minibatches}
    batch = PolicyBatch(
        tokens=rows.tokens,
        mask=rows.mask,
        behavior_logprob=ref.logprob(rows.tokens, rows.mask),
        advantage=broadcast_over_tokens(rows.advantage, rows.mask),
    )
    start = scored_tokens(start, score)
    target = broadcast_over_tokens(score, start)
    states = ValueBatch(tokens=pairs.tokens, mask=start, old_value=value, value_target=target)
    return actor.train(cfg.loss, batch, **times), critic.train(cfg.value_loss, states, **times)
