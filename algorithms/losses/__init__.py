"""Losses: what a worker trains with, built from the formulas beside it.

A loss names the batch it reads, hides what is masked out, and reduces by one of the modes of
`reductions`. It can be computed in any number of micro-batches: their results add up to the
minibatch's loss. The ratio of a policy loss is against `behavior_logprob`, the policy that sampled
the tokens. Every loss, and every formula of one, can be imported from here. `policy_loss` is for
tensors without any of this.

Metrics are weighted means, per token unless it says otherwise:

- `policy_loss`, `value_loss`: the loss without entropy and KL terms, as aggregated.
- `ratio_mean`: new over behavior probability; 1 when both are the same policy.
- `clip_fraction_low`, `clip_fraction_high`, `dual_clip_fraction`: share of tokens whose update that
  bound stopped.
- `capped_fraction`: share of tokens whose weight the cap held.
- `sequence_log_ratio`: log of new over behavior probability of a whole response, in nats.
- `score_gap`: per pair, how far apart the two responses' scores are.
- `approx_kl_k1`, `approx_kl_k3`: KL(behavior || policy) by two estimators, in nats.
- `entropy`: of the next-token distribution, in nats; if the forward pass computed it.
- `ref_kl_k1_per_sequence`, `ref_kl_k3_per_token`: KL(policy || reference), in nats.
- `value_clip_fraction`: share of tokens where the value clip decided the loss.
- `explained_variance`: 1 - Var(target - old value) / Var(target), over the minibatch.
- `cross_entropy`: in nats.

Those of preferences and scoring models are in `preference`, with their metrics; what distillation
reports is said with its loss.
"""

from __future__ import annotations

from .base import TokenAggregation
from .cross_entropy import CrossEntropyLoss
from .distillation import DistillationLoss, complete_distribution, jensen_shannon_divergence
from .plain import policy_loss
from .policy import (
    CappedWeightLoss,
    ClippedPolicyLoss,
    KLGradient,
    ReferenceKLPolicyLoss,
    ReinforceLoss,
)
from .preference import BradleyTerryLoss, DPOLoss, KTOLoss
from .preference_formulas import dpo_loss, kto_kl, kto_loss
from .sequence import RebelLoss
from .sequence_formulas import rebel_loss, sequence_sum
from .token_formulas import (
    RatioLevel,
    bradley_terry_loss,
    capped_weight_loss,
    clipped_policy_loss,
    clipped_value_loss,
    cross_entropy,
    probability_ratio,
    reinforce_loss,
)
from .value import ClippedValueLoss

__all__ = [
    "BradleyTerryLoss",
    "CappedWeightLoss",
    "ClippedPolicyLoss",
    "ClippedValueLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DistillationLoss",
    "KLGradient",
    "KTOLoss",
    "RatioLevel",
    "RebelLoss",
    "ReferenceKLPolicyLoss",
    "ReinforceLoss",
    "TokenAggregation",
    "bradley_terry_loss",
    "capped_weight_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "complete_distribution",
    "cross_entropy",
    "dpo_loss",
    "jensen_shannon_divergence",
    "kto_kl",
    "kto_loss",
    "policy_loss",
    "probability_ratio",
    "rebel_loss",
    "reinforce_loss",
    "sequence_sum",
]
