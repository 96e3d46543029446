"""The call that a worker is serving: its step and number, for randomness, and its deadline.

Sampling is counter-based: what is sampled depends on `(seed, role, step, ordinal, row id)` alone,
never on how many workers there are or which rows share a batch. The engine enters `call_scope`
around every call it makes; someone who calls the step function by hand enters `step_scope`, in
which the n-th call of a method gets ordinal n, exactly the number its node has in the recorded
graph.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal, TypeAlias

from ..errors import FlowError
from ..graph.tracer import is_recording


@dataclass(frozen=True)
class CallKey:
    """Identifies one call of a run: its step, and how many calls of that method came before it."""

    step: int
    ordinal: int


Piece: TypeAlias = Literal["whole", "first", "part", "last", "none"]
"""The part of its batch that a train call is given: all of it, the first of its rows, more of them,
the last, or none where a step has no rows at all."""


@dataclass
class _Scope:
    step: int
    ordinal: int | None = None
    staleness: int | None = None
    piece: Piece = "whole"
    version: int = 0
    lag: int = 0
    in_flight: bool = False
    counts: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])


_UNSCOPED = _Scope(step=0)
_SCOPE: ContextVar[_Scope] = ContextVar("penstock_step", default=_UNSCOPED)


@contextmanager
def _entered(scope: _Scope) -> Generator[None]:
    before = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(before)


def step_scope(step: int) -> AbstractContextManager[None]:
    """Make role calls inside belong to `step`, numbered in program order."""
    return _entered(_Scope(step=step))


def call_scope(
    step: int,
    ordinal: int,
    staleness: int | None = None,
    piece: Piece = "whole",
    *,
    version: int = 0,
    lag: int = 0,
    in_flight: bool = False,
) -> AbstractContextManager[None]:
    """Context manager: the one role call made inside is call number `ordinal` of `step`."""
    return _entered(_Scope(step, ordinal, staleness, piece, version, lag, in_flight))


def call_piece() -> Piece:
    """The part of its batch that the train call being served is given.

    Of a batch that comes in pieces, each call but the last only adds its rows' gradient, and
    returns no metrics; the last adds its own, takes the optimizer's step and returns those of all.
    Of none there is nothing to learn: only schedules go on.
    """
    return _SCOPE.get().piece


def call_staleness() -> int | None:
    """Versions by which the weights that sampled are older than those the call being served trains.

    None if nothing was sampled for it from the role's own weights, or that is not known.
    """
    return _SCOPE.get().staleness


def call_version() -> int:
    """The version of the role's own weights with which the call being served is made.

    The first of a run is 0, and every train call makes the next; 0 outside of any step. It grows
    while a call is served in flight.
    """
    return _SCOPE.get().version


def call_lag() -> int:
    """Versions by which these weights are older than those current at the call's own step."""
    return _SCOPE.get().lag


def call_in_flight() -> bool:
    """True if the call being served takes newer weights while it samples.

    What samples for it then gives control back after every entry that it adds to its rows.
    """
    return _SCOPE.get().in_flight


def current_step() -> int:
    """The number of the step being computed, counted from 0 over the whole run, resumed or not.

    For ops, workers and losses, to anneal a coefficient for example; 0 outside of any step.

    Raises:
        FlowError: If the step is being recorded: every step would have the number it had then.
    """
    if is_recording():
        raise FlowError(
            "current_step() was called while the step was recorded, which happens once: every "
            "step would get the same number",
            fix="call it inside an op, a worker or a loss, which run in every step",
        )
    return _SCOPE.get().step


def call_key(role: str, method: str) -> CallKey:
    """The key of the call being served; every worker method that samples asks for it once.

    Outside any scope, calls count up over the life of the process, so that calls repeated by
    hand do not repeat their random numbers.
    """
    scope = _SCOPE.get()
    if scope.ordinal is not None:
        return CallKey(scope.step, scope.ordinal)
    ordinal = scope.counts.get((role, method), 0)
    scope.counts[role, method] = ordinal + 1
    return CallKey(scope.step, ordinal)


class DeadlineExceeded(BaseException):
    """Raised in a call past its deadline; no Exception, so `except Exception` lets it pass."""


@contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Interrupt the body after `seconds` by SIGALRM.

    The body takes what it takes outside the main thread, where the platform has no such signal,
    where something else uses it, and under a debugger.
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

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            # The alarm may come here still, and what it raises must not leave `expire` behind:
            # no later call would have a deadline.
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
