"""Losses: what a worker trains with, built from the formulas beside it.

A loss names the batch it reads, hides what is masked out, and reduces by one of the modes of
`reductions`. It can be computed in any number of micro-batches: their results add up to the
minibatch's loss. The ratio of a policy loss is against `behavior_logprob`, the policy that sampled
the tokens. Every loss that several algorithms have, and every formula of one, can be imported from
here; each is loaded when first asked for.

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

from typing import TYPE_CHECKING

from ...dataflow.registry import on_demand

if TYPE_CHECKING:
    from .distillation import DistillationLoss, complete_distribution, jensen_shannon_divergence
    from .preference import BradleyTerryLoss, DPOLoss, KTOLoss, dpo_loss, kto_kl, kto_loss
    from .sequence import RebelLoss, rebel_loss, sequence_sum
    from .tokens import (
        CappedWeightLoss,
        ClippedPolicyLoss,
        ClippedValueLoss,
        CrossEntropyLoss,
        KLGradient,
        RatioLevel,
        ReferenceKLPolicyLoss,
        ReinforceLoss,
        TokenAggregation,
        bradley_terry_loss,
        capped_weight_loss,
        clipped_policy_loss,
        clipped_value_loss,
        cross_entropy,
        probability_ratio,
        reinforce_loss,
    )

_MODULES = {
    "distillation": ("DistillationLoss", "complete_distribution", "jensen_shannon_divergence"),
    "preference": ("BradleyTerryLoss", "DPOLoss", "KTOLoss", "dpo_loss", "kto_kl", "kto_loss"),
    "sequence": ("RebelLoss", "rebel_loss", "sequence_sum"),
    "tokens": (
        *("CappedWeightLoss", "ClippedPolicyLoss", "ClippedValueLoss", "CrossEntropyLoss"),
        *("KLGradient", "ReferenceKLPolicyLoss", "ReinforceLoss", "TokenAggregation"),
        *("RatioLevel", "bradley_terry_loss", "capped_weight_loss", "clipped_policy_loss"),
        *("clipped_value_loss", "cross_entropy", "probability_ratio", "reinforce_loss"),
    ),
}

__all__ = ["BradleyTerryLoss", "CappedWeightLoss", "ClippedPolicyLoss", "ClippedValueLoss"]
__all__ += ["CrossEntropyLoss", "DPOLoss", "DistillationLoss", "KLGradient", "KTOLoss"]
__all__ += ["RatioLevel", "RebelLoss", "ReferenceKLPolicyLoss", "ReinforceLoss"]
__all__ += ["TokenAggregation", "bradley_terry_loss", "capped_weight_loss", "clipped_policy_loss"]
__all__ += ["clipped_value_loss", "complete_distribution", "cross_entropy", "dpo_loss"]
__all__ += ["jensen_shannon_divergence", "kto_kl", "kto_loss", "probability_ratio", "rebel_loss"]
__all__ += ["reinforce_loss", "sequence_sum"]

__getattr__ = on_demand(__name__, _MODULES)
