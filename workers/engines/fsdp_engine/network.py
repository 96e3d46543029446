"""This process's part of a model with its weights and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.sharding import Box, Pattern, Sharding, Slice, StoredParam, volume
from ...models.heads import Head
from ...models.lora import LoraSpec, checkpoint_name, insert_adapters, merge, save_adapter
from ...models.spec import ModelSpec
from ...training.checkpoint_files import gather_weights, pieces_on
from ...training.network import Outputs
from ...training.optimizer import OptimizerSpec
from ...training.token_logprob import known_words, token_logprob, top_words
from ..sharded.divided_network import DividedNetwork, gathered_module
from .context_parallel import CutOutputs
from .mesh import FsdpMesh
from .model import FsdpModel
from .optimizer import FsdpAdamW

_BY_ROWS = re.compile(r"(.*\.)?(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)")
_BY_COLUMNS = re.compile(r"(.*\.)?(o_proj|down_proj)\.weight")


def tensor_cut(name: str) -> int | None:
    """Return the dimension in which tensor parallelism cuts a parameter of Llama, Qwen2 or Qwen3.

    None if every process has all of it.
    """
    if _BY_ROWS.fullmatch(name):
        return 0
    return 1 if _BY_COLUMNS.fullmatch(name) else None


def held_box(
    name: str, shape: tuple[int, ...], shard: int, shards: int, place: int, tensor: int
) -> Box:
    """Return the part of a parameter that one process holds; may be empty.

    Args:
        name: The parameter.
        shape: Its shape; `tensor` divides the dimension it is cut in.
        shard: This process's shard, one of `shards`.
        shards: Processes that divide rows.
        place: This process's place, one of `tensor`.
        tensor: Processes that divide matrix products.
    """
    box = [(0, size) for size in shape]
    cut = tensor_cut(name) if tensor > 1 else None
    if cut is not None:
        width = shape[cut] // tensor
        box[cut] = (place * width, (place + 1) * width)
    start, stop = box[0]
    size = -(-(stop - start) // shards)
    begin = start + shard * size
    box[0] = (min(begin, stop), min(begin + size, stop))
    return tuple(box)


def fsdp_sharding(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    shards: int,
    tensor: int,
    replicas: int = 1,
    first: int = 0,
    dtype: str,
) -> Sharding:
    """Return which process of an FSDP group stores what.

    Args:
        shapes: Parameter -> its shape, in the order of the checkpoint.
        shards: Processes that divide rows.
        tensor: Processes that divide matrix products.
        replicas: Ranks, which hold the same.
        first: The first process; the others follow, tensor place fastest, then shard, then rank.
        dtype: Data type of the weights.
    """
    patterns: dict[Pattern, int] = {}
    params: list[StoredParam] = []
    for name, shape in shapes.items():
        slices: list[Slice] = []
        for process in range(replicas * shards * tensor):
            beside, place = divmod(process, tensor)
            box = held_box(name, shape, beside % shards, shards, place, tensor)
            if volume(box):
                slices.append(Slice(first + process, box, (0,) * len(shape)))
        index = patterns.setdefault(tuple(slices), len(patterns))
        params.append(StoredParam(name, shape, index, name, tuple(range(len(shape)))))
    devices = tuple(range(first, first + replicas * shards * tensor))
    return Sharding(devices, tuple(params), tuple(patterns), dtype)


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
        layout: Which process of the group stores what; devices are numbered like processes.
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
        """Return what this process holds, or views of a flat buffer [size] laid out like it."""
        if buffer is None:
            return dict(self._local)
        return {
            name: buffer[begin:end].view_as(self._local[name])
            for name, (begin, end) in self._spans.items()
        }

    def spans_of(self, names: set[str]) -> list[tuple[int, int]]:
        """Return where some parameters lie in a flat buffer of `tensors`."""
        return [span for name, span in self._spans.items() if name in names]


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
