"""Ranks and the tasks that wait for them: who runs next.

A rank runs one task at a time, or all that it has of a node that streams. A task takes one rank of
a group or, for SPMD work, all of them. Weights are loaded beside what takes them in flight.
Each rank serves its waiting tasks by priority; an SPMD task that is first in its group keeps the
group's ranks from starting anything behind it, so it runs as soon as the running tasks end.

Groups that share devices take turns: one starts nothing while another has a task running. The one
whose turn it is goes on as long as it has something to start, because handing devices over costs
time; then comes the one with the oldest task. What is in flight is bounded, so every turn ends.

A group whose ranks are to become more or fewer starts nothing until it has others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .events import Load, NodeTask, Task, Versions

Priority: TypeAlias = tuple[int, int, int]
"""`(step, node index, chunk)`; lower runs first."""

_Entry: TypeAlias = tuple[Priority, int, Task]


@dataclass(frozen=True, slots=True)
class Running:
    """A task on its ranks, since when and with which weights."""

    group: str
    ranks: tuple[int, ...]
    since_s: float
    versions: Versions


@dataclass(slots=True)
class _Group:
    running: list[list[Task]]
    num_free: int
    single: list[list[_Entry]]
    whole: list[_Entry] = field(default_factory=list[_Entry])


class RankPool:
    def __init__(
        self,
        groups: Mapping[str, int],
        sharing: Mapping[str, frozenset[str]] | None = None,
        together: frozenset[str] = frozenset(),
        in_flight: frozenset[str] = frozenset(),
    ) -> None:
        # Group -> its ranks and queues.
        self.groups = {
            name: _Group([[] for _ in range(n)], n, [[] for _ in range(n)])
            for name, n in groups.items()
        }
        self._together, self._in_flight = together, in_flight
        # Groups that start nothing, because they are to have other ranks.
        self.resizing: set[str] = set()
        # Queued tasks that were not allowed to start, with their place.
        self.held: list[tuple[Priority, Task, str, int | None]] = []
        self._sharing = sharing or {}
        self._in_turn: set[str] = set()
        self._touched: dict[str, set[int]] = {}
        self._count = 0

    def push(self, priority: Priority, task: Task, group: str, rank: int | None) -> None:
        """Queue `task` for one rank of `group`, or for all of them if `rank` is None."""
        self._count += 1  # keeps the heap from ever comparing two tasks
        state = self.groups[group]
        heap = state.whole if rank is None else state.single[rank]
        heapq.heappush(heap, (priority, self._count, task))
        touched = self._touched.setdefault(group, set())
        if rank is not None:
            touched.add(rank)

    def free(self, task: Task, group: str, ranks: tuple[int, ...]) -> None:
        """`task`, running on `ranks`, has ended."""
        state = self.groups[group]
        touched = self._touched.setdefault(group, set())
        for rank in ranks:
            state.running[rank].remove(task)
            if not state.running[rank]:
                state.num_free += 1
                touched.add(rank)

    def resize(self, group: str, num_ranks: int) -> None:
        """Give a group at rest so many ranks, and spread what waits for one of them anew.

        Only chunks of a step, and what rank 0 does, wait for one rank.
        """
        old = self.groups[group]
        waiting = [entry for heap in old.single for entry in heap]
        self.groups[group] = _Group(
            [[] for _ in range(num_ranks)], num_ranks, [[] for _ in range(num_ranks)], old.whole
        )
        for priority, _, task in waiting:
            self.push(priority, task, group, _rank_of(task, num_ranks))
        self.held = [
            (
                priority,
                task,
                name,
                _rank_of(task, num_ranks) if name == group and rank is not None else rank,
            )
            for priority, task, name, rank in self.held
        ]
        self.resizing.discard(group)
        self._touched[group] = set(range(num_ranks))

    def is_busy(self, group: str) -> bool:
        state = self.groups[group]
        return state.num_free < len(state.running)

    def running_on(self, group: str, rank: int) -> tuple[Task, ...]:
        return tuple(self.groups[group].running[rank])

    def reconsider(self) -> None:
        for name, state in self.groups.items():
            self._touched[name] = set(range(len(state.running)))
        held, self.held = self.held, []
        for item in held:
            self.push(*item)

    def dispatch(
        self, may_start: Callable[[Task], bool]
    ) -> list[tuple[list[Task], str, tuple[int, ...]]]:
        """Start what can start; returns `(tasks, group, ranks)` in order of start.

        They are several where a rank is to run tasks together.
        """
        started: list[tuple[list[Task], str, tuple[int, ...]]] = []
        touched, self._touched = self._touched, {}
        for name in self._by_turn(touched):
            if name in self.resizing or self.waits_for_turn(name):
                self._touched[name] = touched[name]
                continue
            for tasks, on in self._dispatch_group(name, touched[name], may_start):
                started.append((tasks, name, on))
                if name in self._sharing:
                    self._in_turn.add(name)
                    self._in_turn -= self._sharing[name]
        return started

    def waits_for_turn(self, group: str) -> bool:
        if group not in self._sharing:
            return False
        return any(map(self.is_busy, self._sharing[group]))

    def _by_turn(self, names: Iterable[str]) -> list[str]:
        if not self._sharing:
            return list(names)

        def order(name: str) -> tuple[bool, tuple[Priority, ...]]:
            state = self.groups[name]
            heaps = (state.whole, *state.single)
            return name not in self._in_turn, tuple(sorted(heap[0][0] for heap in heaps if heap))

        return sorted(names, key=order)

    def _dispatch_group(
        self, name: str, ranks: set[int], may_start: Callable[[Task], bool]
    ) -> list[tuple[list[Task], tuple[int, ...]]]:
        state, started = self.groups[name], list[tuple[list[Task], tuple[int, ...]]]()
        whole = self._first(state.whole, name, None, may_start)
        for rank in sorted(ranks):
            if state.running[rank]:
                continue
            own = self._first(state.single[rank], name, rank, may_start)
            if own is not None and (whole is None or own < whole):
                tasks = self._pop_with(state.single[rank])
                started.append(self._occupy(state, tasks, (rank,)))
        if whole is not None and self.may_take(name, whole[2]):
            heapq.heappop(state.whole)
            started.append(self._occupy(state, [whole[2]], tuple(range(len(state.running)))))
        return started

    def may_take(self, group: str, task: Task) -> bool:
        beside = self._in_flight if isinstance(task, Load) else frozenset[str]()
        return all(
            isinstance(one, NodeTask) and one.node in beside
            for running in self.groups[group].running
            for one in running
        )

    def _pop_with(self, heap: list[_Entry]) -> list[Task]:
        _, _, task = heapq.heappop(heap)
        tasks = [task]
        if isinstance(task, NodeTask) and task.node in self._together:
            while heap and _is_with(heap[0][2], task):
                tasks.append(heapq.heappop(heap)[2])
        return tasks

    def _first(
        self, heap: list[_Entry], group: str, rank: int | None, may_start: Callable[[Task], bool]
    ) -> _Entry | None:
        while heap:
            if may_start(heap[0][2]):
                return heap[0]
            priority, _, task = heapq.heappop(heap)
            self.held.append((priority, task, group, rank))
        return None

    def _occupy(
        self, state: _Group, tasks: list[Task], ranks: tuple[int, ...]
    ) -> tuple[list[Task], tuple[int, ...]]:
        for rank in ranks:
            state.num_free -= not state.running[rank]
            state.running[rank] += tasks
        return tasks, ranks

    def queued(self) -> list[Task]:
        """Every task that waits for ranks, held back or not."""
        tasks = [task for _, task, _, _ in self.held]
        for state in self.groups.values():
            for heap in (state.whole, *state.single):
                tasks += [task for _, _, task in heap]
        return tasks


def _rank_of(task: Task, num_ranks: int) -> int:
    return (task.chunk or 0) % num_ranks if isinstance(task, NodeTask) else 0


def _is_with(task: Task, first: NodeTask) -> bool:
    return isinstance(task, NodeTask) and (task.node, task.step) == (first.node, first.step)
