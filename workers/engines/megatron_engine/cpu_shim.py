"""What megatron-core 0.16.1 assumes about CUDA, adapted where a model is on the CPU.

`prepare_megatron` is called before anything else of the engine imports megatron-core. For a GPU it
changes nothing. For the CPU, be there a GPU beside it or not, it gives a few of megatron-core's own
modules another `torch` to look names up in: torch itself, except for what `_CpuTorch` and
`_CpuCuda` list. torch stays as it is for everyone else, so `torch.cuda.is_available()` tells nobody
a lie.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ....dataflow.errors import ConfigError

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
        """A device that factories accept."""
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
        """`torch.zeros`."""
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_PREPARED_FOR: list[str] = []
"""The kind of device, once it has been done."""


def prepare_megatron(device: str) -> None:
    """Import megatron-core, without its notes on optional CUDA packages, for a kind of device.

    Args:
        device: Where this process computes: "cpu" or "cuda:0".

    Raises:
        ConfigError: If megatron-core was prepared for the other kind in this process.
    """
    kind = torch.device(device).type
    if not _PREPARED_FOR:
        _prepare(kind)
        _PREPARED_FOR.append(kind)
    if [kind] != _PREPARED_FOR:
        raise ConfigError(
            f"a Megatron role is on '{device}', and another of this process on "
            f"'{_PREPARED_FOR[0]}'\n    put all Megatron roles of a group on one kind of device"
        )


def _prepare(kind: str) -> None:
    with warnings.catch_warnings(), _not_compiled(kind):
        # Apex, Transformer Engine and others are absent: the layers built here use none of them.
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        modules: dict[str, Any] = {name: importlib.import_module(name) for name in _ADAPTED}
    if kind != "cpu":
        return
    for module in modules.values():
        module.torch = _CpuTorch("torch")
    # It would advise an environment variable that orders kernels on a GPU.
    layers = modules["megatron.core.tensor_parallel.layers"]
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True


def _as_written(function: Any, **_: object) -> Any:
    return function


@contextmanager
def _not_compiled(kind: str) -> Generator[None]:
    """On the CPU, what is imported meanwhile leaves its small functions as they are written.

    megatron-core decorates them with `torch.compile`. That loads torch's compiler, a quarter of the
    time that the import takes, and would run a C++ compiler for each that is called.
    """
    compiler = torch.compile
    if kind == "cpu":
        torch.compile = _as_written
    try:
        yield
    finally:
        torch.compile = compiler
