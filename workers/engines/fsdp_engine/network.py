"""This process's part of a model with its weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.sharding import Sharding
from ...models.lora import (
    AdapterDropout,
    LoraSpec,
    checkpoint_name,
    insert_adapters,
    merge,
    save_adapter,
)
from ...models.spec import Head, ModelSpec
from ...training.checkpoint_files import gather_weights, pieces_on
from ...training.data_parallel import RankGroup, sum_over
from ...training.network import M, MicroBatches, Outputs, R
from ...training.optimizer import AdamW, OptimizerSpec, square_sum, state_bytes, update_each
from ...training.token_logprob import known_words, token_logprob, top_words
from ..divided_network import DividedNetwork, divided_sharding, held_box, sum_parts
from .mesh import CutOutputs, FsdpMesh
from .model import FsdpModel


class FsdpAdamW(AdamW):
    """AdamW over this process's part of every parameter, which all replicas hold alike."""

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

    def _square(self, own: Tensor) -> Tensor:
        """The sum over all processes; replicas are counted as one."""
        square = square_sum(own, self._counted)
        if self._replicas.rank > 0:
            square.zero_()
        sum_over(square)
        return square

    def _update(self, own: Tensor, lr: float) -> None:
        grads = self._views(own)
        state = {kind: self._views(buffer) for kind, buffer in self._allocated().items()}
        parts: list[tuple[Tensor, Tensor, Mapping[str, Tensor]]] = []
        end = 0
        for name, weight in self._views(None).items():
            begin, end = end, end + weight.numel()
            if begin == end or any(a <= begin and end <= b for a, b in self._frozen):
                continue  # a parameter is frozen whole
            mine = {kind: views[name] for kind, views in state.items()}
            parts.append((weight, grads[name], mine))
        if parts:  # a shard may have none
            update_each(parts, self._spec, lr, self.steps, self._clip)

    @property
    def num_bytes(self) -> int:
        return sum(map(state_bytes, self._views(None).values()))

    def _weights(self) -> Tensor:
        return torch.cat([part.reshape(-1) for part in self._views(None).values()])


class StoredPart:
    """Parameters where FSDP2 keeps them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: FsdpMesh,
        context: WorkerContext,
        dtype: torch.dtype,
    ) -> None:
        # Where a worker would live that computed alone what this process does
        self.context = mesh.beside
        self.parameters = parameters
        self.shapes: dict[str, tuple[int, ...]] = {}  # Parameter -> its whole shape
        self.size = 0  # Numbers that this process stores
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
        # Which process of the group stores what; devices are numbered like processes
        self.layout = divided_sharding(self.shapes, replicas=context.num_ranks, **sizes)
        # The same of this data-parallel rank's processes alone
        self.rank_layout = divided_sharding(self.shapes, first=first, **sizes)

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
        if buffer is None:
            return dict(self._local)
        return {
            name: buffer[begin:end].view_as(self._local[name])
            for name, (begin, end) in self._spans.items()
        }

    def spans_of(self, names: set[str]) -> list[tuple[int, int]]:
        return [span for name, span in self._spans.items() if name in names]


_PREFIX = "module."


class FsdpNetwork(DividedNetwork):
    """A part of a model. See `mesh` for which process does what.

    Gradients and the optimizer's state lie in flat float32 buffers [size], one run per parameter;
    the weights lie where FSDP2 keeps them. Of an adapted model the adapters, and a scalar head, are
    all that is trained and all that others see.
    """

    engine = "the FSDP engine"

    def __init__(
        self,
        model: FsdpModel,
        mesh: FsdpMesh,
        context: WorkerContext,
        spec: ModelSpec,
        head: Head,
        lora: LoraSpec,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._head, self._lora = head, lora
        self.context = mesh.beside
        self.rows, self.vocabulary_group = mesh.rows, mesh.tensor
        self.replicas = mesh.replicas
        self.device = mesh.shards.device
        self._grad: Tensor | None = None
        # Kept from here on: in a forward the module's own attributes are other tensors.
        named = {
            checkpoint_name(full.removeprefix(_PREFIX)): parameter
            for full, parameter in model.named_parameters()
        }
        dtype, trained = getattr(torch, spec.dtype), named
        # The model's own weights, where adapters are trained; else None
        self.frozen: StoredPart | None = None
        if lora:
            frozen = {name: p for name, p in named.items() if not p.requires_grad}
            self.frozen = StoredPart(frozen, mesh, context, dtype)
            trained = {name: p for name, p in named.items() if p.requires_grad}
            dtype = torch.float32
        self._dropout = AdapterDropout.of(model)
        self._trained = StoredPart(trained, mesh, context, dtype)
        self.layout, self.rank_layout = self._trained.layout, self._trained.rank_layout

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        return self._trained.tensors(buffer)

    def held_tensors(self) -> list[Tensor]:
        # The module's buffers are among them.
        self.weights_changed()
        frozen = [] if self.frozen is None else self.frozen.tensors().values()
        return [*self.tensors().values(), *frozen, *self._model.buffers(), *self.gradients()]

    def frozen_weights(self) -> tuple[Sharding, dict[str, Tensor]] | None:
        return None if self.frozen is None else (self.frozen.layout, self.frozen.tensors())

    def gradients(self) -> list[Tensor]:
        return [] if self._grad is None else [self._grad]

    def make_optimizer(self, spec: OptimizerSpec) -> FsdpAdamW:
        pieces = pieces_on(self.rank_layout, self.context.process)
        owned = {piece.tensor for piece in pieces if piece.first}
        return FsdpAdamW(self.tensors, spec, self.replicas, self._trained.spans_of(owned))

    def whole_module(self, first: Callable[[], nn.Module]) -> nn.Module | None:
        if not self._lora:
            return super().whole_module(first)
        weights = gather_weights(self, 0)
        if not weights:
            return None
        module = first()
        adapters = insert_adapters(module, self._lora, but=self._head.name)
        for name, value in weights.items():
            # What was trained is float32, whatever the model is.
            target = adapters[name] if name in adapters else module.get_parameter(name)
            target.data = value
        return merge(module)

    def save_adapter(self, folder: Path, base: str | None) -> None:
        weights = gather_weights(self, 0) if self._lora else {}
        if weights:
            save_adapter(folder, self._model.module, self._lora, weights, base)

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        # Every shard must come here equally often.
        context, dropout = self._mesh.context, self._dropout
        dropout.keys = dropout.keys_of(tokens)
        if context is None:
            values, anchor = self._model(tokens, reads)
            return Outputs(values, anchor=anchor)
        rows = context.cut(tokens, reads)
        if dropout.keys is not None:
            dropout.keys = dropout.keys[:, rows.position[0].clamp(max=tokens.shape[1] - 1)]
        placed = {"position_ids": rows.position, "context": context}
        values, anchor = self._model(rows.tokens, rows.reads, **placed)
        if self._head.is_scalar:
            return Outputs(rows.whole(values), anchor=anchor)
        return CutOutputs(values, anchor=anchor, rows=rows)

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = outputs.rows if isinstance(outputs, CutOutputs) else None
        own = target if rows is None else target[rows.number]
        if self._model.apart:
            head = known_words(self._model.head, self.num_words)
            # Logits of a whole vocabulary are made some at a time, as the torch engine does.
            logprob, entropy = token_logprob(
                outputs.values, *head, own, None, temperature, needs_entropy=needs_entropy
            )
        else:
            logprob, entropy = super().token_logprob(
                outputs, own, temperature, needs_entropy=needs_entropy
            )
        if rows is None:
            return logprob, entropy
        return rows.whole(logprob), None if entropy is None else rows.whole(entropy)

    def top_words(
        self, outputs: Outputs, num_words: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        if self._model.apart:
            head = known_words(self._model.head, self.num_words)
            found = top_words(outputs.values, *head, num_words, temperature)
        else:
            found = super().top_words(outputs, num_words, temperature)
        if not isinstance(outputs, CutOutputs):
            return found
        logprob, words = found
        return outputs.rows.whole(logprob), outputs.rows.whole(words)

    def idle(self) -> Tensor:
        total = super().idle()
        if self._model.apart:
            # FSDP2 adds up gradients of what has one: here as well, where no logits are made.
            total = total + self._model.head.weight.reshape(-1)[0].float() * 0
        return total

    def micro_batch_limit(self, limit: int, num_tokens: int) -> int:
        # A process computes its part alone of the rows that it shares.
        shared = self._mesh.shards.num_ranks // self.rows.num_ranks
        return super().micro_batch_limit(limit * shared, num_tokens)

    def run(self, given: MicroBatches[M, R], *, backward: bool) -> None:
        # Processes that share rows take the same ones. `compute` must call `outputs` once.
        with self._dropout.active(self.context, trains=backward):
            for part in self.share(given.parts):
                total = self.idle() if part is None else given.compute(given.load(part))
                if backward:
                    total.backward()
        if not backward or self._model.keeps_gathered:
            self._model.reshard_all()

    def weights_changed(self) -> None:
        self._model.reshard_all()  # whole ones that FSDP2 keeps no longer hold

    def start_gradient(self) -> Tensor:
        if self._grad is None:
            size = self._trained.size
            self._grad = torch.zeros(size, dtype=torch.float32, device=self.device)
            views: Mapping[str, Tensor] = self.tensors(self._grad)
            for name, parameter in self._trained.parameters.items():
                # bfloat16 gradients of micro-batches are added up in float32 as well.
                parameter.register_post_accumulate_grad_hook(partial(_hand_over, views[name]))
        return self._grad.zero_()

    def finish_gradient(self, grad: Tensor) -> Tensor:
        if self.vocabulary_group is not None:  # each process has the norms of its own heads
            views = self.tensors(grad)
            parts = [v for n, v in views.items() if n.endswith(("q_norm.weight", "k_norm.weight"))]
            sum_parts(parts, self.vocabulary_group)
        return grad


def _hand_over(view: Tensor, parameter: Tensor) -> None:
    assert isinstance(parameter.grad, DTensor)
    view.add_(parameter.grad.to_local())
    parameter.grad = None
