"""Device memory that waits in host memory while others have the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["HostCopy"]


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
