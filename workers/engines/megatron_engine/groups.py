"""Which process computes which part of a model: megatron-core's process groups, made once.

All Megatron roles of a process share them, so they must all have the group's own sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ..sharded.divided_network import join_processes
from .cpu_shim import prepare_megatron

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["join_groups", "model_group", "parallel_state"]


def parallel_state() -> Any:
    """megatron-core's module of process groups."""
    prepare_megatron()
    from megatron.core import parallel_state as found

    module: ModuleType = found
    return module


def join_groups(context: WorkerContext) -> None:
    """Make megatron-core's process groups for a worker group's sizes, unless they are there.

    Every process of the worker group must call this at the same time. A group of one process needs
    no torch.distributed for anything else; it gets a default group of itself.

    Raises:
        ConfigError: If torch.distributed or megatron-core was set up for other sizes.
    """
    state = parallel_state()
    join_processes(context)
    wanted = (context.tensor_parallel, context.num_ranks, context.pipeline_parallel)
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
            tensor_model_parallel_size=context.tensor_parallel,
            pipeline_model_parallel_size=context.pipeline_parallel,
            create_gloo_process_groups=False,
        )
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        # Dropout is off everywhere, so no random state per rank is needed (nor CUDA's).
        initialize_rng_tracker(inference_rng_tracker=True)
    made = (
        state.get_tensor_model_parallel_world_size(),
        state.get_data_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
    )
    if made != wanted:
        raise ConfigError(
            f"'{context.role}' wants tensor, data and pipeline parallel sizes {wanted}, but "
            f"another Megatron role of this process has {made}; roles of one group must share them"
        )


def model_group() -> dist.ProcessGroup:
    """The processes that hold the parts of this rank's model."""
    return parallel_state().get_model_parallel_group()
