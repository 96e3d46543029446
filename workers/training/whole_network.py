"""A model of which every process of a group has all weights, in one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.sharding import whole
from .data_parallel import rank_group
from .flat_parameters import FlatParameters
from .host_memory import give_back_freed
from .optimizer import AdamW, OptimizerSpec

M = TypeVar("M")
R = TypeVar("R")

_LARGE = 1 << 24
"""Weights from which on a backward pass is long beside giving freed memory back."""


class WholeNetwork:
    """A `Network` that is computed in one process; ranks are replicas, which begin as rank 0.

    Args:
        module: The model; its weights move into one flat buffer.
        context: Where the worker lives.
        flat: That buffer, if the order of the weights in it matters.

    Attributes:
        flat: The buffer.
    """

    sort_by_length = False
    is_divided = False

    def __init__(
        self, module: nn.Module, context: WorkerContext, flat: FlatParameters | None = None
    ) -> None:
        self.module = module
        self.flat = FlatParameters(module) if flat is None else flat
        self.context = context
        self.device = self.flat.data.device
        self._is_large = sum(weight.numel() for weight in module.parameters()) > _LARGE
        self.replicas = rank_group(context, self.device)
        self.replicas.broadcast_(self.flat.data)
        shapes = {name: tuple(self.flat.parameter(name).shape) for name in self.flat.names}
        dtype = str(self.flat.data.dtype).removeprefix("torch.")
        self.layout = whole(shapes, range(context.num_processes), dtype=dtype)
        # Exported as they lie in the buffer: whoever samples noise for one after another sees that.
        lying = {name: shapes[name] for name in sorted(shapes, key=self.flat.span)}
        self.rank_layout = whole(lying, [context.process], dtype=dtype)

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        source = self.flat.data if buffer is None else buffer
        return {name: self.flat.view(source, name) for name in self.flat.names}

    def whole_module(self, first: Callable[[], nn.Module]) -> nn.Module | None:
        return self.module

    def save_adapter(self, folder: Path, base: str | None) -> None:
        """There are no adapters."""

    def held_tensors(self) -> list[Tensor]:
        return [self.flat.data, *self.gradients()]

    def gradients(self) -> list[Tensor]:
        return [] if self.flat.grad is None else [self.flat.grad]

    def weights_changed(self) -> None:
        """Nothing here is derived from the weights."""

    def make_optimizer(self, spec: OptimizerSpec) -> AdamW:
        return AdamW(self.flat.data, spec)

    def micro_batch_limit(self, limit: int, num_tokens: int) -> int:
        """There is one process."""
        return limit

    def run(
        self,
        parts: Sequence[M],
        load: Callable[[M], R],
        compute: Callable[[R], Tensor],
        *,
        backward: bool,
    ) -> None:
        for part in parts:
            total = compute(load(part))
            if backward:
                if self._is_large:
                    # The peak is now, and what the forward pass freed would lie beside it.
                    give_back_freed(self.device)
                total.backward()

    def together(self, result: Tensor) -> Tensor:
        """There is one process."""
        return result

    def start_gradient(self) -> Tensor:
        return self.flat.enable_gradients()

    def finish_gradient(self, grad: Tensor) -> Tensor:
        """All ranks' are added up."""
        return self.replicas.sum_(grad)
