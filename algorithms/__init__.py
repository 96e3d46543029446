"""Algorithms: the vocabulary they share, the mathematics, and one file per algorithm.

`roles` holds contracts and tables; an algorithm's options and its step function are imported from
its own file, as in `from penstock.algorithms.grpo import GRPO, grpo_step`. Listed here is the
mathematics to write new ones with, each name loaded when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dataflow.registry import on_demand

if TYPE_CHECKING:
    from .losses.preference import BradleyTerryLoss
    from .losses.tokens import (
        ClippedPolicyLoss,
        ClippedValueLoss,
        CrossEntropyLoss,
        ReferenceKLPolicyLoss,
        bradley_terry_loss,
        clipped_policy_loss,
        clipped_value_loss,
        cross_entropy,
        probability_ratio,
    )
    from .ops.advantages import broadcast_over_tokens, group_advantage, leave_one_out, whiten
    from .ops.kl import adaptive_kl_coef, kl_estimate, kl_shaped_reward
    from .ops.reductions import aggregate, aggregation_totals, masked_mean, masked_variance
    from .ops.returns import GaeTargets, gae, return_to_go

_MODULES = {
    "losses.preference": ("BradleyTerryLoss",),
    "losses.tokens": (
        *("bradley_terry_loss", "clipped_policy_loss", "clipped_value_loss"),
        *("cross_entropy", "probability_ratio"),
        *("ClippedPolicyLoss", "ClippedValueLoss", "CrossEntropyLoss", "ReferenceKLPolicyLoss"),
    ),
    "ops.advantages": ("broadcast_over_tokens", "group_advantage", "leave_one_out", "whiten"),
    "ops.kl": ("adaptive_kl_coef", "kl_estimate", "kl_shaped_reward"),
    "ops.reductions": ("aggregate", "aggregation_totals", "masked_mean", "masked_variance"),
    "ops.returns": ("GaeTargets", "gae", "return_to_go"),
}

__all__ = ["BradleyTerryLoss", "ClippedPolicyLoss", "ClippedValueLoss", "CrossEntropyLoss"]
__all__ += ["GaeTargets", "ReferenceKLPolicyLoss", "bradley_terry_loss", "clipped_policy_loss"]
__all__ += ["clipped_value_loss", "cross_entropy", "probability_ratio"]
__all__ += ["broadcast_over_tokens", "gae", "group_advantage", "leave_one_out", "return_to_go"]
__all__ += ["adaptive_kl_coef", "kl_estimate", "kl_shaped_reward", "whiten"]
__all__ += ["aggregate", "aggregation_totals", "masked_mean", "masked_variance"]

__getattr__ = on_demand(__name__, _MODULES)
