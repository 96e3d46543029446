"""Which process computes which part of a model: megatron-core's process groups, made once.

A data-parallel rank is `tensor_parallel` x `pipeline_parallel` processes that share a model and get
the same rows. With expert parallelism n, n of the former divide a mixture's experts and take
different rows of a call, and beside each stand those that divide its matrix products: so
`WorkerContext.tensor_rank` is tensor place + tensor size x expert place.

All Megatron roles of a process share the groups, so they must all have the same sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.data_parallel import RankGroup
from ..sharded.divided_network import join_processes
from .cpu_shim import prepare_megatron

if TYPE_CHECKING:
    from types import ModuleType


def parallel_state() -> Any:
    """megatron-core's module of process groups."""
    from megatron.core import parallel_state as found

    module: ModuleType = found
    return module


def join_groups(context: WorkerContext, expert_parallel: int = 1) -> WorkerContext:
    """Make megatron-core's process groups for a worker group's sizes, unless they are there.

    Every process of the worker group must call this at the same time. A group of one process needs
    no torch.distributed for anything else; it gets a default group of itself.

    Args:
        context: Where the worker lives.
        expert_parallel: Processes that divide the experts.

    Returns:
        The context of a worker that computes alone what this process does: every expert place of
        every rank is a data-parallel rank there.

    Raises:
        ConfigError: If the group's processes cannot be divided so, or torch.distributed or
            megatron-core was set up for other sizes or another kind of device.
    """
    beside = beside_experts(context, expert_parallel)
    prepare_megatron(context.device)
    state = parallel_state()
    join_processes(context)
    size, place = dist.get_world_size(), dist.get_rank()
    if (size, place) != (context.num_processes, context.process):
        raise ConfigError(
            f"'{context.role}' is process {context.process} of {context.num_processes}, but "
            f"torch.distributed was started as process {place} of {size}; a Megatron group must "
            "own its processes"
        )
    if not state.model_parallel_is_initialized():
        # Its default order of ranks (tensor, data, pipeline) is that of `WorkerContext.process`.
        state.initialize_model_parallel(
            tensor_model_parallel_size=beside.tensor_parallel,
            pipeline_model_parallel_size=beside.pipeline_parallel,
            expert_model_parallel_size=expert_parallel,
            create_gloo_process_groups=False,
        )
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        # Dropout is off everywhere, so no random state per rank is needed (nor CUDA's).
        initialize_rng_tracker(inference_rng_tracker=True)
    wanted = (*_sizes(beside), expert_parallel)
    made = (
        state.get_tensor_model_parallel_world_size(),
        state.get_data_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
    )
    if made != wanted:
        raise ConfigError(
            f"'{context.role}' wants tensor, data, pipeline and expert parallel sizes {wanted}, "
            f"but another Megatron role of this process has {made}; roles of one group must share "
            "them"
        )
    return beside


def _sizes(context: WorkerContext) -> tuple[int, int, int]:
    return context.tensor_parallel, context.num_ranks, context.pipeline_parallel


def beside_experts(context: WorkerContext, experts: int) -> WorkerContext:
    """Return the context of a worker that computes alone what this process does.

    Raises:
        ConfigError: If the group's processes cannot be divided so.
    """
    if context.tensor_parallel % experts:
        raise ConfigError(
            f"'{context.role}' has expert_parallel={experts}, which does not divide the "
            f"{context.tensor_parallel} processes that share its model\n"
            "    set executor.tensor_parallel to a multiple of expert_parallel"
        )
    tensor = context.tensor_parallel // experts
    expert, place = divmod(context.tensor_rank, tensor)
    return replace(
        context,
        rank=expert + experts * context.rank,
        num_ranks=experts * context.num_ranks,
        tensor_rank=place,
        tensor_parallel=tensor,
    )


def expert_ranks(device: torch.device) -> RankGroup:
    """The processes that divide the experts of this process's rank, and share out its rows."""
    state = parallel_state()
    size: int = state.get_expert_model_parallel_world_size()
    return RankGroup(
        state.get_expert_model_parallel_rank(),
        size,
        device,
        state.get_expert_model_parallel_group(),
    )


def model_group() -> dist.ProcessGroup:
    """The processes that hold the parts of this rank's model."""
    return parallel_state().get_model_parallel_group()
