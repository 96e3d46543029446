"""Megatron-core's process groups, made once: which process computes which part of a model.

A data-parallel rank is `tensor_parallel` x `pipeline_parallel` processes that share a model and get
the same rows. With expert parallelism n, n of the former divide a mixture's experts and take
different rows of a call, and beside each stand those that divide its matrix products: so
`WorkerContext.tensor_rank` is tensor place + tensor size x expert place.

megatron-core has its groups in global variables. Those of workers of other sizes in a process
(`DeviceGroup.within`) are kept apart, and put there before anything is computed.

`prepare_megatron` is called before anything else of the engine imports megatron-core, and adapts
what megatron-core 0.16.1 assumes about CUDA where a model is on the CPU, be there a GPU beside it
or not: it gives a few of megatron-core's own modules another `torch` to look names up in: torch
itself, except for what `_CpuTorch` and `_CpuCuda` list. torch stays as it is for everyone else, so
`torch.cuda.is_available()` stays true to the machine.
"""

from __future__ import annotations

import importlib
import re
import types
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.data_parallel import RankGroup
from ..divided_network import check_order, join_processes

_ADAPTED = {
    # Buffers of tensor-parallel gathers and reductions are made on the "current CUDA device".
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.layers",
    # The buffer that all of those share.
    "megatron.core.utils",
    # Rotary frequencies are moved to the current CUDA device at the first forward pass.
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    # A pipeline's messages are received on the current CUDA device, after a synchronization.
    "megatron.core.pipeline_parallel.p2p_communication",
    # The count of tokens over micro-batches is made with device="cuda".
    "megatron.core.pipeline_parallel.schedules",
}


class _CpuCuda(types.ModuleType):
    """`torch.cuda` where the current device is the CPU, whose work is done when a call returns."""

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def synchronize() -> None:
        """Nothing runs behind anyone's back."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """`torch` where a factory that is asked for "cuda" answers with the CPU."""

    cuda = _CpuCuda("torch.cuda")

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_PREPARED_FOR: list[str] = []
"""The kind of device, once it has been done."""


def prepare_megatron(device: str) -> None:
    """Import megatron-core, without its notes on optional CUDA packages, for a kind of device."""
    kind = torch.device(device).type
    if not _PREPARED_FOR:
        _import_megatron(kind)
        _PREPARED_FOR.append(kind)
    if [kind] != _PREPARED_FOR:
        raise ConfigError(
            f"a Megatron role is on '{device}', and another of this process on "
            f"'{_PREPARED_FOR[0]}'\n    put all Megatron roles of a group on one kind of device"
        )


def _as_written(function: Any, **_: object) -> Any:
    return function


def _import_megatron(kind: str) -> None:
    compiler = torch.compile
    if kind == "cpu":
        # megatron-core decorates small functions with it. That loads torch's compiler, a quarter of
        # the time that the import takes, and would run a C++ compiler for each that is called.
        torch.compile = _as_written
    try:
        with warnings.catch_warnings():
            # Apex, Transformer Engine and others are absent: the layers built here use none.
            warnings.simplefilter("ignore")
            importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
            modules: dict[str, Any] = {name: importlib.import_module(name) for name in _ADAPTED}
    finally:
        torch.compile = compiler
    if kind != "cpu":
        return
    for module in modules.values():
        module.torch = _CpuTorch("torch")
    # It would advise an environment variable that orders kernels on a GPU.
    layers = modules["megatron.core.tensor_parallel.layers"]
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True


def parallel_state() -> Any:
    from megatron.core import parallel_state as found

    return found


def join_groups(context: WorkerContext, expert_parallel: int = 1) -> WorkerContext:
    """Make megatron-core's process groups for a worker group's sizes, unless they are there.

    Every process of the worker group must call this at the same time. Returns the context of
    `beside_experts`.
    """
    beside = beside_experts(context, expert_parallel)
    check_order(context.places)
    prepare_megatron(context.device)
    join_processes(context)
    assert dist.get_world_size() == context.num_processes, "a Megatron group owns its processes"
    enter_groups(beside, expert_parallel)
    return beside


def enter_groups(beside: WorkerContext, expert_parallel: int) -> None:
    """Have megatron-core use the groups of a worker's sizes, until another's are entered."""
    sizes = (beside.tensor_parallel, beside.num_ranks, beside.pipeline_parallel)
    vars(parallel_state()).update(_groups(*sizes, expert_parallel))


@lru_cache
def _groups(tensor: int, data: int, stages: int, experts: int) -> dict[str, Any]:
    """megatron-core's global variables for these sizes; made once per process."""
    state = parallel_state()
    names = [name for name in vars(state) if re.fullmatch(r"_[A-Z_]+", name)]
    vars(state).update(dict.fromkeys(names))  # those of other sizes are kept by their own call
    # Its default order of ranks (tensor, data, pipeline) is that of `WorkerContext.process`.
    state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=experts,
        create_gloo_process_groups=False,
    )
    assert state.get_data_parallel_world_size() == data
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    # Dropout is off everywhere, so no random state per rank is needed (nor CUDA's).
    initialize_rng_tracker(inference_rng_tracker=True)
    return {name: getattr(state, name) for name in names}


def beside_experts(context: WorkerContext, experts: int) -> WorkerContext:
    """Return the context of a worker that computes alone what this process does.

    Every expert place of every rank is a data-parallel rank there.
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
    return parallel_state().get_model_parallel_group()
