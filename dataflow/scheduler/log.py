"""The scheduler's memory: a bounded log of transitions, and the hash of what was read.

Entries are kept as data and put into words only when somebody asks.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .events import NodeTask, Task, Versions
from .rank_queues import Running


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One transition."""

    at_s: float  # The shell's clock
    what: str  # "ready", "start", "done", "admit",
    subject: Task | str  # The task concerned, or words if it is not about a task
    step: int | None = None  # The step concerned, if any
    group: str = ""  # The group it runs on, for tasks that run
    ranks: tuple[int, ...] = ()  # Ranks of `group`
    versions: Versions = ()  # Weights read

    def __str__(self) -> str:
        where = f" on {', '.join(rank_names(self.group, self.ranks))}" if self.ranks else ""
        reads = f" with {versions_text(self.versions)}" if self.versions else ""
        return f"{self.at_s:.1f} s  {self.what} {self.subject}{where}{reads}"


def rank_names(group: str, ranks: Iterable[int]) -> list[str]:
    return [f"{group}[{rank}]" for rank in ranks]


def versions_text(versions: Versions) -> str:
    return ", ".join(f"{role}@{version}" for role, version in versions)


# A transition as it is noted, three times for every task: making a `LogEntry` costs more.
_Noted: TypeAlias = tuple[float, str, Task | str, int | None, Running | None]


class SchedulerLog:
    """The last `max_entries` transitions, and the last one of every rank."""

    def __init__(self, groups: Mapping[str, int], max_entries: int) -> None:
        self._noted: deque[_Noted] = deque(maxlen=max_entries)
        self._last_of_rank: dict[str, list[_Noted | None]] = {
            group: [None] * num_ranks for group, num_ranks in groups.items()
        }

    def __len__(self) -> int:
        return len(self._noted)

    def resize(self, group: str, num_ranks: int) -> None:
        """A group has so many ranks from now on."""
        last = self._last_of_rank[group]
        self._last_of_rank[group] = [*last, *[None] * num_ranks][:num_ranks]

    def add(
        self, at_s: float, what: str, subject: Task | str, step: int | None, run: Running | None
    ) -> None:
        """Append a transition; see `LogEntry`."""
        noted = (at_s, what, subject, step, run)
        self._noted.append(noted)
        if run is not None:
            last = self._last_of_rank[run.group]
            for rank in run.ranks:
                last[rank] = noted

    def __iter__(self) -> Iterator[LogEntry]:
        return map(_entry, self._noted)

    def story(self, node: str | None = None, step: int | None = None) -> tuple[str, ...]:
        """The transitions of a node, of a step, or of both; all of them if neither is given.

        A node's story includes what happened to its step as a whole.
        """
        return tuple(str(entry) for entry in self if _concerns(entry, node, step))

    def rank_lines(self) -> tuple[str, ...]:
        """The last event of every rank, one line each."""
        return tuple(
            f"{group}[{rank}]  {_entry(noted) if noted else 'nothing yet'}"
            for group, last in self._last_of_rank.items()
            for rank, noted in enumerate(last)
        )


def _entry(noted: _Noted) -> LogEntry:
    at_s, what, subject, step, run = noted
    if run is None:
        return LogEntry(at_s, what, subject, step)
    return LogEntry(at_s, what, subject, step, run.group, run.ranks, run.versions)


def _concerns(entry: LogEntry, node: str | None, step: int | None) -> bool:
    if step is not None and entry.step != step:
        return False
    if node is None:
        return True
    if isinstance(entry.subject, NodeTask):
        return entry.subject.node == node
    return step is not None


def chain_sha256(history: str, lines: Iterable[str]) -> str:
    """The hash of everything before, `history`, followed by one step's sorted lines."""
    digest = hashlib.sha256(history.encode())
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()
