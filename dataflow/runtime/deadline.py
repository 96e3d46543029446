"""Interrupting a call that takes too long, where that is possible."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Generator
from types import FrameType

__all__ = ["DeadlineExceeded", "deadline"]


class DeadlineExceeded(BaseException):
    """Raised inside a call that outlives its deadline; not an Exception, so nobody swallows it."""


@contextlib.contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Interrupt the body after `seconds` by SIGALRM.

    The body takes what it takes outside the main thread, where the platform has no such signal,
    where something else uses it, and under a debugger.

    Raises:
        DeadlineExceeded: In the body.
    """
    able = (
        threading.current_thread() is threading.main_thread()
        and hasattr(signal, "setitimer")
        and sys.gettrace() is None
        and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
    )
    if not able:
        yield
        return

    def expire(signum: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
