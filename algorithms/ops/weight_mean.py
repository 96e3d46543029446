"""The mean of several models' weights: a soup.

Wortsman et al., "Model Soups", 2022; as a reference policy: Chegini et al., "SALSA", 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["weight_mean"]


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
