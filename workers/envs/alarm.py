"""Guards each of many short calls of code of the user's, cheaply enough for every step.

A call has a time limit. A copy of the process that it forks ends when the call does, or several
would go on with the run; to look takes 0.2 microseconds.

Calls are interrupted by SIGALRM, as in `call_context.deadline`. A limit that was running already
goes on all the while: whichever of the two ends first interrupts. Arming it only notes the time:
the signal comes when the first call might have been going on for too long, and is put off for as
long as the one that is going on by then may take.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from types import FrameType

from ...dataflow.runtime.call_context import DeadlineExceeded

_SOON_S = 1e-6  # for what should have come already: a timer of 0 never does


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
        self._seconds = math.inf if seconds is None else seconds
        self._able = False
        self._since_s = self._outer_end_s = math.inf
        self._comes_s = math.inf  # when the signal does
        self._process = os.getpid()

    def __enter__(self) -> StepAlarm:
        self._able = (
            self._seconds < math.inf
            and threading.current_thread() is threading.main_thread()
            and hasattr(signal, "setitimer")
            and sys.gettrace() is None
            # None: not Python's, nor to be put back
            and signal.getsignal(signal.SIGALRM) is not None
        )
        if self._able:
            left_s = signal.getitimer(signal.ITIMER_REAL)[0]
            self._outer_end_s = time.monotonic() + left_s if left_s else math.inf
            self._outer = signal.signal(signal.SIGALRM, self._ring)
            self._since_s, self._comes_s = math.inf, self._outer_end_s
        return self

    def arm(self) -> None:
        """Begin another call, with the whole time; the one before, if there was one, is over."""
        self._end_copy()
        if self._able:
            self._since_s = now_s = time.monotonic()
            if not now_s <= self._comes_s <= now_s + self._seconds:
                self._come(now_s)

    def disarm(self) -> None:
        self._end_copy()
        self._since_s = math.inf

    def __exit__(self, *_: object) -> None:
        if not self._able:
            return
        # First, so that a signal which is on its way already sets no timer again.
        self._able, self._since_s = False, math.inf
        outer_end_s, self._outer_end_s = self._outer_end_s, math.inf
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._outer)
        if outer_end_s < math.inf:
            left_s = outer_end_s - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(left_s, _SOON_S))

    def _end_copy(self) -> None:
        if os.getpid() != self._process:
            os._exit(1)

    def _come(self, now_s: float) -> None:
        """Let the signal come when the first limit ends."""
        self._comes_s = min(self._since_s + self._seconds, self._outer_end_s)
        if self._comes_s < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(self._comes_s - now_s, _SOON_S))

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        now_s, end_s = time.monotonic(), self._since_s + self._seconds
        outer_end_s = self._outer_end_s
        if end_s <= now_s and end_s < outer_end_s:
            self._since_s = math.inf
            self._come(now_s)
            raise StepTooLong
        if outer_end_s > now_s:  # the call that is going on began later
            self._come(now_s)
            return
        self._outer_end_s = math.inf
        self._come(now_s)
        if callable(self._outer):
            self._outer(signum, frame)
        else:
            signal.signal(signal.SIGALRM, self._outer)
            signal.raise_signal(signum)
