"""What the FSDP workers share: building, evaluation in micro-batches, training.

See `fsdp_mesh` for which process does what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.first_weights import model_source
from ...models.spec import ModelSpec
from ...training.checkpoint_files import TensorSource, WholeTensors
from ...training.host_offload import SleepsInHostMemory
from ...training.train_calls import check_columns
from ..sharded.worker import ShardedWorker, chunks_of
from .layout import fsdp_sharding
from .mesh import join_mesh
from .model import FsdpModel, HeadName, build_model
from .network import FsdpNetwork
from .optimizer import FsdpAdamW
from .options import FsdpOptions
from .trainer import FsdpTrainer

__all__ = ["FsdpWorker"]


class FsdpWorker(SleepsInHostMemory, ShardedWorker):
    """This process's part of a Hugging Face model, and a trainer unless it is frozen.

    Args:
        context: Where the worker lives.
        model: Architecture and weights.
        options: How it computes.
        head: A scalar head and what it is called; None for the language model's own.

    Raises:
        ConfigError: If the group's processes cannot be divided as asked.
        PlanError: If the model cannot be divided as the group is.
    """

    def __init__(
        self,
        context: WorkerContext,
        model: ModelSpec,
        options: FsdpOptions,
        head: tuple[HeadName, nn.Linear] | None = None,
    ) -> None:
        mesh = join_mesh(context, options.shards)
        name: HeadName = "lm_head" if head is None else head[0]
        module = build_model(model, mesh, name)
        self.network = FsdpNetwork(module, mesh)
        shapes, dtype = self.network.shapes, model.dtype
        sizes: dict[str, Any] = {"shards": mesh.shards.num_ranks, "tensor": mesh.tensor_size}
        first = context.rank * context.tensor_parallel
        super().__init__(
            context,
            model,
            self.network,
            fsdp_sharding(shapes, replicas=context.num_ranks, dtype=dtype, **sizes),
            fsdp_sharding(shapes, first=first, dtype=dtype, **sizes),
            self.network.device,
        )
        self._micro_batch_tokens = options.micro_batch_tokens
        self._load(_first_weights(model, module, name), exact=False, but=name if head else None)
        if head is not None:
            added = {f"{name}.{part}": value for part, value in head[1].named_parameters()}
            self._load(WholeTensors(added), exact=False, only=name)
        if options.optimizer is not None:
            counted = {piece.tensor for piece in self._pieces if piece.first}
            optimizer = FsdpAdamW(self.network, options.optimizer, mesh.replicas, counted)
            self._trainer = FsdpTrainer[Any](
                mesh, self.network, optimizer, options.optimizer, options.micro_batch_tokens
            )

    def device_tensors(self) -> list[Tensor]:
        """See `SleepsInHostMemory`."""
        states = [] if self._trainer is None else self._trainer.optimizer.buffers
        return [*self.network.held_tensors(), *states]

    def weights_changed(self) -> None:
        """Tell network and optimizer that weights were written from outside."""
        self.network.forget_gathered()
        super().weights_changed()

    def _evaluate(
        self,
        tokens: Tensor,
        mask: Tensor,
        compute: Callable[[Tensor, Tensor], Tensor],
        *,
        per_token: bool,
    ) -> Tensor:
        """Apply `compute` to rows without gradients, in micro-batches; f32, where tokens were.

        `compute` maps tokens and mask of some rows, cut to width W, to [rows, W] if `per_token`,
        else to [rows]. Every shard computes some rows; all processes of the rank get all results.
        """
        check_columns(tokens, mask)
        shape = tokens.shape if per_token else tokens.shape[:1]
        result = torch.zeros(shape, dtype=torch.float32, device=self.device)

        def step(part: tuple[Tensor, int]) -> Tensor:
            rows, width = part
            some, where = tokens[rows, :width].to(self.device), rows.to(self.device)
            found = compute(some, mask[rows, :width].to(self.device))
            if per_token:
                result[where, :width] = found
            else:
                result[where] = found
            return found

        limit = self.network.even_limit(self._micro_batch_tokens, int((tokens >= 0).sum()))
        with torch.no_grad():
            self.network.run(step, list(chunks_of(tokens, limit)), backward=False)
        return self.network.together(result).to(tokens.device)


def _first_weights(spec: ModelSpec, model: FsdpModel, head: HeadName) -> TensorSource:
    """Of the families whose files are known only what a process needs is read."""
    if model.known:
        return model_source(spec)
    if head == "lm_head":
        return WholeTensors(dict(spec.causal_lm("cpu").named_parameters()))
    backbone: nn.Module = spec.backbone("cpu")
    return WholeTensors({f"model.{name}": value for name, value in backbone.named_parameters()})
