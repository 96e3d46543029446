"""Memory of one process that others on the machine open: of a GPU by CUDA IPC, of the host by file.

A piece is made once and described once, so a process opens it once, whatever is written there next.
A description is plain data. The memory of the host is an anonymous file (memfd) that is opened
through the process that made it: it can only be had while that one lives, on Linux and as the same
user. Memory of a GPU can be opened by processes that see that GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import (
    rebuild_cuda_tensor,  # pyright: ignore[reportUnknownVariableType]
    reduce_tensor,  # pyright: ignore[reportUnknownVariableType]
)

_DEVICE = 6
"""Where the number of the device is among what `rebuild_cuda_tensor` takes."""


class SharedFile:
    """An anonymous file, which other processes open by its path; gone with its process.

    Args:
        num_bytes: Its length.

    Attributes:
        number: Its descriptor.
    """

    def __init__(self, num_bytes: int) -> None:
        self.number = os.memfd_create("penstock-weights")
        os.ftruncate(self.number, num_bytes)

    @property
    def path(self) -> str:
        """Where this process and others open it."""
        return f"/proc/{os.getpid()}/fd/{self.number}"

    def close(self) -> None:
        """It lives on while somebody has it mapped."""
        os.close(self.number)


@dataclass(frozen=True)
class HostMemory:
    """Memory of the host.

    Attributes:
        path: See `SharedFile`.
        num_bytes: Its length.
    """

    path: str
    num_bytes: int


@dataclass(frozen=True)
class CudaMemory:
    """Memory of a GPU.

    Attributes:
        gpu: The GPU's own identifier, the same in all processes.
        num_bytes: Its length.
        arguments: Of torch's `rebuild_cuda_tensor`: handles, sizes and offsets.
    """

    gpu: str
    num_bytes: int
    arguments: tuple[Any, ...]


Memory = HostMemory | CudaMemory
"""What a process is told of memory that it may open."""


def share_memory(num_bytes: int, device: torch.device) -> tuple[Tensor, Memory, SharedFile | None]:
    """New memory on a device that others can open.

    Returns:
        u8[num_bytes], what others open it by, and the file to be closed that it lies in, if any.
    """
    if device.type == "cuda":
        made = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        arguments: tuple[Any, ...] = reduce_tensor(made)[1]  # pyright: ignore[reportUnknownVariableType]
        return made, CudaMemory(_identifier(made.device), num_bytes, arguments), None
    file = SharedFile(num_bytes)
    return _mapped(file.path, num_bytes), HostMemory(file.path, num_bytes), file


def open_memory(memory: Memory) -> Tensor:
    """Another process's memory, u8[num_bytes]; it stays that process's, and is only to be read.

    Raises:
        OSError: If that process has ended.
        RuntimeError: If it cannot be opened, or lies on a GPU that this process does not see.
    """
    if isinstance(memory, HostMemory):
        return _mapped(memory.path, memory.num_bytes)
    seen = {_identifier(torch.device("cuda", at)): at for at in range(torch.cuda.device_count())}
    if memory.gpu not in seen:
        raise RuntimeError(
            f"they lie on GPU {memory.gpu}, and this process sees {', '.join(seen) or 'none'}; "
            "both must be on one GPU, or executor.transport another"
        )
    arguments = list(memory.arguments)
    arguments[_DEVICE] = seen[memory.gpu]
    return rebuild_cuda_tensor(*arguments)


def _mapped(path: str, num_bytes: int) -> Tensor:
    if not os.path.exists(path):  # torch would say less
        raise FileNotFoundError(f"{path} is not there: its process has ended")
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _identifier(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
