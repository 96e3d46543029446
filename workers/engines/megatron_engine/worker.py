"""What the Megatron workers share: building, evaluation over stages, training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.inputs.layout import Layout
from ....planner.resharding.box import volume
from ...models.first_weights import model_source
from ...models.spec import ModelSpec
from ...training.checkpoint_files import WholeTensors
from ...training.data_parallel import rank_group
from ...training.host_offload import SleepsInHostMemory
from ...training.train_calls import check_columns
from ..sharded.worker import ShardedWorker, chunks_of, group_of
from .groups import join_groups, model_group
from .layout import HeadName, megatron_sharding
from .options import MegatronOptions

__all__ = ["MegatronWorker"]


class MegatronWorker(SleepsInHostMemory, ShardedWorker):
    """This process's part of a model, and a trainer unless it is frozen.

    Args:
        context: Where the worker lives.
        model: Architecture and weights.
        head: A scalar head and what it is called; None for the language model's own.
        options: How it computes.

    Raises:
        ConfigError: If the engine cannot compute the model.
        PlanError: If the model cannot be divided as the group is.
    """

    def __init__(
        self,
        context: WorkerContext,
        model: ModelSpec,
        options: MegatronOptions,
        head: tuple[HeadName, nn.Linear] | None = None,
    ) -> None:
        join_groups(context)
        from .model import build_backbone, supported_shape
        from .network import MegatronNetwork

        self._micro_batch_tokens = options.micro_batch_tokens
        config = model.config
        shape = supported_shape(config, model.dtype)
        name: HeadName = "lm_head" if head is None else head[0]
        one = Layout(tp=context.tensor_parallel, pp=context.pipeline_parallel)
        layout = one.model_copy(update={"dp": context.num_ranks})
        everyone = range(context.num_processes)
        ours = sorted(group_of(context).processes(context.rank))
        # Before the backbone: megatron-core asserts what these explain.
        stored = megatron_sharding(shape, layout, everyone, head=name)
        rank_stored = megatron_sharding(shape, one, ours, head=name)
        backbone = build_backbone(
            config, shape, context, name, sequence_parallel=options.sequence_parallel
        )
        tied = shape.tied_embeddings and head is None
        self.network = MegatronNetwork(backbone, context, tied=tied)
        super().__init__(
            context,
            model,
            self.network,
            stored,
            rank_stored,
            self.network.flat.data.device,
        )
        self._load(model_source(model), exact=False, but=name if head else None)
        if head is not None:
            added = {f"{name}.{part}": value for part, value in head[1].named_parameters()}
            self._load(WholeTensors(added), exact=False, only=name)
        if options.optimizer is not None:
            self._trainer = self._make_trainer(options)

    def _make_trainer(self, options: MegatronOptions) -> Any:
        from .optimizer import SharedAdamW
        from .trainer import MegatronTrainer

        assert options.optimizer is not None
        optimizer = SharedAdamW(
            self.network.flat.data,
            options.optimizer,
            rank_group(self.context, self.device),
            counted=self.network.spans({piece.tensor for piece in self._pieces if piece.first}),
            model_group=model_group(),
            shared=options.share_optimizer,
        )
        return MegatronTrainer[Any](
            self.context, self.network, optimizer, options.optimizer, options.micro_batch_tokens
        )

    def device_tensors(self) -> list[Tensor]:
        """See `SleepsInHostMemory`."""
        states = [] if self._trainer is None else self._trainer.optimizer.buffers
        return [*self.network.buffers(), *states]

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
        else to [rows]. It is called on the last stage; the others return zeros.
        """
        check_columns(tokens, mask)
        shape = tokens.shape if per_token else tokens.shape[:1]
        result = torch.zeros(shape, dtype=torch.float32, device=tokens.device)

        def step(part: tuple[Tensor, int]) -> Tensor:
            rows, width = part
            some = tokens[rows, :width].to(self.device)
            if not self.network.is_last:
                return self.network.states(some)
            found = compute(some, mask[rows, :width].to(self.device)).to(tokens.device)
            if per_token:
                result[rows, :width] = found
            else:
                result[rows] = found
            return torch.zeros((), device=self.device)

        with torch.no_grad():
            self.network.run(
                step, list(chunks_of(tokens, self._micro_batch_tokens)), backward=False
            )
        return result

    @property
    def num_elements(self) -> int:
        """Weights that this process stores."""
        return sum(volume(piece.box) for piece in self._pieces)
