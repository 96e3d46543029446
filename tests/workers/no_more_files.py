"""A process that cannot open any more files, for tests of what goes on then."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Generator


@contextlib.contextmanager
def no_more_files(spare: int) -> Generator[None]:
    """While it is entered this process may open so many files and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10 + spare, hard))
        opened: list[int] = []
        held.callback(lambda: [os.close(one) for one in opened])
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))
        for _ in range(spare):
            os.close(opened.pop())
        yield
