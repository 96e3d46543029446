"""The training loop over a model whose weights are divided and whose rows are shared out."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ....dataflow.graph.role import Loss
from ...training.microbatch import columns, micro_batches, take_rows
from ...training.optimizer import OptimizerSpec
from ...training.trainer import Forward, Sums, TrainLoop, num_masked
from .mesh import FsdpMesh
from .network import FsdpNetwork
from .optimizer import FsdpAdamW

__all__ = ["FsdpTrainer"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]


class FsdpTrainer(TrainLoop[O]):
    """Optimizer steps on one part of a model.

    All processes of a data-parallel rank are given the same rows and cut them into the same
    micro-batches, of which each shard takes its own.

    Args:
        mesh: Which part of the model this is.
        network: The part.
        optimizer: Steps it.
        spec: The learning rate's schedule.
        micro_batch_tokens: Tokens a process computes at once, padding not counted.
    """

    def __init__(
        self,
        mesh: FsdpMesh,
        network: FsdpNetwork,
        optimizer: FsdpAdamW,
        spec: OptimizerSpec,
        micro_batch_tokens: int,
    ) -> None:
        super().__init__(mesh.beside, spec, network.device)
        self._holders = mesh.replicas
        self._network = network
        self._micro_batch_tokens = micro_batch_tokens
        self.optimizer = optimizer

    def _restart(self) -> None:
        self.optimizer.restart()

    def _step(self, grad: Tensor, lr: float) -> float:
        return self.optimizer.step(grad, lr)

    def _gradient(
        self, forward: Forward[O], loss: Loss[B, O], batch: B, rows: Tensor, sums: Sums
    ) -> Tensor:
        """Of this rank's rows; the optimizer adds up over ranks."""
        local = take_rows(batch, rows)
        totals = self._holders.sum_(loss.totals(local).double().to(self._device))
        num_tokens = int((columns(local)["tokens"] >= 0).sum())
        limit = self._network.even_limit(self._micro_batch_tokens, num_tokens)
        # Right-padded rows are multiplied as they are, so rows of similar length go together.
        parts = micro_batches(batch, rows, loss.unit, limit, sort_by_length=True)
        one = torch.ones((), device=self._device)
        sums.add("tokens", torch.zeros_like(one), one)  # for a shard without any

        def step(part: Tensor) -> Tensor:
            micro: Any = take_rows(batch, part, self._device)
            sums.add("tokens", num_masked(micro).to(self._device), one)
            return self._loss(forward, loss, micro, totals, sums)

        grad = self._network.start_gradient()
        self._network.run(step, list(parts), backward=True)
        self._network.finish_gradient(grad)
        return grad
