"""Limits of recovery: how often a run may go back when processes die.

A group that keeps nothing is started again beside the run, and nobody else notices. What a group
with weights or a state has lost is had from the newest checkpoint, or from the copy in a neighbor's
memory. The run goes back to there and computes the same again: random numbers belong to samples, so
its result does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...errors import WorkerError


class WorkerLost(WorkerError):
    """Processes died, or what they had stored is gone: no fault of what they were doing."""

    def __init__(self, said: str, *, stored: bool = False, report: str = "") -> None:
        super().__init__(report or said)
        self.said, self.stored = said, stored

    def reported(self, report: str) -> WorkerLost:
        return WorkerLost(self.said, stored=self.stored, report=report)


@dataclass(frozen=True)
class Recovery:
    """Limits of going back: how often, and after which pauses."""

    max_restarts: int = 20  # Times in all, in one run; 0 ends it with the first death
    # Times in a row without a step that was not complete before: a fault that comes again each time
    # is not one that starting again fixes.
    max_repeats: int = 3
    # Seconds before the second time in a row; they double with each further one.
    pause_s: float = 1.0
    longest_pause_s: float = 60.0  # And how long they become at most

    def wait_s(self, in_a_row: int) -> float:
        """Seconds to wait before starting again after so many times in a row."""
        if not in_a_row:
            return 0.0
        return min(self.pause_s * 2.0 ** (in_a_row - 1), self.longest_pause_s)


@dataclass(frozen=True)
class Restart:
    """Ranks of a group are started again, and do again what they had not finished."""

    group: str
    took_s: float  # Seconds since one died
    ranks: tuple[int, ...] = ()  # Which of its ranks; all if none is named
    held_up_s: float = 0.0  # Seconds of these in which `Executor.wait` was busy with it
    # Whether they are there. Before, this is said about once a second of those that are started
    # while others work: what they owe is not late.
    is_over: bool = True


@dataclass(frozen=True)
class Recovered:
    """A run has gone back and goes on."""

    said: str  # The processes that died, and how
    step: int  # Steps that are complete where it goes on
    completed: int  # Steps that had been complete
    # Where it goes on: its own start if there was no checkpoint yet.
    source: Literal["checkpoint", "mirror", "start"]
    took_s: float  # Seconds from the news to where it goes on, the pause included
    number: int  # Times it has gone back by now


class Recoveries:
    """The times that one run has gone back."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.number = 0
        self._in_a_row = 0
        self._furthest = -1

    def pause_s(self, lost: WorkerLost, completed: int) -> float:
        """Seconds to wait before the run goes back once more."""
        limits = self.recovery
        if completed > self._furthest:
            self._furthest, self._in_a_row = completed, 0
        if self.number >= limits.max_restarts:
            raise WorkerLost(self._spent(lost)) from lost
        if self._in_a_row >= limits.max_repeats:
            raise WorkerLost(
                f"{lost}\n    that was the death number {self._in_a_row + 1} after step "
                f"{completed} with no step completed in between: starting again does not fix it "
                "(recovery.max_repeats)"
            ) from lost
        pause_s = limits.wait_s(self._in_a_row)
        self.number, self._in_a_row = self.number + 1, self._in_a_row + 1
        return pause_s

    def _spent(self, lost: WorkerLost) -> str:
        if not self.recovery.max_restarts:
            return str(lost)
        return (
            f"{lost}\n    the run had gone back {self.number} times before, and may no more often "
            "(recovery.max_restarts)"
        )


Told = Callable[[Recovered | Restart], None]
"""Callback for deaths: the run has gone back, or ranks were started again beside it."""
