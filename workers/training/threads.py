"""How many threads compute: torch's, and those of the library that multiplies numpy's matrices."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

__all__ = ["threads_within", "use_threads"]


def use_threads(num_threads: int) -> None:
    """Let this process compute with so many from now on.

    How a sum is shared among threads decides its last bits, and actors of perceptrons are computed
    by numpy: with torch's threads alone, a run would depend on the machine's cores.
    """
    torch.set_num_threads(num_threads)
    threadpool_limits(num_threads, user_api="blas")


@contextmanager
def threads_within(num_threads: int | None) -> Generator[None]:
    """Let this process compute with so many while the block lasts; None changes nothing.

    What the process runs next, such as the next run of a sweep, has its own number again.
    """
    before = torch.get_num_threads()
    with threadpool_limits(num_threads, user_api="blas"):
        torch.set_num_threads(num_threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
