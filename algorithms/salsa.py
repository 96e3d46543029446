"""SALSA: PPO whose reference is the mean of two fine-tuned models.

Chegini et al., "SALSA: Soup-based Alignment Learning for Stronger Adaptation in RLHF", 2024. Such a
reference allows a policy to go further from where it started. The step is PPO's: what differs is
where `ref` starts, a mean of two earlier stages or folders (`algorithm.roles.ref.start`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .ppo import PPO, ppo_step
from .roles import PerSample, Policy, Prompts, Reward, TrainMetrics, ValueModel

__all__ = ["SALSA", "salsa_step", "weight_mean"]


@dataclass(frozen=True, kw_only=True)
class SALSA(PPO):
    """Options of PPO; the mean's weights are where `ref` starts."""


def weight_mean(
    models: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> dict[str, Tensor]:
    """The mean of several models' weights, tensor by tensor, added up in double precision.

    Args:
        models: Weights by name; names and shapes must agree. Tied weights stand there once.
        shares: How much of each model, divided by their sum.

    Returns:
        Tensors of the first model's dtypes; those that are not floating are the first model's.

    Raises:
        ValueError: If there is no model, names or shapes differ, or the shares add up to nothing.
    """
    if not models or len(models) != len(shares) or sum(shares) == 0:
        raise ValueError(f"expected a share for each of {len(models)} models, got {list(shares)}")
    for model in models[1:]:
        wrong = {name for name in models[0].keys() ^ model.keys()} or {
            name for name, tensor in model.items() if tensor.shape != models[0][name].shape
        }
        if wrong:
            raise ValueError(f"the models differ in '{min(wrong)}': only equal ones have a mean")
    total = sum(shares)
    mean: dict[str, Tensor] = {}
    for name, first in models[0].items():
        if not first.is_floating_point():
            mean[name] = first.clone()
            continue
        added = torch.zeros_like(first, dtype=torch.float64)
        for model, share in zip(models, shares, strict=True):
            added += model[name].double() * (share / total)
        mean[name] = added.to(first.dtype)
    return mean


def salsa_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: SALSA
) -> tuple[TrainMetrics, TrainMetrics, PerSample]:
    """`ppo_step`; `ref` is the mean of two models."""
    return ppo_step(prompts, actor, critic, ref, reward, cfg)
