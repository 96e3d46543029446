"""A time limit for each of many short calls, cheap enough for every step of an environment.

Calls are interrupted by SIGALRM, as in `dataflow.deadline`. A limit that was running already goes
on afterwards with the time it has left.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType

from ...dataflow.deadline import DeadlineExceeded

__all__ = ["StepAlarm"]


class StepAlarm:
    """Interrupts whatever lasts longer than `seconds` since the last `arm`.

    Outside the main thread and under a debugger it does nothing: there the engine's own deadline is
    the only one.

    Args:
        seconds: The limit; None for none.

    Raises:
        DeadlineExceeded: Inside the body.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._able = False

    def __enter__(self) -> StepAlarm:
        self._able = (
            self._seconds is not None
            and threading.current_thread() is threading.main_thread()
            and hasattr(signal, "setitimer")
            and sys.gettrace() is None
        )
        if self._able:
            self._since_s = time.monotonic()
            self._outer = signal.signal(signal.SIGALRM, _expire)
            self._outer_s = signal.setitimer(signal.ITIMER_REAL, 0)[0]
        return self

    def arm(self) -> None:
        """Begin another call, with the whole time."""
        if self._able and self._seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def disarm(self) -> None:
        """The call is over."""
        if self._able:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def __exit__(self, *_: object) -> None:
        if not self._able:
            return
        self._able = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._outer)
        if self._outer_s:
            left_s = self._outer_s - (time.monotonic() - self._since_s)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))


def _expire(signum: int, frame: FrameType | None) -> None:
    del signum, frame
    raise DeadlineExceeded
