"""The device mesh of an FSDP group: which process computes which part of a model.

A data-parallel rank is `tensor_parallel` processes that share a model and get the same rows. They
form a grid: `shards` of them divide the weights by rows (FSDP2) and take different rows of a call,
and beside each stand those that divide its matrix products (tensor parallelism). Ranks are
replicas. So `WorkerContext.process` is tensor place + tensor size x (shard + shards x rank).

With context parallelism neighboring shards take the same rows, each its part of their tokens. Of n
processes, process i has chunks i and 2n - 1 - i of a row cut into 2n. A chunk attends to itself and
to all before it, so all have equally much to attend to (Llama Team, "The Llama 3 Herd of Models",
2024, section 3.3.2). Everything but attention is computed token by token. Attention gathers the
keys and values of the whole row, once in each layer; their gradients are added up and go back to
the process that each is from.

Logits stay where they are computed. Log-probabilities, values and scores are gathered, and then
every process has them for whole rows and computes the loss of these alone, as tensor-parallel
processes do: nothing that comes after the model knows that rows were cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.data_parallel import RankGroup, rank_group
from ...training.host_memory import on_host, sent
from ...training.network import Outputs
from ..divided_network import check_order, join_processes
from ..torch_engine.varlen import attend_sequences, has_kernel, places_of_rows

ATTENTION = "penstock_context_parallel"
"""Name of `attend` in transformers."""


@dataclass(frozen=True)
class ContextGroup:
    """The processes that share rows."""

    rank: int  # This process
    size: int  # How many they are
    group: dist.ProcessGroup  # torch.distributed's group of them

    @property
    def chunks(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, tokens: Tensor, reads: Tensor) -> CutRows:
        """This process's part of rows: `tokens` i64[rows, T], `reads` bool[rows, T]."""
        width, device = tokens.shape[1], tokens.device
        chunk = -(-width // (2 * self.size))
        position = torch.cat([n * chunk + torch.arange(chunk) for n in self.chunks])
        # Beyond the rows' end the last token stands again: nothing reads what follows from it.
        taken, whole = position.clamp(max=width - 1), on_host(reads)
        own = whole[:, taken] & (position < width)
        number = (whole.flatten().cumsum(0).view(whole.shape) - 1)[:, taken][own]
        return CutRows(
            tokens.index_select(1, sent(taken, device)),
            sent(own, device),
            sent(position[None], device),
            sent(number, device),
            int(whole.sum()),
            self,
        )


@dataclass(frozen=True)
class CutRows:
    """A process's part of some rows: two chunks of C tokens of each."""

    tokens: Tensor  # i64[rows, 2C]
    reads: Tensor  # bool[rows, 2C]
    position: Tensor  # i64[1, 2C]; where these tokens stand in their rows
    number: Tensor  # i64[n]; which of the whole rows' reads, row by row, each of these reads is
    num_reads: int  # Of the whole rows
    context: ContextGroup  # The processes that have the others

    def whole(self, found: Tensor) -> Tensor:
        """Gather the values at these reads, [n, ...], into those of whole rows, [num_reads, ...].

        Every process gets the same, and computes the gradient of its own, as if it alone went
        backward through the result.
        """
        made: Tensor = _Whole.apply(found, self)  # type: ignore[assignment]
        return made


@dataclass(frozen=True, kw_only=True)
class CutOutputs(Outputs):
    """Outputs at the reads of this process alone."""

    rows: CutRows  # Which those are


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    context: ContextGroup,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this process's chunks over whole rows, as transformers asks for it.

    Shapes: `query` [rows, H, 2C, E] and `key` [rows, K, 2C, E], K dividing H, with their positions
    in them; `value` as `key`. Returns [rows, 2C, H, E], and no weights. There is no
    `attention_mask`: what follows a token does not change its output, so right padding needs none.
    """
    both: Tensor = _WholeRows.apply(torch.stack([key, value]), context)  # type: ignore[assignment]
    chunk = query.shape[2] // 2
    mixed: list[Tensor] = []
    for part, number in zip(query.split(chunk, dim=2), context.chunks, strict=True):
        end = (number + 1) * chunk
        keys, values = both[:, :, :, :end]
        mixed.append(attend_to_end(part, keys, values, scaling))
    return torch.cat(mixed, dim=1), None


def attend_to_end(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last C tokens of rows of T.

    Shapes: `query` [rows, H, C, E]; `key` and `value` [rows, K, T, E]. Returns [rows, C, H, E].
    """
    (rows, heads, chunk, size), end = query.shape, key.shape[2]
    if has_kernel(query):  # its causal mask is aligned at the end
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        places = places_of_rows(rows, chunk, end, query.device)
        return attend_sequences(q, k, v, places, scale).view(rows, chunk, heads, size)
    sees = torch.ones(chunk, end, dtype=torch.bool, device=query.device).tril(end - chunk)
    gqa = heads != key.shape[1]
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=sees, scale=scale, enable_gqa=gqa
    )
    return mixed.transpose(1, 2)


class _Whole(torch.autograd.Function):
    """See `CutRows.whole`."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, rows: CutRows) -> Tensor:
        ctx.number = rows.number
        whole = found.new_zeros(rows.num_reads, *found.shape[1:])
        whole[rows.number] = found
        dist.all_reduce(whole, group=rows.context.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.number], None


class _WholeRows(torch.autograd.Function):
    """Every process's two chunks, [..., 2C, E], as whole rows in order, [..., 2nC, E]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        parts = [torch.empty_like(own) for _ in range(context.size)]
        dist.all_gather(parts, own, group=context.group)
        halves = [part.chunk(2, dim=-2) for part in parts]
        return torch.cat([*(a for a, _ in halves), *(b for _, b in reversed(halves))], dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: ContextGroup = ctx.context
        chunks = grads[0].chunk(2 * context.size, dim=-2)
        pairs = zip(chunks[: context.size], chunks[: -context.size - 1 : -1], strict=True)
        parts = [torch.cat(pair, dim=-2) for pair in pairs]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=context.group)
        return own, None


@dataclass(frozen=True)
class FsdpMesh:
    """This process's place."""

    replicas: RankGroup  # The ranks: each has rows of its own, and holds the same weights
    shards: RankGroup  # The processes that divide the same weights by rows
    rows: RankGroup  # Those of them that share out a rank's rows: all, without context parallelism
    context: ContextGroup | None  # Those that share every row; None if this one computes whole rows
    # The context of a worker that computes alone what this process does: a process with rows
    # of its own is a data-parallel rank there
    beside: WorkerContext
    # The processes that divide matrix products, in the order of the vocabulary; None if that is
    # this one alone
    tensor: dist.ProcessGroup | None
    mesh: DeviceMesh  # All processes: ("replica", "shard", "tensor")

    @property
    def tensor_size(self) -> int:
        return self.mesh.size(2)


def check_division(context: WorkerContext, shards: int, share_rows: int) -> None:
    size = context.tensor_parallel
    if size % shards:
        raise ConfigError(
            f"'{context.role}' has shards={shards}, which does not divide the {size} processes "
            "that share its model\n    set executor.tensor_parallel to a multiple of shards"
        )
    if size % share_rows:
        raise ConfigError(
            f"'{context.role}' has context_parallel={share_rows}, which does not divide the {size} "
            "processes that share its model\n    set executor.tensor_parallel to a multiple of it"
        )
    if shards % share_rows:
        raise ConfigError(
            f"'{context.role}' has context_parallel={share_rows}, which does not divide its "
            f"{shards} shards\n    set engine.options.shards to a multiple of it"
        )
    if context.pipeline_parallel > 1:
        raise ConfigError(
            f"'{context.role}' is on a group of {context.pipeline_parallel} pipeline stages, which "
            "engine=fsdp does not have\n    set executor.pipeline_parallel to 1, or engine=megatron"
        )


def join_mesh(context: WorkerContext, shards: int | None, share_rows: int = 1) -> FsdpMesh:
    """Make the process groups of a worker group, or find them; all its processes must, at once."""
    size = context.tensor_parallel
    shards = size if shards is None else shards
    check_division(context, shards, share_rows)
    check_order(context.places)
    device = torch.device(context.device)
    join_processes(context)
    tensor = size // shards
    mesh = _mesh(device.type, replica=context.num_ranks, shard=shards, tensor=tensor)
    shard, place = divmod(context.tensor_rank, tensor)
    row, part = divmod(shard, share_rows)
    num_rows = shards // share_rows
    sharded = RankGroup(shard, shards, device, mesh.get_group("shard"))
    rows, sharing = sharded, None
    if share_rows > 1:
        # The same processes, with the shards told apart that take the same rows.
        cut = _mesh(
            device.type, replica=context.num_ranks, rows=num_rows, context=share_rows, tensor=tensor
        )
        rows = RankGroup(row, num_rows, device, cut.get_group("rows"))
        sharing = ContextGroup(part, share_rows, cut.get_group("context"))
    beside = replace(
        context,
        rank=row + num_rows * context.rank,
        num_ranks=num_rows * context.num_ranks,
        tensor_rank=place + tensor * part,
        tensor_parallel=tensor * share_rows,
    )
    return FsdpMesh(
        replicas=rank_group(context, device),
        shards=sharded,
        rows=rows,
        context=sharing,
        beside=beside,
        tensor=mesh.get_group("tensor") if tensor > 1 else None,
        mesh=mesh,
    )


@lru_cache
def _mesh(kind: str, **sizes: int) -> DeviceMesh:
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
