"""Which process computes which part of a model: the device mesh of an FSDP group.

A data-parallel rank is `tensor_parallel` processes that share a model and get the same rows. They
form a grid: `shards` of them divide the weights by rows (FSDP2) and take different rows of a call,
and beside each stand those that divide its matrix products (tensor parallelism). Ranks are
replicas. So `WorkerContext.process` is tensor place + tensor size x (shard + shards x rank).

With context parallelism neighboring shards take the same rows, each its part of their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.data_parallel import RankGroup, rank_group
from ..sharded.divided_network import join_processes
from .context_parallel import ContextGroup


@dataclass(frozen=True)
class FsdpMesh:
    """This process's place.

    Attributes:
        replicas: The ranks: each has rows of its own, and holds the same weights.
        shards: The processes that divide the same weights by rows.
        rows: Those of them that share out a rank's rows: all, without context parallelism.
        context: Those that share every row; None if this one computes whole rows.
        beside: The context of a worker that computes alone what this process does: whoever takes
            rows of his own is a data-parallel rank there.
        tensor: The processes that divide matrix products, in the order of the vocabulary; None if
            that is this one alone.
        mesh: All processes: ("replica", "shard", "tensor").
    """

    replicas: RankGroup
    shards: RankGroup
    rows: RankGroup
    context: ContextGroup | None
    beside: WorkerContext
    tensor: dist.ProcessGroup | None
    mesh: DeviceMesh

    @property
    def tensor_size(self) -> int:
        """Processes that divide matrix products."""
        return self.mesh.size(2)


def check_division(context: WorkerContext, shards: int, share_rows: int) -> None:
    """Whether a worker group's processes can be divided so.

    Raises:
        ConfigError: If they cannot; says what to set.
    """
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
    """Make the process groups of a worker group, or find them.

    Every process of the group must call this at the same time. A group of one process needs no
    torch.distributed for anything else; it gets a default group of itself.

    Args:
        context: Where the worker lives.
        shards: See `FsdpOptions.shards`.
        share_rows: See `FsdpOptions.context_parallel`.

    Raises:
        ConfigError: If the group's processes cannot be divided so.
    """
    size = context.tensor_parallel
    shards = size if shards is None else shards
    check_division(context, shards, share_rows)
    device = torch.device(context.device)
    join_processes(context)
    tensor = size // shards
    mesh = _mesh(device.type, context.num_ranks, shards, tensor)
    shard, place = divmod(context.tensor_rank, tensor)
    row, part = divmod(shard, share_rows)
    num_rows = shards // share_rows
    sharded = RankGroup(shard, shards, device, mesh.get_group("shard"))
    rows, sharing = sharded, None
    if share_rows > 1:
        cut = _cut_mesh(device.type, context.num_ranks, num_rows, share_rows, tensor)
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
def _mesh(kind: str, replicas: int, shards: int, tensor: int) -> DeviceMesh:
    names = ("replica", "shard", "tensor")
    return init_device_mesh(kind, (replicas, shards, tensor), mesh_dim_names=names)


@lru_cache
def _cut_mesh(kind: str, replicas: int, rows: int, context: int, tensor: int) -> DeviceMesh:
    """The same processes, with the shards told apart that take the same rows."""
    names = ("replica", "rows", "context", "tensor")
    return init_device_mesh(kind, (replicas, rows, context, tensor), mesh_dim_names=names)
