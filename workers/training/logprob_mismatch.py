"""The mismatch of log-probabilities between the engine that trains and the one that sampled.

Looked at in the first minibatch of a train call, between its gradient and the update, where the
training engine's log-probabilities are there anyway. If the rollout read the weights that are
trained, all that is measured is the difference between two engines, and it can be judged: a call
that is refused has changed nothing. If the rollout ran ahead, staleness is in it too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...dataflow.errors import PenstockError
from ...dataflow.graph.role import Metric
from ...dataflow.options import NonNegativeFloat, PositiveInt, option_class
from ...dataflow.runtime.worker_protocol import WorkerContext
from .data_parallel import RankGroup
from .host_memory import masked

ROLLOUT_K3 = "rollout_k3"
"""Metric: KL(rollout || trainer) by the k3 estimator, nats per token."""

_LARGEST, _SIZE = "rollout_logprob_max_diff", "rollout_ess"
_MOST = 20.0  # a log-ratio beyond which the exponential says nothing


class MismatchError(PenstockError):
    """Sampling and training disagree about the same tokens on the same weights."""


@option_class
class MismatchLimits:
    """Limits of the mismatch between the engines that sample and train, on the same weights.

    Both bounds are in nats per token, by the k3 estimator, over the first minibatch of a train
    call. What ran ahead of the training is not judged.
    """

    every: PositiveInt = 1
    """Steps from one comparison to the next; the first step is one always. They cost next to
    nothing: the training engine's log-probabilities are there anyway."""
    warn_above: NonNegativeFloat | None = 0.01
    """Warn if they differ by more, or by a tenth of it and ever more; null never does."""
    stop_above: NonNegativeFloat | None = None
    """End the run if they differ by more, before the weights are changed."""


class Mismatch:
    """Sums over one minibatch; w is the trainer's over the rollout's probability of a token."""

    def __init__(self, context: WorkerContext, device: torch.device) -> None:
        self._context = context
        self._everyone = RankGroup(context.process, context.num_processes, device)
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # n, w, w^2, k3
        self._largest = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, output: object, batch: object) -> None:
        """Look at some rows; nothing if their log-probabilities are on neither or one side.

        `rollout_logprob` is the engine's that sampled; without it `behavior_logprob` is.
        """
        columns: Any = batch
        logprob = getattr(output, "logprob", None)
        behavior = getattr(batch, "rollout_logprob", None)
        if behavior is None:
            behavior = getattr(batch, "behavior_logprob", None)
        # Of the processes that share a rank's model, the one that answers for it counts.
        if logprob is None or behavior is None or not self._context.answers:
            return
        found: Tensor = logprob
        ratio = masked(found.detach() - behavior, columns.mask).double()
        if not len(ratio):
            return
        bounded = ratio.clamp(-_MOST, _MOST)
        weight = bounded.exp()
        k3 = torch.expm1(bounded) - bounded
        one = torch.ones_like(weight)
        self._sums += torch.stack([one.sum(), weight.sum(), weight.square().sum(), k3.sum()])
        self._largest = torch.maximum(self._largest, ratio.abs().max())

    def metrics(self) -> dict[str, Metric]:
        """Over all ranks; every process gets the same. Empty if nothing was looked at.

        - `rollout_k3`: see `ROLLOUT_K3`.
        - `rollout_logprob_max_diff`: largest difference of a token's log-probability, in nats.
        - `rollout_ess`: effective sample size over the number of tokens, (sum w)^2 / (n sum w^2).
        """
        count, weight, squares, k3 = self._everyone.sum_(self._sums.clone()).tolist()
        largest = float(self._everyone.max_(self._largest.clone()))
        if not count:
            return {}
        return {
            ROLLOUT_K3: Metric.mean(k3, count),
            _LARGEST: Metric(largest, 1.0, "max"),
            _SIZE: Metric.mean(weight * weight / squares, count),
        }


def check_mismatch(
    found: dict[str, Metric], limits: MismatchLimits, role: str, step: int, staleness: int | None
) -> None:
    if not found or staleness != 0 or limits.stop_above is None:
        return
    k3, largest, size = (found[name].value for name in (ROLLOUT_K3, _LARGEST, _SIZE))
    if not k3 <= limits.stop_above:
        raise MismatchError(
            f"step {step}: '{role}' and what sampled for it disagree by {k3:.3g} nats per token on "
            f"the same weights (largest difference {largest:.3g}, effective sample size "
            f"{size:.3g}); mismatch.stop_above is {limits.stop_above:g}. Nothing was updated\n"
            "    compare dtypes and kernels of the two engines, or set a correction "
            "(algorithm.cfg.correction)"
        )
