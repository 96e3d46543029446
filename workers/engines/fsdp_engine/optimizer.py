"""AdamW over this process's part of every parameter.

The formula and the clipping are the torch engine's own (`optimizer.py`); the state is divided as
the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ...training.data_parallel import RankGroup
from ...training.optimizer import (
    OptimizerSpec,
    clip_gradient,
    forget_moments,
    optimizer_buffers,
    update_weights,
)
from .network import FsdpNetwork

__all__ = ["FsdpAdamW"]


class FsdpAdamW:
    """Steps the weights of a network, which all replicas hold alike.

    Args:
        network: The part.
        spec: Options.
        replicas: The ranks that hold the same part.
        counted: Parameters that count in the global norm: of weights that several processes of a
            model hold, one process counts.

    Attributes:
        steps: Optimizer steps taken.
    """

    def __init__(
        self, network: FsdpNetwork, spec: OptimizerSpec, replicas: RankGroup, counted: set[str]
    ) -> None:
        self._network = network
        self._spec = spec
        self._replicas = replicas
        self._counted = network.spans(counted)
        self._buffers: dict[str, Tensor] = {}
        self.steps = 0

    def step(self, grad: Tensor, lr: float) -> float:
        """Add up `grad` over replicas, clip it, take one step, return its norm before clipping.

        Args:
            grad: f32[size], this replica's; it is overwritten.
            lr: Learning rate of this step.

        Raises:
            FloatingPointError: If the norm is not finite; no weight has changed then, on any
                process.
        """
        self._replicas.sum_(grad)
        norm = self._norm(grad)
        clip_gradient(grad, norm, self._spec, self.steps + 1)
        self.steps += 1
        tensors = self._network.engine_tensors
        grads = tensors(grad)
        state = {kind: tensors(buffer) for kind, buffer in self._allocated().items()}
        for name, weight in tensors().items():
            mine = {kind: views[name] for kind, views in state.items()}
            update_weights(weight, grads[name], mine, self._spec, lr, self.steps)
        return norm

    def _norm(self, grad: Tensor) -> float:
        """Of all processes; replicas are counted as one."""
        lengths = [torch.linalg.vector_norm(grad[a:b]) for a, b in self._counted]
        square = torch.stack([*lengths, grad.new_zeros(())]).double().square().sum()
        if self._replicas.rank > 0:
            square.zero_()
        dist.all_reduce(square)
        return math.sqrt(float(square))

    def _weights(self) -> Tensor:
        """This process's weights as one tensor, for buffers laid out as they are."""
        return torch.cat([part.reshape(-1) for part in self._network.engine_tensors().values()])

    def _allocated(self) -> dict[str, Tensor]:
        if not self._buffers:
            self._buffers |= self.new_state()
        return self._buffers

    def restart(self) -> None:
        """Forget all steps taken; the weights stay."""
        self.steps = 0
        forget_moments(self._buffers)

    @property
    def buffers(self) -> list[Tensor]:
        """Moments and master weights, as far as they exist."""
        return list(self._buffers.values())

    def refresh(self) -> None:
        """Take over weights that were loaded from outside."""
        self._network.forget_gathered()
        if "master" in self._buffers:
            self._buffers["master"].copy_(self._weights())

    def state(self) -> dict[str, Tensor]:
        """The optimizer's buffers, f32[size] each; none before a step."""
        return dict(self._buffers)

    def new_state(self) -> dict[str, Tensor]:
        """Buffers to fill and hand to `load_state`."""
        return optimizer_buffers(self._weights())

    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Take over what `state` gave, in this layout or another; load the weights first."""
        self._buffers = dict(state)
        self.steps = steps
