"""A time limit for each of many short calls, cheap enough for every step of an environment.

Calls are interrupted by SIGALRM, as in `dataflow.deadline`. A limit that was running already goes
on all the while: whichever of the two ends first interrupts.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType

from ...dataflow.deadline import DeadlineExceeded

__all__ = ["StepAlarm", "StepTooLong"]


class StepTooLong(DeadlineExceeded):
    """Raised inside a call that outlives a `StepAlarm`; that of any other limit is not this one."""


class StepAlarm:
    """Interrupts whatever lasts longer than `seconds` since the last `arm`.

    Outside the main thread and under a debugger it does nothing: there the engine's own deadline is
    the only one.

    Args:
        seconds: The limit; None for none.

    Raises:
        StepTooLong: Inside the body.
        DeadlineExceeded: Inside the body, if a `deadline` around it ends first, armed or not.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._able = False
        self._armed = False
        self._outer_end_s: float | None = None

    def __enter__(self) -> StepAlarm:
        self._able = (
            self._seconds is not None
            and threading.current_thread() is threading.main_thread()
            and hasattr(signal, "setitimer")
            and sys.gettrace() is None
            and signal.getsignal(signal.SIGALRM)
            is not None  # None: not Python's, nor to be put back
        )
        if self._able:
            left_s = signal.getitimer(signal.ITIMER_REAL)[0]
            self._outer_end_s = time.monotonic() + left_s if left_s else None
            self._outer = signal.signal(signal.SIGALRM, self._ring)
        return self

    def arm(self) -> None:
        """Begin another call, with the whole time."""
        if not self._able or self._seconds is None:
            return
        left_s = self._outer_left_s()
        self._armed = not left_s or self._seconds < left_s
        signal.setitimer(signal.ITIMER_REAL, self._seconds if self._armed else left_s)

    def disarm(self) -> None:
        """The call is over."""
        if self._able:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, self._outer_left_s())

    def __exit__(self, *_: object) -> None:
        if not self._able:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._able = self._armed = False
        signal.signal(signal.SIGALRM, self._outer)
        signal.setitimer(signal.ITIMER_REAL, self._outer_left_s())

    def _outer_left_s(self) -> float:
        """Time left of the limit that was running already, never 0 unless there is none."""
        if self._outer_end_s is None:
            return 0.0
        return max(self._outer_end_s - time.monotonic(), 1e-6)

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            raise StepTooLong
        self._outer_end_s = None
        if callable(self._outer):
            self._outer(signum, frame)
        else:
            signal.signal(signal.SIGALRM, self._outer)
            signal.raise_signal(signum)
