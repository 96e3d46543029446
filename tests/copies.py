"""Code of a user's that forks and returns on both sides, and whether the copies were ended."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["copies_end", "fork"]

_ESCAPED = 7
_COPIES: list[int] = []


def fork() -> None:
    """Go on in this process and in a copy of it."""
    _COPIES.append(os.fork())


@contextmanager
def copies_end() -> Generator[None]:
    """Require that the body forks, and that every copy was ended in it by what it tests."""
    own = os.getpid()
    _COPIES.clear()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(_ESCAPED)
        codes = [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in _COPIES]
    assert set(codes) == {1}
