"""Importance weights for rollouts whose engine computes other log-probabilities than the trainer.

Two engines with the same weights differ by kernels and precision. With mu what the rollout engine
says of a sampled token and p what the trainer says of it before its update, the token's loss is
multiplied by a bounded `exp(log p - log mu)`. Yao et al., "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training", 2025.

A clipped policy loss is proportional to the advantage as long as the factor is not negative, so the
weights are put on the advantage. The loss's ratio is then against p: a step that asks for a
correction computes p by one forward pass more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from ...dataflow.graph.axes import Behavior, f32
from ...dataflow.graph.tracer import op
from ...dataflow.options import FiniteFloat, NonNegativeFloat, option_class
from ..roles.language import Policy
from ..roles.language_tables import (
    SAMPLE,
    TOKEN,
    PerToken,
    PolicyBatch,
    ReferencePolicyBatch,
    Rollout,
    TokenMask,
)
from .reductions import check_token_columns, zero_where_masked_out

CorrectedAdvantage = Annotated[Tensor, f32(SAMPLE, TOKEN), Behavior()]
"""Advantages that already make up for the age of the weights that sampled the tokens."""


@dataclass(frozen=True, kw_only=True)
class CorrectedPolicyBatch(PolicyBatch):
    """A `PolicyBatch` whose `behavior_logprob` is the trainer's own."""

    rollout_logprob: PerToken
    """By the engine that sampled. No loss reads it: it tells how far the two engines are apart."""


@dataclass(frozen=True, kw_only=True)
class CorrectedReferencePolicyBatch(ReferencePolicyBatch):
    """The same with reference log-probabilities."""

    rollout_logprob: PerToken
    """See `CorrectedPolicyBatch`."""


@option_class
class RolloutCorrection:
    """Bounds of the importance weights between trainer and rollout engine."""

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"] = (
        "token_truncate"
    )
    """Weights per token or of whole responses (the product over their tokens), cut off at `cap`, or
    set to 0 outside `floor` and `cap`. "none": no weights; the loss's ratio is against what the
    trainer says, and nothing makes up for rollouts of older weights, which are refused."""
    cap: FiniteFloat | None = 2.0
    """Largest weight; None for no bound."""
    floor: NonNegativeFloat = 0.0
    """Smallest weight that a mask lets through; truncation does not use it."""
    mean_floor: NonNegativeFloat = 0.0
    """Responses whose geometric mean weight per token is below this are left out as well."""
    mean_cap: FiniteFloat | None = None
    """So are those where it is above this; 1.01 with a floor of 0.99 is usual, None for neither."""
    self_normalized: bool = False
    """Divide weights by their mean over the batch's tokens."""
    zero_weights: Literal["counted", "left_out"] = "counted"
    """Whether tokens whose weight a mask or the mean bounds set to 0 are "counted" in what the loss
    divides by, as in TRL, or "left_out" of it and of the KL and entropy terms, as in verl."""

    def __post_init__(self) -> None:
        for name, cap, floor in (
            ("cap", self.cap, self.floor),
            ("mean_cap", self.mean_cap, self.mean_floor),
        ):
            if cap is not None and cap <= floor:
                raise ValueError(f"{name} is {cap}; expected above {floor:g}")


@op(scope="row")
def rollout_weight(
    mask: TokenMask,
    *,
    logprob: PerToken,
    behavior_logprob: PerToken,
    correction: RolloutCorrection,
) -> PerToken:
    """Bounded importance weight of every sampled token.

    Args:
        mask: bool[rows, T].
        logprob: f32[rows, T], by the trainer before its update.
        behavior_logprob: f32[rows, T], by the engine that sampled.
        correction: The bounds.

    Returns:
        f32[rows, T], not differentiable; 0 where the mask is False.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, logprob=logprob, behavior_logprob=behavior_logprob)
    log_ratio = zero_where_masked_out(logprob - behavior_logprob, mask).detach()
    of_row = log_ratio.sum(1, keepdim=True)
    if correction.mode == "none":
        return mask.to(log_ratio)
    weight = (of_row.expand_as(log_ratio) if correction.mode.startswith("seq") else log_ratio).exp()
    if correction.mode.endswith("truncate"):
        weight = weight.clamp(max=math.inf if correction.cap is None else correction.cap)
    else:
        kept = _between(weight, correction.floor, correction.cap)
        weight = torch.where(kept, weight, torch.zeros_like(weight))
    mean = (of_row / mask.sum(1, keepdim=True).clamp(min=1)).exp()
    kept = _between(mean, correction.mean_floor, correction.mean_cap)
    return zero_where_masked_out(torch.where(kept, weight, torch.zeros_like(weight)), mask)


def _between(weight: Tensor, floor: float, cap: float | None) -> Tensor:
    # What is not a number stays in, and goes on to the optimizer, which refuses it.
    return ~((weight < floor) | (weight > (math.inf if cap is None else cap)))


@op(scope="row")
def weighted_tokens(mask: TokenMask, weight: PerToken) -> TokenMask:
    """Return the mask without tokens of weight 0: bool[rows, T]."""
    return mask & (weight != 0)


@op(scope="batch")
def self_normalized(weight: PerToken, mask: TokenMask) -> PerToken:
    """Weights over their mean of all sampled tokens: f32[rows, T], as they are if all are 0."""
    if not bool(mask.any()):
        return torch.zeros_like(weight)
    mean = weight[mask].double().mean()
    return zero_where_masked_out(weight / torch.where(mean == 0, 1.0, mean), mask).to(weight)


@op(scope="row")
def weighted_advantage(advantage: PerToken, weight: PerToken) -> CorrectedAdvantage:
    """The advantage of every token times its weight."""
    return advantage * weight


def corrected_batch(
    actor: Policy,
    roll: Rollout,
    advantage: PerToken,
    correction: RolloutCorrection | None,
    temperature: float,
    ref_logprob: PerToken | None = None,
) -> PolicyBatch:
    """The batch of a policy loss; a `ReferencePolicyBatch` if there is a `ref_logprob`.

    Without a correction the loss's ratio is against the log-probabilities that the rollout came
    with, and the advantages are as given. With one, the actor evaluates every token before
    its update: the ratio is against these log-probabilities, and each advantage is multiplied by
    its token's weight.
    """
    logprob, mask = None, roll.mask
    if correction is not None:
        logprob = actor.logprob(roll.tokens, roll.mask, temperature=temperature)
        if correction.mode != "none":
            weight = rollout_weight(
                roll.mask,
                logprob=logprob,
                behavior_logprob=roll.behavior_logprob,
                correction=correction,
            )
            if correction.zero_weights == "left_out":
                mask = weighted_tokens(roll.mask, weight)
            if correction.self_normalized:
                weight = self_normalized(weight, mask)
            advantage = weighted_advantage(advantage, weight)
    batch = PolicyBatch(
        tokens=roll.tokens,
        mask=mask,
        behavior_logprob=roll.behavior_logprob if logprob is None else logprob,
        advantage=advantage,
    )
    if ref_logprob is not None:
        batch = ReferencePolicyBatch(**vars(batch), ref_logprob=ref_logprob)
    if correction is not None and correction.mode != "none":
        batch = with_rollout_logprob(batch, roll.behavior_logprob)
    return batch


def with_rollout_logprob(batch: PolicyBatch, rollout_logprob: PerToken) -> PolicyBatch:
    """A corrected batch with the sampling engine's log-probabilities, to compare with."""
    kind = (
        CorrectedReferencePolicyBatch
        if isinstance(batch, ReferencePolicyBatch)
        else CorrectedPolicyBatch
    )
    return kind(**vars(batch), rollout_logprob=rollout_logprob)
