"""Input of a scheduler: a step as it sees it, and how far generation may run ahead.

A `Flow` is what remains of a graph and a placement once tensors, devices and user code are taken
away. It is plain data; the engine builds it from what it has checked, the scheduler runs it.

A step's rows are split into `num_chunks` chunks, and every node's output is stored as that many
parts. Weights are single assignment: the version of a trainable role counts its train calls, n per
step, so "offset o at step s" names version `s * n + o`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..kinds import WeightRead

MOST_LAG = 1000
"""Steps that generation may run ahead: what is sampled in them is kept, and the scheduler looks
through it with every event."""

_DEADLINE_S = 600.0  # where neither a key nor a prediction bounds a call
# How much longer than predicted a call may take: predictions of devices that were not measured may
# be several times too short.
_TIMES_PREDICTED = 5.0


@dataclass(frozen=True)
class Deadline:
    """A deadline, and where it comes from."""

    limit_s: float
    source: str = "Schedule.deadline_s"  # Who says so, for people

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
    """Most entries of a row in one step. One that is not done goes on in the next, under newer
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


FlowKind = Literal["source", "op", "rollout", "forward", "train"]


@dataclass(frozen=True, slots=True)
class FlowNode:
    name: str  # Unique in the flow: "actor.generate"
    kind: FlowKind  # "source" nodes are filled by the shell and run on no rank
    # True if the node runs once per chunk (row or group scope), on rank `chunk % num_ranks`; False
    # if it is a barrier that needs every chunk of every input and runs on rank 0. A train node is
    # never chunked and runs on all ranks of its group.
    chunked: bool = True
    group: str = ""  # The group it runs on; "" for a source
    inputs: tuple[str, ...] = ()  # Names of the nodes whose outputs it takes
    # Weights it reads. A train node's read of its own role is implied.
    reads: tuple[WeightRead, ...] = ()
    trains: str | None = None  # The role whose next version it makes; only for kind "train"
    # True for a rollout that streams: a rank samples all its chunks of a step together, and answers
    # each when it is ready, by (size, chunk).
    streams: bool = False
    # The streaming rollout in whose answers' order a train node takes the chunks, one per rank at a
    # time; "" if it takes them all at once.
    order_of: str = ""
    # Seconds that a plan expects all of its tasks of a step to take; None without a plan.
    predicted_s: float | None = None


@dataclass(frozen=True)
class Flow:
    name: str  # The step function's name, for reports
    nodes: tuple[FlowNode, ...]  # In program order, which must be a topological order
    groups: Mapping[str, int]  # Number of ranks of each group; no rank is in two groups
    homes: Mapping[str, str]  # For each trainable role the group where all its train nodes run
    trains_per_step: Mapping[str, int]  # Train nodes of each trainable role
    num_chunks: int = 1  # Parts in which a step's rows are handled
    # Group -> groups that have some of its devices, and so never work at the same time.
    sharing: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    # Groups whose copies of weights are made anew, of what their home then holds, at each turn
    views: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for group, num_ranks in self.groups.items():
            if num_ranks < 1:
                raise ValueError(f"group '{group}' must have at least 1 rank, got {num_ranks}")
        if not any(node.kind == "source" for node in self.nodes):
            raise ValueError(f"flow '{self.name}' has no source node: its rows come from nowhere")
