"""How far what trains a policy agrees with what sampled from it, about the same tokens.

Looked at in the first minibatch of a train call, before any update, where the training engine's
log-probabilities are there anyway. If the rollout read the same weights, all that is measured is
the difference between two engines; if it ran ahead, staleness is in it too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dataflow.role import Metric
from .data_parallel import RankGroup

__all__ = ["ROLLOUT_K3", "Agreement"]

ROLLOUT_K3 = "rollout_k3"
"""Metric: KL(rollout || trainer) by the k3 estimator, nats per token."""

_MOST = 20.0  # a log-ratio beyond which the exponential says nothing


class Agreement:
    """Sums over one minibatch; w is the trainer's over the rollout's probability of a token."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # n, w, w^2, k3
        self._largest = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, output: object, batch: object) -> None:
        """Look at some rows; nothing if their log-probabilities are on neither or one side."""
        columns: Any = batch
        logprob = getattr(output, "logprob", None)
        behavior = getattr(batch, "behavior_logprob", None)
        if logprob is None or behavior is None:
            return
        found: Tensor = logprob
        ratio = (found.detach() - behavior)[columns.mask].double()
        if not len(ratio):
            return
        bounded = ratio.clamp(-_MOST, _MOST)
        weight = bounded.exp()
        k3 = torch.expm1(bounded) - bounded
        one = torch.ones_like(weight)
        self._sums += torch.stack([one.sum(), weight.sum(), weight.square().sum(), k3.sum()])
        self._largest = torch.maximum(self._largest, ratio.abs().max())

    def metrics(self, group: RankGroup) -> dict[str, Metric]:
        """Over all ranks; every rank gets the same. Empty if nothing was looked at.

        - `rollout_k3`: see `ROLLOUT_K3`.
        - `rollout_logprob_max_diff`: largest difference of a token's log-probability, in nats.
        - `rollout_ess`: effective sample size over the number of tokens, (sum w)^2 / (n sum w^2).
        """
        count, weight, squares, k3 = group.sum_(self._sums.clone()).tolist()
        largest = float(group.max_(self._largest.clone()))
        if not count:
            return {}
        return {
            ROLLOUT_K3: Metric.mean(k3, count),
            "rollout_logprob_max_diff": Metric(largest, 1.0, "max"),
            "rollout_ess": Metric.mean(weight * weight / squares, count),
        }
