"""The schedule declaration: how far generation may run ahead of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

MOST_LAG = 1000
"""Steps that generation may run ahead: what is sampled in them is kept, and the scheduler looks
through it with every event."""

_DEADLINE_S = 600.0  # Where nobody has said how long anything may take
# How much longer than predicted a call may take: predictions of devices that were not measured may
# be several times too short.
_TIMES_PREDICTED = 5.0


@dataclass(frozen=True)
class Deadline:
    """A deadline, and where it comes from.

    Attributes:
        limit_s: How long.
        source: Who says so, for people: "Schedule.deadline_s".
    """

    limit_s: float
    source: str = "Schedule.deadline_s"

    def __str__(self) -> str:
        return f"{self.limit_s:g} s ({self.source})"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Limits on how far generation runs ahead of training, and on how long anything takes.

    Raises:
        ValueError: A field is out of range.
    """

    max_lag: int = 0
    """Generation may read weights up to this many steps old; `max_lag + 1` steps are in flight."""
    order: Literal["step", "arrival"] = "step"
    """"step": which weights a call reads follows from its step alone, whatever the timing.
    "arrival": it reads whatever its device holds within the bound; not reproducible, a control."""
    streaming: int = 0
    """Parts in which a step's rows go on as they end, so that one is scored and trained on while
    others are still sampled; rounded up to a multiple of every group's ranks, and at most one
    for each item of data that a step takes. 0: a step's rows go on together."""
    segment_tokens: int = 0
    """How far a row may grow in one step. One that is not done goes on in the next, under newer
    weights, and its group counts for the step in which its last row ends. 0: every row is made in
    one step."""
    in_flight: bool = False
    """Rollouts that stream take newer weights while they are sampled, between two entries of every
    row that has not ended; what is known of the entries before is kept. Not reproducible: when
    weights come depends on timing. Needs `max_lag` of at least 1, and `streaming` or
    `segment_tokens`."""
    deadline_s: float | None = None
    """Longest time a single task, or a wait with nothing running, may take. null: 600 s, but for a
    call of which a plan predicts the time five times that, if it is more."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_lag <= MOST_LAG:
            raise ValueError(
                f"Schedule.max_lag must be 0 to {MOST_LAG}, got {self.max_lag}; the samples of as "
                "many steps are kept at once"
            )
        if self.streaming < 0:
            raise ValueError(f"Schedule.streaming must be at least 0 parts, got {self.streaming}")
        if self.segment_tokens < 0:
            raise ValueError(
                f"Schedule.segment_tokens must be at least 0, got {self.segment_tokens}"
            )
        if self.order not in ("step", "arrival"):
            raise ValueError(f"Schedule.order must be 'step' or 'arrival', got {self.order!r}")
        self._check_in_flight()
        if not (self.wait_s > 0 and math.isfinite(self.wait_s)):
            raise ValueError(
                f"Schedule.deadline_s must be a positive number of seconds, got {self.deadline_s}"
            )

    @property
    def wait_s(self) -> float:
        """Seconds that anything may take of which nothing is predicted."""
        return _DEADLINE_S if self.deadline_s is None else self.deadline_s

    def deadline(self, predicted_s: float | None = None) -> Deadline:
        """The deadline of a task.

        Args:
            predicted_s: What a plan expects of the call it belongs to; None if nothing.

        Example:
            >>> str(Schedule().deadline(predicted_s=2400.0))
            '12000 s (5 x the 2,400 s that the plan predicts)'
        """
        limit_s = _TIMES_PREDICTED * (predicted_s or 0.0)
        if self.deadline_s is not None or limit_s <= self.wait_s:
            return Deadline(self.wait_s)
        times = f"{_TIMES_PREDICTED:g} x the {predicted_s:,.0f} s that the plan predicts"
        return Deadline(limit_s, times)

    def _check_in_flight(self) -> None:
        if not self.in_flight:
            return
        if self.max_lag < 1:
            raise ValueError(
                "Schedule.in_flight is set, but with max_lag 0 there are no newer weights while a "
                "step is sampled; set max_lag=1, or leave in_flight out"
            )
        if not (self.streaming or self.segment_tokens):
            raise ValueError(
                "Schedule.in_flight is set, but a step's rows go on together, in one call; set "
                "streaming to a number of parts, or leave in_flight out"
            )

    @property
    def why_not_reproducible(self) -> str:
        """Why a run does not follow from its seed alone, in words; "" if it does."""
        reasons: list[str] = []
        if self.order == "arrival":
            reasons.append("order=arrival: which weights a call reads depends on timing")
        if self.in_flight:
            reasons.append("in_flight: when weights come while rows are sampled depends on timing")
        return "; ".join(reasons)
