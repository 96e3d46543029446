"""This process's part of a model with its weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.heads import Head
from ...models.lora import LoraSpec, checkpoint_name, insert_adapters, merge, save_adapter
from ...models.spec import ModelSpec
from ...training.network import Outputs
from ...training.optimizer import OptimizerSpec
from ...training.stored_pieces import gather_weights, pieces_on
from ...training.token_logprob import known_words, token_logprob, top_words
from ..sharded.divided_network import DividedNetwork, gathered_module
from .context_parallel import CutOutputs
from .mesh import FsdpMesh
from .model import FsdpModel
from .optimizer import FsdpAdamW
from .stored_part import StoredPart

M = TypeVar("M")
R = TypeVar("R")

_PREFIX = "module."


class FsdpNetwork(DividedNetwork):
    """A part of a model. See `mesh` for which process does what.

    Gradients and the optimizer's state lie in flat float32 buffers [size], one run per parameter;
    the weights lie where FSDP2 keeps them. Of an adapted model the adapters, and a scalar head, are
    all that is trained and all that others see.

    Args:
        model: The divided module.
        mesh: Says which part this process computes.
        context: Where the worker lives.
        spec: The model's architecture and precision.
        head: What it ends in.
        lora: What adapters in it were made by.

    Attributes:
        frozen: The model's own weights, where adapters are trained; else None.
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
        self.replicas = mesh.replicas
        self.device = mesh.shards.device
        self._grad: Tensor | None = None
        # Kept from here on: in a forward the module's own attributes are other tensors.
        named = {
            checkpoint_name(full.removeprefix(_PREFIX)): parameter
            for full, parameter in model.named_parameters()
        }
        dtype, trained = getattr(torch, spec.dtype), named
        self.frozen: StoredPart | None = None
        if lora:
            frozen = {name: p for name, p in named.items() if not p.requires_grad}
            self.frozen = StoredPart(frozen, mesh, context, dtype)
            trained = {name: p for name, p in named.items() if p.requires_grad}
            dtype = torch.float32
        self._trained = StoredPart(trained, mesh, context, dtype)
        self.layout, self.rank_layout = self._trained.layout, self._trained.rank_layout

    @property
    def vocabulary_group(self) -> dist.ProcessGroup | None:
        """The processes that share the vocabulary; None if this one has all of it."""
        return self._mesh.tensor

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """See `Network.tensors`."""
        return self._trained.tensors(buffer)

    def held_tensors(self) -> list[Tensor]:
        """See `Network.held_tensors`; the module's buffers are among them."""
        self.weights_changed()
        frozen = [] if self.frozen is None else self.frozen.tensors().values()
        return [*self.tensors().values(), *frozen, *self._model.buffers(), *self.gradients()]

    def gradients(self) -> list[Tensor]:
        """See `Network.gradients`."""
        return [] if self._grad is None else [self._grad]

    def make_optimizer(self, spec: OptimizerSpec) -> FsdpAdamW:
        """See `Network.make_optimizer`."""
        pieces = pieces_on(self.rank_layout, self.context.process)
        owned = {piece.tensor for piece in pieces if piece.first}
        return FsdpAdamW(self.tensors, spec, self.replicas, self._trained.spans_of(owned))

    def whole_module(self, first: Callable[[], nn.Module]) -> nn.Module | None:
        """See `LanguageNetwork.whole_module`."""
        if not self._lora:
            return gathered_module(self, first)
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
        """See `LanguageNetwork.save_adapter`."""
        weights = gather_weights(self, 0) if self._lora else {}
        if weights:
            save_adapter(folder, self._model.module, self._lora, weights, base)

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        """See `FsdpModel.forward`; every shard must come here equally often."""
        del shared
        context = self._mesh.context
        if context is None:
            values, anchor = self._model(tokens, reads)
            return Outputs(values, anchor=anchor)
        rows = context.cut(tokens, reads)
        placed = {"position_ids": rows.position, "context": context}
        values, anchor = self._model(rows.tokens, rows.reads, **placed)
        if self._head.is_scalar:
            return Outputs(rows.whole(values), anchor=anchor)
        return CutOutputs(values, anchor=anchor, rows=rows)

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `LanguageNetwork.token_logprob`: of context parallelism too.

        Logits of a whole vocabulary are made some at a time, as the torch engine makes them.
        """
        rows = outputs.rows if isinstance(outputs, CutOutputs) else None
        own = target if rows is None else target[rows.number]
        if self._model.apart:
            head = known_words(self._model.head, self.num_words)
            logprob, entropy = token_logprob(
                outputs.values, *head, own, None, temperature,
                needs_entropy=needs_entropy,
            )  # fmt: skip
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
        """See `LanguageNetwork.top_words`: likewise."""
        if self._model.apart:
            head = known_words(self._model.head, self.num_words)
            found = top_words(outputs.values, *head, num_words, temperature)
        else:
            found = super().top_words(outputs, num_words, temperature)
        if not isinstance(outputs, CutOutputs):
            return found
        logprob, words = found
        return outputs.rows.whole(logprob), outputs.rows.whole(words)

    def micro_batch_limit(self, limit: int, num_tokens: int) -> int:
        """See `Network.micro_batch_limit`: no shard is left idle without need.

        A process computes its part alone of the rows that it shares.
        """
        rows = self._mesh.rows.num_ranks
        limit *= self._mesh.shards.num_ranks // rows
        return max(1, min(limit, -(-num_tokens // rows)))

    def run(
        self,
        parts: Sequence[M],
        load: Callable[[M], R],
        compute: Callable[[R], Tensor],
        *,
        backward: bool,
    ) -> None:
        """See `Network.run`: of n shards each takes every n-th micro-batch, and all equally many.

        Those that share rows take the same ones. `compute` must call `outputs` once.
        """
        rows = self._mesh.rows
        rounds = -(-len(parts) // rows.num_ranks)
        mine = list(parts[rows.rank :: rows.num_ranks])
        for at in range(rounds):
            total = compute(load(mine[at])) if at < len(mine) else self._idle()
            if backward:
                total.backward()
        if not backward or self._model.keeps_gathered:
            self._model.reshard_all()

    def together(self, result: Tensor) -> Tensor:
        """See `Network.together`."""
        return self._mesh.rows.sum_(result)

    def _idle(self) -> Tensor:
        """A zero from one token, where others compute: gathering weights takes all shards."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        anchor = self.outputs(token, token == 0).anchor
        assert anchor is not None
        return anchor

    def weights_changed(self) -> None:
        """See `Network.weights_changed`: whole ones that FSDP2 keeps no longer hold."""
        self._model.reshard_all()

    def start_gradient(self) -> Tensor:
        """See `Network.start_gradient`."""
        if self._grad is None:
            size = self._trained.size
            self._grad = torch.zeros(size, dtype=torch.float32, device=self.device)
            views: Mapping[str, Tensor] = self.tensors(self._grad)
            for name, parameter in self._trained.parameters.items():
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
