"""This process's part of a model with its weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .layout import held_box
from .mesh import FsdpMesh
from .model import FsdpModel

__all__ = ["FsdpNetwork"]

M = TypeVar("M")

_PREFIX = "module."


class FsdpNetwork:
    """A part of a model.

    Gradients and the optimizer's state lie in flat float32 buffers [size], one run per parameter;
    the weights lie where FSDP2 keeps them.

    Args:
        model: The divided module.
        mesh: Which part this is.

    Attributes:
        shapes: Parameter -> its whole shape, by the checkpoint's names; tied weights appear once.
        size: Weights that this process stores.
    """

    def __init__(self, model: FsdpModel, mesh: FsdpMesh) -> None:
        self._model = model
        self._mesh = mesh
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

    def _check(self, name: str, local: Tensor) -> None:
        """FSDP2 must have cut as `fsdp_layout` says, or other engines would be told untruths."""
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

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._mesh.shards.device

    def engine_tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """Views of a flat buffer by parameter, shaped as this process's weights (by default those).

        Whoever writes to weights calls `forget_gathered` afterwards.
        """
        if buffer is None:
            return dict(self._local)
        return {
            name: buffer[begin:end].view_as(self._local[name])
            for name, (begin, end) in self._spans.items()
        }

    def held_tensors(self) -> list[Tensor]:
        """All that lies on the device between calls: weights, gradients, buffers."""
        self.forget_gathered()
        grad = [] if self._grad is None else [self._grad]
        return [*self._local.values(), *self._model.buffers(), *grad]

    def spans(self, tensors: Set[str]) -> list[tuple[int, int]]:
        """Where some parameters lie in flat buffers."""
        return [span for name, span in self._spans.items() if name in tensors]

    def outputs(self, tokens: Tensor, reads: Tensor) -> tuple[Tensor, Tensor]:
        """See `FsdpModel.forward`; every shard must come here equally often."""
        return self._model(tokens, reads)

    def deal(self, parts: Sequence[M]) -> list[M | None]:
        """Every n-th micro-batch, this shard's; as many on all shards, None where it has none."""
        shards = self._mesh.shards
        rounds = -(-len(parts) // shards.num_ranks)
        mine = list(parts[shards.rank :: shards.num_ranks])
        return [*mine, *[None] * (rounds - len(mine))]

    def even_limit(self, limit: int, num_tokens: int) -> int:
        """A bound on micro-batches that leaves none of the shards idle without need."""
        return max(1, min(limit, -(-num_tokens // self._mesh.shards.num_ranks)))

    def run(self, step: Callable[[M], Tensor], parts: Sequence[M], *, backward: bool) -> None:
        """Take this shard's micro-batches through the model.

        Args:
            step: A micro-batch to the scalar to go backward from; must call `outputs` once.
            parts: All micro-batches of the rank, the same on all of its processes.
            backward: Whether gradients are wanted; they are added to `start_gradient`'s buffer.
        """
        for part in self.deal(parts):
            total = self._idle() if part is None else step(part)
            if backward:
                total.backward()
        if not backward:
            self.forget_gathered()

    def together(self, result: Tensor) -> Tensor:
        """A result of which each shard has set its rows and left the others zero, in place."""
        return self._mesh.shards.sum_(result)

    def _idle(self) -> Tensor:
        """A zero from one token, where others compute: gathering weights takes all shards."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        return self.outputs(token, token == 0)[1]

    def forget_gathered(self) -> None:
        """Drop whole weights that FSDP2 keeps between forwards, which no longer hold."""
        for part in self._model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def start_gradient(self) -> Tensor:
        """A zeroed f32[size] buffer, which `run` adds gradients to."""
        if self._grad is None:
            self._grad = torch.zeros(self.size, dtype=torch.float32, device=self.device)
            views: Mapping[str, Tensor] = self.engine_tensors(self._grad)
            for name, parameter in self._parameters.items():
                # bfloat16 gradients of micro-batches are added up in float32 as well.
                parameter.register_post_accumulate_grad_hook(_adds_to(views[name]))
        return self._grad.zero_()

    def finish_gradient(self, grad: Tensor) -> None:
        """Add up over tensor-parallel processes what each has of its own heads: their norms."""
        if self._mesh.tensor is None:
            return
        views = self.engine_tensors(grad)
        parts = [v for n, v in views.items() if n.endswith(("q_norm.weight", "k_norm.weight"))]
        if parts:
            together = torch.cat(parts)
            dist.all_reduce(together, group=self._mesh.tensor)
            sums = together.split([len(part) for part in parts])
            for part, total in zip(parts, sums, strict=True):
                part.copy_(total)


def _adds_to(view: Tensor) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        view.add_(parameter.grad.to_local())
        parameter.grad = None

    return hook
