"""The training loop over a model that is spread over stages and tensor-parallel processes."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ....dataflow.graph.role import Loss
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.microbatch import micro_batches, take_rows
from ...training.optimizer import OptimizerSpec
from ...training.trainer import Forward, Sums, TrainLoop, num_masked
from .network import MegatronNetwork
from .optimizer import SharedAdamW

__all__ = ["MegatronTrainer"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]


class MegatronTrainer(TrainLoop[O]):
    """Optimizer steps on one part of a model.

    All processes of a data-parallel rank are given the same rows and cut them alike; the last
    stage's compute the loss, and all of its tensor-parallel processes get the same.

    Args:
        context: Where the worker lives.
        network: The part.
        optimizer: Steps it.
        spec: The learning rate's schedule.
        micro_batch_tokens: Tokens computed at once, padding not counted.
    """

    def __init__(
        self,
        context: WorkerContext,
        network: MegatronNetwork,
        optimizer: SharedAdamW,
        spec: OptimizerSpec,
        micro_batch_tokens: int,
    ) -> None:
        super().__init__(context, spec, network.flat.data.device)
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
        """Of this rank's rows; the optimizer adds up over ranks.

        `forward` is called on the last stage alone.
        """
        local = take_rows(batch, rows)
        totals = self._group.sum_(loss.totals(local).double().to(self._device))
        # Right-padded rows are multiplied as they are, so rows of similar length go together.
        parts = micro_batches(batch, rows, loss.unit, self._micro_batch_tokens, sort_by_length=True)
        one = torch.ones((), device=self._device)

        def step(part: Tensor) -> Tensor:
            micro: Any = take_rows(batch, part, self._device)
            if not self._network.is_last:
                return self._network.states(micro.tokens)
            return self._loss(forward, loss, micro, totals, sums)

        grad = self._network.start_gradient()
        self._network.run(step, list(parts), backward=True)
        self._network.finish_gradient(grad)
        sums.add("tokens", num_masked(local).to(self._device), one)
        return grad
