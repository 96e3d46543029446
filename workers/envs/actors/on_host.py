"""A small network where the host can read it: acting steps environments there, with numpy."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

from torch import nn

from ...training.flat_parameters import FlatParameters

__all__ = ["OnHost"]

N = TypeVar("N", bound=nn.Module)


class OnHost(Generic[N]):
    """A network's copy in host memory, taken anew when it has changed; itself if it lies there.

    Args:
        module: The network.
        flat: Its weights.
        always: Copy it even if it lies in host memory.

    Attributes:
        module: What the host reads.
        is_stale: Whether the network may have changed since the copy was taken.
    """

    def __init__(self, module: N, flat: FlatParameters, *, always: bool = False) -> None:
        self.module, self.is_stale = module, False
        self._flat = flat
        self._copy: FlatParameters | None = None
        if always or flat.data.device.type != "cpu":
            self.module = copy.deepcopy(module).to("cpu")
            self._copy = FlatParameters(self.module)

    def follow(self) -> None:
        """Take the copy anew if need be: one transfer for all weights.

        Whoever changes the network meanwhile, in another thread, is not missed: the copy counts as
        fresh before it is taken, so the change makes it stale again.
        """
        stale, self.is_stale = self.is_stale, False
        if self._copy is not None and stale:
            self._copy.data.copy_(self._flat.data)
