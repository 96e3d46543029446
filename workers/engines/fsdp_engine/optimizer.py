"""AdamW over this process's part of every parameter.

The formula and the clipping are the torch engine's own (`optimizer.py`); the state is divided as
the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...training.data_parallel import RankGroup
from ...training.optimizer import AdamW, OptimizerSpec, square_sum, update_weights


class FsdpAdamW(AdamW):
    """Steps the weights of a network, which all replicas hold alike.

    Args:
        views: Makes views of the weights, and of a flat buffer laid out as they are, by parameter.
        spec: Options.
        replicas: The ranks that hold the same part.
        counted: Spans that count in the global norm: of weights that several processes of a model
            hold, one process counts.
    """

    def __init__(
        self,
        views: Callable[[Tensor | None], Mapping[str, Tensor]],
        spec: OptimizerSpec,
        replicas: RankGroup,
        counted: Sequence[tuple[int, int]],
    ) -> None:
        self._views = views
        self._replicas = replicas
        self._counted = counted
        super().__init__(torch.empty(0), spec)  # the weights are no single tensor

    def _own(self, grad: Tensor) -> Tensor:
        return self._replicas.sum_(grad)

    def _norm(self, own: Tensor) -> float:
        """Of all processes; replicas are counted as one."""
        square = square_sum(own, self._counted)
        if self._replicas.rank > 0:
            square.zero_()
        dist.all_reduce(square)
        return math.sqrt(float(square))

    def _update(self, own: Tensor, lr: float) -> None:
        grads = self._views(own)
        state = {kind: self._views(buffer) for kind, buffer in self._allocated().items()}
        end = 0
        for name, weight in self._views(None).items():
            begin, end = end, end + weight.numel()
            if any(start <= begin and end <= stop for start, stop in self._frozen):
                continue  # a parameter is frozen whole
            mine = {kind: views[name] for kind, views in state.items()}
            update_weights(weight, grads[name], mine, self._spec, lr, self.steps)

    def _weights(self) -> Tensor:
        return torch.cat([part.reshape(-1) for part in self._views(None).values()])
