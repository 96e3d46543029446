"""How many threads compute: torch's, and those of the library that multiplies numpy's matrices."""

from __future__ import annotations

import torch
from threadpoolctl import threadpool_limits

__all__ = ["use_threads"]


def use_threads(num_threads: int) -> None:
    """Let this process compute with so many from now on.

    How a sum is shared among threads decides its last bits, and actors of perceptrons are computed
    by numpy: with torch's threads alone, a run would depend on the machine's cores.
    """
    torch.set_num_threads(num_threads)
    threadpool_limits(num_threads, user_api="blas")
