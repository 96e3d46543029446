"""Memory of the host: what a sleeping worker keeps there, and what a call has freed of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy", "give_back_freed", "keep_few_kernels"]


class HostCopy:
    """What tensors hold on a device, kept on the host; their memory there is given up.

    The tensors stay what they are, and so do all views of them: only the memory under them goes and
    comes back, at another place. Nobody may look at them meanwhile.

    Args:
        tensors: Some may share memory. Those in host memory are left alone.
        device: The kind of device to be freed.

    Attributes:
        num_bytes: Given up.
    """

    def __init__(self, tensors: Iterable[Tensor], device: str = "cuda") -> None:
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()  # pyright: ignore[reportPrivateUsage] - its identity
            for tensor in tensors
            if tensor.device.type == device
        }
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self.num_bytes = 0
        for storage in storages.values():
            host = torch.UntypedStorage(storage.nbytes()).copy_(storage)
            self._kept.append((storage, host))
            self.num_bytes += storage.nbytes()
            storage.resize_(0)
        if self._kept and device == "cuda":
            torch.cuda.empty_cache()  # else only this process could use what is free

    def restore(self) -> None:
        """Put everything back, bit for bit."""
        for storage, host in self._kept:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._kept.clear()


def give_back_freed(device: torch.device) -> None:
    """Give the memory that a call on the CPU has freed back to the system.

    The C library keeps what is freed between other allocations. What one call left there would lie
    beside what the next one needs: a quarter of a gigabyte of a small language model.
    """
    if device.type == "cpu":
        trim = _trim()
        if trim is not None:
            trim(0)


def keep_few_kernels() -> None:
    """Have oneDNN keep fewer compiled matrix products than the 1,024 it keeps by default.

    Each takes a quarter of a megabyte, and batches differ in size. It reads the variable before its
    first product in a process; whoever has set it is obeyed.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")


@cache
def _trim() -> Any:
    """The C library's `malloc_trim`; None where it has none, as on macOS."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
