"""The schedule declaration: how far generation may run ahead of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["MOST_LAG", "Schedule"]

MOST_LAG = 1000
"""Steps that generation may run ahead: what is sampled in them is kept, and the scheduler looks
through it with every event."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How far generation may run ahead of training, and how long anything may take.

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
    deadline_s: float = 600.0
    """Longest time a single task, or a wait with nothing running, may take."""

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
        if not (self.deadline_s > 0 and math.isfinite(self.deadline_s)):
            raise ValueError(
                f"Schedule.deadline_s must be a positive number of seconds, got {self.deadline_s}"
            )

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
