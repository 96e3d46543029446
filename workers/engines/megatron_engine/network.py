"""This process's part of a model with its weights and gradients, and megatron-core's schedules.

Weights and gradients lie in one flat buffer each, as in the torch engine, instead of in
megatron-core's own gradient buffers: those average over data-parallel ranks and cut the optimizer
state at bucket boundaries, where the state here is saved as boxes of the checkpoint's parameters.

Imported only after `groups.prepare_megatron`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.sharding import Sharding
from ...training.checkpoint_files import pieces_on
from ...training.data_parallel import RankGroup, rank_group, worker_group
from ...training.flat_parameters import FlatParameters
from ...training.host_memory import derived, masked
from ...training.network import M, MicroBatches, Outputs, R
from ...training.optimizer import AdamW, JoinedAdamW, OptimizerSpec, SharedAdamW
from ..divided_network import DividedNetwork, sum_parts
from .groups import enter_groups, expert_ranks, model_group
from .model import Backbone

_LAYER = "decoder.layers."


class MegatronNetwork(DividedNetwork):
    """A part of a model."""

    engine = "the Megatron engine"

    def __init__(
        self,
        backbone: Backbone,
        context: WorkerContext,
        replicas: RankGroup,
        layout: Sharding,
        rank_layout: Sharding,
        *,
        tied: bool,
        share_optimizer: bool,
    ) -> None:
        self.context = context
        self.layout, self.rank_layout = layout, rank_layout
        named = dict(backbone.named_parameters())
        # Last what the processes of an expert group do not share.
        # Its weights under megatron-core's names, with layers counted from the stage's first
        self.flat = FlatParameters({name: named[name] for name in sorted(named, key=_is_expert)})
        self.device = self.flat.data.device
        self.replicas = replicas
        self.rows = expert_ranks(self.device)
        group: Any = parallel_state.get_tensor_model_parallel_group()
        self.vocabulary_group = group
        # Whether outputs are computed here
        self.is_last = context.stage == context.pipeline_parallel - 1
        self._backbone: Any = backbone
        self._share_optimizer = share_optimizer
        self._tied_ends = tied and context.pipeline_parallel > 1
        self._offset = context.stage * len(self._backbone.decoder.layers)
        divided = [self.flat.span(name)[0] for name in self.flat.names if _is_expert(name)]
        # Experts are the end of the buffer, so one place divides it.
        self._num_shared = min(divided, default=len(self.flat.data))

    def engine_name(self, name: str) -> str:
        """The name in `layout` of a tensor of `flat`."""
        if name.startswith(_LAYER):
            layer, rest = name.removeprefix(_LAYER).split(".", 1)
            return f"{_LAYER}{int(layer) + self._offset}.{rest}"
        if name == "output_layer.weight" and self._tied_ends:
            return "embedding.word_embeddings.weight"
        return name

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        source = self.flat.data if buffer is None else buffer
        return {self.engine_name(name): self.flat.view(source, name) for name in self.flat.names}

    def held_tensors(self) -> list[Tensor]:
        return [self.flat.data, *self.gradients()]

    def gradients(self) -> list[Tensor]:
        return [] if self.flat.grad is None else [self.flat.grad]

    def make_optimizer(self, spec: OptimizerSpec) -> AdamW:
        data, split = self.flat.data, self._num_shared
        counted = self._counted()

        def stepped(
            begin: int, end: int, ranks: RankGroup, groups: list[dist.ProcessGroup | None]
        ) -> SharedAdamW:
            own = [(max(a, begin) - begin, min(b, end) - begin) for a, b in counted]
            return SharedAdamW(
                data[begin:end],
                spec,
                ranks,
                counted=[span for span in own if span[0] < span[1]],
                model_groups=groups,
                shared=self._share_optimizer,
            )

        # What expert groups share, all of their processes hold alike.
        shared = stepped(0, split, rank_group(self.context, self.device), [model_group()])
        if split == len(data):
            return shared
        groups = [model_group(), self.rows.group]
        experts = stepped(split, len(data), self.replicas, groups)
        return JoinedAdamW(data, spec, [shared, experts], [split, len(data) - split])

    def states(self, tokens: Tensor) -> Tensor:
        """States that this stage sends, [T, rows, D]; tokens i64[rows, T] count in the first."""
        return self._backbone(
            input_ids=self._padded(tokens, 0).clamp(min=0), position_ids=None, attention_mask=None
        )

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        # What follows a token does not change its output, so padding needs no mask.
        states = self.states(tokens)
        if self._backbone.config.sequence_parallel:
            # The head below adds up its input's gradient over processes, so here it is only cut.
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        padded = derived(reads, partial(self._padded, value=False))
        picked = masked(states.transpose(0, 1), padded)
        head: Any = self._backbone.output_layer
        # The stage before waits for a gradient of the states, whatever is read.
        anchor = states.reshape(-1)[0].float() * 0
        if isinstance(head, nn.Linear):
            return Outputs(head(picked), anchor=anchor)
        weight = self._backbone.shared_embedding_or_output_weight() if head.weight is None else None
        return Outputs(head(picked, weight=weight)[0], anchor=anchor)

    def _padded(self, column: Tensor, value: float) -> Tensor:
        if not self._backbone.config.sequence_parallel:
            return column
        return F.pad(column, (0, -column.shape[1] % self.context.tensor_parallel), value=value)

    def run(self, given: MicroBatches[M, R], *, backward: bool) -> None:
        # Micro-batches go through all stages: one forward, one backward in turn; the last stage
        # alone computes outputs. Processes that divide the experts share them out.
        if not given.parts:
            return
        enter_groups(self.context, self.rows.num_ranks)
        mine = self.share(given.parts)
        nothing = torch.zeros((), dtype=torch.int, device=self.device)

        def forward_step(
            waiting: Iterator[M | None], model: nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]]]:
            part = next(waiting)
            if part is None:
                sent = self.idle()
            else:
                rows: Any = given.load(part)
                sent = given.compute(rows) if self.is_last else self.states(rows.tokens)
            return sent, lambda total: (total, nothing, None)

        # Widths vary, so the length here is not looked at; the rows are sent along as well.
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(mine),
            model=self._backbone,
            num_microbatches=len(mine),
            seq_length=self.context.tensor_parallel,
            micro_batch_size=1,
            forward_only=not backward,
        )

    def idle(self) -> Tensor:
        if self.is_last:
            return super().idle()
        return self.states(torch.zeros(1, 1, dtype=torch.int64, device=self.device))

    def start_gradient(self) -> Tensor:
        return self.flat.enable_gradients()

    def finish_gradient(self, grad: Tensor) -> Tensor:
        enter_groups(self.context, self.rows.num_ranks)
        # Weights that a tensor-parallel process has whole but uses on a part: head norms on its
        # heads, routers for its part of experts, all norms on its part of the sequence.
        if self.context.tensor_parallel > 1:
            partial = ("q_layernorm.weight", "k_layernorm.weight", "gate.weight")
            if self._backbone.config.sequence_parallel:
                partial = ("layernorm.weight", "gate.weight")
            names = [name for name in self.flat.names if name.endswith(partial)]
            sum_parts([self.flat.view(grad, name) for name in names], self.vocabulary_group)
        # The embedding and its copy under the last stage's head.
        if self._tied_ends and (self.context.stage == 0 or self.is_last):
            first = self.context.stage == 0
            table = "embedding.word_embeddings.weight" if first else "output_layer.weight"
            dist.all_reduce(self.flat.view(grad, table), group=parallel_state.get_embedding_group())
        return grad

    def _counted(self) -> list[tuple[int, int]]:
        """Places in the buffers of the tensors that count in the gradient's norm, runs as one."""
        # Of those that share a tensor, and have the same gradient, the first counts.
        ours = set(worker_group(self.context).processes(self.context.rank))
        patterns = tuple(
            tuple(piece for piece in pattern if piece.device in ours)
            for pattern in self.rank_layout.patterns
        )
        held = pieces_on(replace(self.rank_layout, patterns=patterns), self.context.process)
        tensors = {piece.tensor for piece in held if piece.first}
        spans: list[tuple[int, int]] = []
        for name in self.flat.names:
            start, stop = self.flat.span(name)
            if self.engine_name(name) not in tensors:
                continue
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        return spans


def _is_expert(name: str) -> bool:
    """Whether an expert group's processes have other numbers under this name."""
    return ".mlp.experts." in name
