"""Algorithms: the vocabulary they share, the mathematics, and one file per algorithm.

`roles` holds contracts and tables; an algorithm's options and its step function are imported from
its own file, as in `from penstock.algorithms.grpo import GRPO, grpo_step`. Listed here is the
mathematics to write new ones with.
"""

from .losses import (
    BradleyTerryLoss,
    ClippedPolicyLoss,
    ClippedValueLoss,
    CrossEntropyLoss,
    ReferenceKLPolicyLoss,
)
from .losses.token_formulas import (
    bradley_terry_loss,
    clipped_policy_loss,
    clipped_value_loss,
    cross_entropy,
    probability_ratio,
)
from .ops.advantages import (
    GaeTargets,
    broadcast_over_tokens,
    gae,
    group_advantage,
    leave_one_out,
    return_to_go,
    whiten,
)
from .ops.kl import adaptive_kl_coef, kl_estimate, kl_shaped_reward
from .ops.reductions import aggregate, aggregation_totals, masked_mean, masked_variance

__all__ = [
    "BradleyTerryLoss",
    "ClippedPolicyLoss",
    "ClippedValueLoss",
    "CrossEntropyLoss",
    "GaeTargets",
    "ReferenceKLPolicyLoss",
    "adaptive_kl_coef",
    "aggregate",
    "aggregation_totals",
    "bradley_terry_loss",
    "broadcast_over_tokens",
    "clipped_policy_loss",
    "clipped_value_loss",
    "cross_entropy",
    "gae",
    "group_advantage",
    "kl_estimate",
    "kl_shaped_reward",
    "leave_one_out",
    "masked_mean",
    "masked_variance",
    "probability_ratio",
    "return_to_go",
    "whiten",
]
