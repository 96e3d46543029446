"""When and where a task ran: what a run's timeline is drawn from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TaskSpan"]


@dataclass(frozen=True)
class TaskSpan:
    """One task on one rank, from start to end.

    Attributes:
        node: Name of the node in the graph: "actor.generate".
        step: The step it belongs to, which need not be the step then being consumed.
        chunk: Which part of the step's rows, or None for the whole batch.
        group: Name of the worker group it ran on.
        rank: Which rank of that group.
        start_s: When it started, in seconds since the epoch: the one clock that processes share.
        end_s: When it ended, on the same clock.
        versions: `(role, version)` of every set of weights it read, sorted by role.
    """

    node: str
    step: int
    chunk: int | None
    group: str
    rank: int
    start_s: float
    end_s: float
    versions: tuple[tuple[str, int], ...] = ()
