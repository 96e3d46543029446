"""Some of a divided model's parameters, and what this process stores of them.

A model's trained parameters are one part. Beside adapters its frozen weights are another: nobody
steps, sends or saves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....dataflow.runtime.worker_protocol import WorkerContext
from .layout import fsdp_sharding, held_box
from .mesh import FsdpMesh


class StoredPart:
    """Parameters where FSDP2 keeps them.

    Args:
        parameters: By the checkpoint's names, in its order; tied weights appear once.
        mesh: Says which part this process computes.
        context: Where the worker lives.
        dtype: Data type of them all.

    Attributes:
        context: Where a worker would live that computed alone what this process does.
        parameters: As given.
        shapes: Parameter -> its whole shape.
        size: Numbers that this process stores.
        layout: Who in the group stores what; devices are numbered as its processes.
        rank_layout: The same of this data-parallel rank's processes alone.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: FsdpMesh,
        context: WorkerContext,
        dtype: torch.dtype,
    ) -> None:
        self.context = mesh.beside
        self.parameters = parameters
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.size = 0
        self._local: dict[str, Tensor] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        for name, parameter in parameters.items():
            assert isinstance(parameter, DTensor)
            self.shapes[name] = tuple(parameter.shape)
            local = parameter.to_local().detach()
            self._check(name, local, mesh)
            assert local.dtype == dtype, f"'{name}' is {local.dtype}, not {dtype}"
            self._local[name] = local
            self._spans[name] = (self.size, self.size + local.numel())
            self.size += local.numel()
        sizes: dict[str, Any] = {"shards": mesh.shards.num_ranks, "tensor": mesh.tensor_size}
        sizes["dtype"] = str(dtype).removeprefix("torch.")
        first = context.rank * context.tensor_parallel
        self.layout = fsdp_sharding(self.shapes, replicas=context.num_ranks, **sizes)
        self.rank_layout = fsdp_sharding(self.shapes, first=first, **sizes)

    def _check(self, name: str, local: Tensor, mesh: FsdpMesh) -> None:
        """Require that FSDP2 has cut as `layout` says, which other engines go by."""
        shards = mesh.shards
        place = 0 if mesh.tensor is None else mesh.tensor.rank()
        box = held_box(
            name, self.shapes[name], shards.rank, shards.num_ranks, place, mesh.tensor_size
        )
        expected = [stop - start for start, stop in box]
        if list(local.shape) != expected:
            raise RuntimeError(
                f"this version of torch holds {list(local.shape)} of '{name}' on shard "
                f"{shards.rank}, expected {expected}; engine=fsdp cannot use it"
            )

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """What this process holds, or views of a flat buffer [size] laid out as it is."""
        if buffer is None:
            return dict(self._local)
        return {
            name: buffer[begin:end].view_as(self._local[name])
            for name, (begin, end) in self._spans.items()
        }

    def spans_of(self, names: set[str]) -> list[tuple[int, int]]:
        """Where some parameters lie in such a buffer."""
        return [span for name, span in self._spans.items() if name in names]
