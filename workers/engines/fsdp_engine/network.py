"""This process's part of a model with its weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.network import Outputs
from ...training.optimizer import OptimizerSpec
from ...training.stored_pieces import pieces_on
from ..sharded.divided_network import DividedNetwork
from .layout import fsdp_sharding, held_box
from .mesh import FsdpMesh
from .model import FsdpModel
from .optimizer import FsdpAdamW

__all__ = ["FsdpNetwork"]

M = TypeVar("M")
R = TypeVar("R")

_PREFIX = "module."


class FsdpNetwork(DividedNetwork):
    """A part of a model. See `mesh` for which process does what.

    Gradients and the optimizer's state lie in flat float32 buffers [size], one run per parameter;
    the weights lie where FSDP2 keeps them.

    Args:
        model: The divided module.
        mesh: Says which part this process computes.
        context: Where the worker lives.
        dtype: Data type of the weights.

    Attributes:
        shapes: Parameter -> its whole shape, by the checkpoint's names; tied weights appear once.
        size: Weights that this process stores.
    """

    engine = "the FSDP engine"

    def __init__(
        self, model: FsdpModel, mesh: FsdpMesh, context: WorkerContext, dtype: str
    ) -> None:
        self._model = model
        self._mesh = mesh
        self.context = mesh.beside
        self.replicas = mesh.replicas
        self.device = mesh.shards.device
        self._local: dict[str, Tensor] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.size = 0
        self._grad: Tensor | None = None
        # Kept from here on: in a forward the module's own attributes are other tensors.
        self._parameters: dict[str, nn.Parameter] = {}
        for full, parameter in model.named_parameters():
            name = full.removeprefix(_PREFIX)
            assert isinstance(parameter, DTensor)
            self._parameters[name] = parameter
            self.shapes[name] = tuple(parameter.shape)
            local = parameter.to_local().detach()
            self._check(name, local)
            self._local[name] = local
            self._spans[name] = (self.size, self.size + local.numel())
            self.size += local.numel()
        sizes: dict[str, Any] = {"shards": mesh.shards.num_ranks, "tensor": mesh.tensor_size}
        sizes["dtype"] = dtype
        first = context.rank * context.tensor_parallel
        self.layout = fsdp_sharding(self.shapes, replicas=context.num_ranks, **sizes)
        self.rank_layout = fsdp_sharding(self.shapes, first=first, **sizes)

    def _check(self, name: str, local: Tensor) -> None:
        """FSDP2 must have cut as `layout` says, or other engines would be told untruths."""
        shards, place = self._mesh.shards, 0
        if self._mesh.tensor is not None:
            place = self._mesh.tensor.rank()
        box = held_box(
            name, self.shapes[name], shards.rank, shards.num_ranks, place, self._mesh.tensor_size
        )
        expected = [stop - start for start, stop in box]
        if list(local.shape) != expected:
            raise RuntimeError(
                f"this version of torch holds {list(local.shape)} of '{name}' on shard "
                f"{shards.rank}, expected {expected}; engine=fsdp cannot use it"
            )

    @property
    def vocabulary_group(self) -> dist.ProcessGroup | None:
        """The processes that share the vocabulary; None if this one has all of it."""
        return self._mesh.tensor

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """See `Network.tensors`."""
        if buffer is None:
            return dict(self._local)
        return {
            name: buffer[begin:end].view_as(self._local[name])
            for name, (begin, end) in self._spans.items()
        }

    def held_tensors(self) -> list[Tensor]:
        """See `Network.held_tensors`; the module's buffers are among them."""
        self.weights_changed()
        grad = [] if self._grad is None else [self._grad]
        return [*self._local.values(), *self._model.buffers(), *grad]

    def make_optimizer(self, spec: OptimizerSpec) -> FsdpAdamW:
        """See `Network.make_optimizer`."""
        pieces = pieces_on(self.rank_layout, self.context.process)
        owned = {piece.tensor for piece in pieces if piece.first}
        counted = [span for name, span in self._spans.items() if name in owned]
        return FsdpAdamW(self.tensors, spec, self.replicas, counted)

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        """See `FsdpModel.forward`; every shard must come here equally often."""
        del shared
        values, anchor = self._model(tokens, reads)
        return Outputs(values, anchor=anchor)

    def micro_batch_limit(self, limit: int, num_tokens: int) -> int:
        """See `Network.micro_batch_limit`: no shard is left idle without need."""
        return max(1, min(limit, -(-num_tokens // self._mesh.shards.num_ranks)))

    def run(
        self,
        parts: Sequence[M],
        load: Callable[[M], R],
        compute: Callable[[R], Tensor],
        *,
        backward: bool,
    ) -> None:
        """See `Network.run`: of n shards each takes every n-th micro-batch, and all equally many.

        `compute` must call `outputs` once.
        """
        shards = self._mesh.shards
        rounds = -(-len(parts) // shards.num_ranks)
        mine = list(parts[shards.rank :: shards.num_ranks])
        for at in range(rounds):
            total = compute(load(mine[at])) if at < len(mine) else self._idle()
            if backward:
                total.backward()
        if not backward:
            self.weights_changed()

    def together(self, result: Tensor) -> Tensor:
        """See `Network.together`."""
        return self._mesh.shards.sum_(result)

    def _idle(self) -> Tensor:
        """A zero from one token, where others compute: gathering weights takes all shards."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return self._model(token, token == 0)[1]

    def weights_changed(self) -> None:
        """See `Network.weights_changed`: whole ones that FSDP2 keeps no longer hold."""
        for part in self._model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def start_gradient(self) -> Tensor:
        """See `Network.start_gradient`."""
        if self._grad is None:
            self._grad = torch.zeros(self.size, dtype=torch.float32, device=self.device)
            views: Mapping[str, Tensor] = self.tensors(self._grad)
            for name, parameter in self._parameters.items():
                # bfloat16 gradients of micro-batches are added up in float32 as well.
                parameter.register_post_accumulate_grad_hook(_adds_to(views[name]))
        return self._grad.zero_()

    def finish_gradient(self, grad: Tensor) -> Tensor:
        """See `Network.finish_gradient`: what a tensor-parallel process has of its heads' norms."""
        if self._mesh.tensor is None:
            return grad
        views = self.tensors(grad)
        parts = [v for n, v in views.items() if n.endswith(("q_norm.weight", "k_norm.weight"))]
        if parts:
            together = torch.cat(parts)
            dist.all_reduce(together, group=self._mesh.tensor)
            sums = together.split([len(part) for part in parts])
            for part, total in zip(parts, sums, strict=True):
                part.copy_(total)
        return grad


def _adds_to(view: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        view.add_(parameter.grad.to_local())
        parameter.grad = None

    return hook
