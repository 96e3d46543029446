"""Formulas of learning from preferences, one number per pair or per response.

Pure functions of tensors. A policy's log-ratio of a response is `log p(response) - log
ref(response)`, summed over its tokens; `preference` makes these sums from token columns and turns
the formulas into what a worker trains with.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

DPOLossType = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust"]
"""What a pair's loss is as a function of h, chosen less rejected log-ratio; see `dpo_loss`."""

IPOLength = Literal["sum", "average"]
"""Whether IPO compares log-ratios of whole responses ("sum") or their means per token."""


def dpo_loss(
    chosen_logprob: Tensor,
    rejected_logprob: Tensor,
    ref_chosen_logprob: Tensor,
    ref_rejected_logprob: Tensor,
    *,
    beta: float = 0.1,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    ipo_length: IPOLength = "sum",
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
) -> Tensor:
    """Loss of pairs of responses under a policy and a reference.

    With h the chosen response's log-ratio less the rejected one's:

    | loss_type      | value                                                                   |
    |----------------|-------------------------------------------------------------------------|
    | `sigmoid`      | `-(1 - e) log s(beta h) - e log s(-beta h)`, e the label smoothing       |
    | `sigmoid_norm` | the same, log-ratios divided by their responses' lengths                |
    | `ipo`          | `(h - 1 / (2 beta))^2`                                                  |
    | `hinge`        | `relu(1 - beta h)`                                                      |
    | `robust`       | `(-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)`               |

    Rafailov et al., "Direct Preference Optimization", 2023; `sigmoid_norm`: Lambert et al., "Tulu
    3", 2024; `ipo`: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human
    Preferences", 2023; `robust`: Chowdhury et al., "Provably Robust DPO", 2024.

    Args:
        chosen_logprob: f32[pairs], summed over the chosen response's tokens, differentiable.
        rejected_logprob: f32[pairs], of the rejected response, differentiable.
        ref_chosen_logprob: f32[pairs], of the chosen response under the reference.
        ref_rejected_logprob: f32[pairs], of the rejected response under the reference.
        beta: How hard the policy is pulled to the reference; IPO's tau.
        loss_type: See the table.
        label_smoothing: Share of pairs that are the wrong way round, below one half; read by the
            two sigmoids and `robust`.
        ipo_length: Whether `ipo` sums log-ratios (the paper) or averages them over tokens.
        chosen_length: Tokens of the chosen response, [pairs], where log-ratios are averaged.
        rejected_length: Tokens of the rejected response.

    Returns:
        f32[pairs], to be minimized.

    Raises:
        ValueError: If shapes differ, a choice is unknown, lengths are needed and missing, or the
            label smoothing does not lie in [0, 0.5).
    """
    columns = (chosen_logprob, rejected_logprob, ref_chosen_logprob, ref_rejected_logprob)
    if len({column.shape for column in columns}) != 1:
        shapes = ", ".join(str(list(column.shape)) for column in columns)
        raise ValueError(f"the four log-probabilities must have one shape [pairs], got {shapes}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; expected 0 or more, below 0.5")
    if ipo_length not in ("sum", "average"):
        raise ValueError(f"ipo_length {ipo_length!r} is unknown; choose 'sum' or 'average'")
    chosen = chosen_logprob - ref_chosen_logprob
    rejected = rejected_logprob - ref_rejected_logprob
    if loss_type == "sigmoid_norm" or (loss_type == "ipo" and ipo_length == "average"):
        if chosen_length is None or rejected_length is None:
            raise ValueError(
                f"loss_type {loss_type!r} averages over tokens here; pass chosen_length and "
                "rejected_length"
            )
        chosen = chosen / chosen_length.clamp(min=1)
        rejected = rejected / rejected_length.clamp(min=1)
    return _of_difference(chosen - rejected, beta, loss_type, label_smoothing)


def _of_difference(h: Tensor, beta: float, loss_type: DPOLossType, smoothing: float) -> Tensor:
    right, wrong = -F.logsigmoid(beta * h), -F.logsigmoid(-beta * h)
    match loss_type:
        case "sigmoid" | "sigmoid_norm":
            return (1 - smoothing) * right + smoothing * wrong
        case "ipo":
            return (h - 1 / (2 * beta)).square()
        case "hinge":
            return torch.relu(1 - beta * h)
        case "robust":
            return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
        case _:
            raise ValueError(
                f"loss_type {loss_type!r} is unknown; choose 'sigmoid', 'sigmoid_norm', 'ipo', "
                "'hinge' or 'robust'"
            )


def kto_kl(log_ratio: Tensor) -> Tensor:
    """KTO's reference point: `max(0, mean)` of log-ratios of prompts with other prompts' responses.

    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024, section 4.2.

    Args:
        log_ratio: f32[rows], `log p - log ref` of each mismatched response, without beta.

    Returns:
        f32 scalar, not differentiable; 0 for no rows.
    """
    if not len(log_ratio):
        return log_ratio.new_zeros(())
    return log_ratio.detach().double().mean().clamp(min=0).to(log_ratio)


def kto_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    *,
    kl: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO's loss of single responses that people liked or did not.

    `w_D (1 - s(beta (r - kl)))` where desirable, `w_U (1 - s(beta (kl - r)))` elsewhere. Ethayarajh
    et al., "KTO", 2024, equation 8.

    Args:
        log_ratio: f32[rows], `log p - log ref` of each response, differentiable.
        desirable: bool[rows].
        kl: The reference point, see `kto_kl`: one number or f32[rows].
        beta: How hard the policy is pulled to the reference.
        desirable_weight: Weight of desirable responses.
        undesirable_weight: Weight of the others. Choose both so that `desirable_weight * number of
            desirable / (undesirable_weight * number of others)` lies in [1, 4/3].

    Returns:
        f32[rows], to be minimized.

    Raises:
        ValueError: If shapes differ or `desirable` is not boolean.
    """
    if desirable.dtype != torch.bool or desirable.shape != log_ratio.shape:
        raise ValueError(
            f"desirable must be bool{list(log_ratio.shape)} like log_ratio, got "
            f"{str(desirable.dtype).removeprefix('torch.')}{list(desirable.shape)}"
        )
    signed = torch.where(desirable, log_ratio - kl, kl - log_ratio)
    loss = 1 - torch.sigmoid(beta * signed)
    return torch.where(desirable, desirable_weight * loss, undesirable_weight * loss)
