"""Tensors of one process on a GPU, seen by another process on the same GPU.

Where trainer and generator are two processes on one device, what stays on the device need not
travel: the generator opens the trainer's tensors and carries the plan out by itself, with those as
the source's tensors (`copy_local`, or `Transfer` with `process_of` naming the generator's process).
NCCL does not let two processes of a group share a GPU, so there is no other way but through the
host.

A share is numbers and text, no pickle. It is good for one opening, on the same machine, while the
process that made it lives and keeps the tensors; after an optimizer step the views show the new
values once the sharing process has synchronized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import (
    rebuild_cuda_tensor,  # pyright: ignore[reportUnknownVariableType]
    reduce_tensor,  # pyright: ignore[reportUnknownVariableType]
)

from .version_tracker import WeightsError

__all__ = ["CudaShare", "open_cuda", "share_cuda"]


@dataclass(frozen=True)
class CudaShare:
    """Where a tensor lies; handles as hexadecimal text.

    Attributes:
        gpu: The GPU's own identifier, the same in all processes.
        dtype: Name of the tensor's dtype.
        shape: Of the tensor.
        stride: In elements.
        offset: In its storage, in elements.
        memory: Handle of the allocation that the storage lies in.
        storage_bytes: Size of the storage.
        storage_offset_bytes: Where the storage begins in the allocation.
        counter: Handle of the count of openings.
        counter_offset: Where it is.
        event: Handle of the event after which the values are there.
        must_wait: Whether to wait for it.
    """

    gpu: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    memory: str
    storage_bytes: int
    storage_offset_bytes: int
    counter: str
    counter_offset: int
    event: str
    must_wait: bool


def share_cuda(tensors: Mapping[str, Tensor]) -> dict[str, CudaShare]:
    """Describe tensors so that another process can open them. Call it once per such process.

    Args:
        tensors: On CUDA devices, not empty.

    Raises:
        WeightsError: If one is elsewhere.
    """
    return {name: _share(name, tensor.detach()) for name, tensor in tensors.items()}


def _share(name: str, tensor: Tensor) -> CudaShare:
    if tensor.device.type != "cuda" or not tensor.numel():
        raise WeightsError(
            f"tensor '{name}' {list(tensor.shape)} is on {tensor.device}; only tensors on a CUDA "
            "device that are not empty can be opened by another process there"
        )
    parts = cast(tuple[Any, ...], reduce_tensor(tensor)[1])
    (_, shape, stride, offset, _, dtype, device, memory, size, begin, _, counter, place, event,
     must_wait) = parts  # fmt: skip
    return CudaShare(
        gpu=str(torch.cuda.get_device_properties(device).uuid),
        dtype=str(dtype).removeprefix("torch."),
        shape=tuple(shape),
        stride=tuple(stride),
        offset=offset,
        memory=memory.hex(),
        storage_bytes=size,
        storage_offset_bytes=begin,
        counter=counter.hex(),
        counter_offset=place,
        event=event.hex(),
        must_wait=must_wait,
    )


def open_cuda(shares: Mapping[str, CudaShare]) -> dict[str, Tensor]:
    """Views of the other process's tensors; no copy is made.

    Raises:
        WeightsError: If this process does not see the GPU they lie on.
    """
    seen = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    return {name: _open(name, share, seen) for name, share in shares.items()}


def _open(name: str, share: CudaShare, seen: Mapping[str, int]) -> Tensor:
    if share.gpu not in seen:
        raise WeightsError(
            f"tensor '{name}' lies on GPU {share.gpu}; this process sees {sorted(seen) or 'none'}. "
            "Only a process on the same GPU can open it"
        )
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size(share.shape),
        share.stride,
        share.offset,
        torch.TypedStorage,
        getattr(torch, share.dtype),
        seen[share.gpu],
        bytes.fromhex(share.memory),
        share.storage_bytes,
        share.storage_offset_bytes,
        False,
        bytes.fromhex(share.counter),
        share.counter_offset,
        bytes.fromhex(share.event),
        share.must_wait,
    )
