"""Replicas that join and leave while a run goes on, as somebody wishes.

The ranks of a group that keeps nothing are replicas: they have nothing to do with each other.
Whoever joins is started beside the run, which goes on meanwhile. Then the scheduler has the group
finish what it has begun, and it gets its new ranks, with the weights that the others have. Chunks
stay as they are, and random numbers belong to samples, so the run's result does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import PenstockError
from ..scheduler.events import Resize, Resized, ResizeGroup
from ..scheduler.flow import Flow
from .executor import Executor, Program, groups_of, servers_of

_LOOK_S = 1.0  # Between two looks for requests to resize


@dataclass(frozen=True)
class Scale:
    """Callbacks that request a resize and report its result."""

    # Group -> how many ranks it is to have; asked about once a second.
    wish: Callable[[], Mapping[str, int]]
    told: Callable[[str], None]  # Is told what has become of it, a sentence at a time
    # Another number each time that somebody has wished, be it for the same again.
    version: Callable[[], int] = lambda: 0


class Resizing:
    """Resizing of one run's groups."""

    def __init__(
        self,
        scale: Scale,
        executor: Executor,
        programs: Mapping[str, Program],
        flow: Flow,
        sizes: dict[str, int],
    ) -> None:
        self._scale, self._executor, self._programs = scale, executor, programs
        self._num_chunks = flow.num_chunks
        self._has = dict(flow.groups)
        self._sizes = sizes
        self._asked: set[str] = set()
        self._preparing: set[str] = set()
        self._refused: set[tuple[str, int]] = set()
        self._version = scale.version()
        self._next_s = 0.0

    def look(self, at_s: float) -> list[Resize]:
        if time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + _LOOK_S
        if self._version != (version := self._scale.version()):
            self._version = version
            self._refused.clear()  # there may be devices now
        wish = self._scale.wish()
        for group in [one for one in self._preparing if wish.get(one) == self._has[one]]:
            self._is_ready(group, self._has[group])  # those that were on their way are not wanted
        return [
            Resize(group, num_ranks, at_s)
            for group, num_ranks in wish.items()
            if self._is_new(group, num_ranks) and self._is_ready(group, num_ranks)
        ]

    def carry_out(self, instruction: ResizeGroup, at_s: float) -> Resized:
        """Change the ranks of a group at rest."""
        group, before = instruction.group, self._has[instruction.group]
        found = self._executor.resize(group, instruction.num_ranks)
        self._has[group] = self._sizes[group] = found
        self._asked.discard(group)
        if found == instruction.num_ranks:
            self._scale.told(f"group '{group}' has {found} ranks, and had {before}")
        else:
            self._refuse(group, instruction.num_ranks, "a new rank could not have its weights")
        return Resized(group, found, at_s)

    def _is_new(self, group: str, num_ranks: int) -> bool:
        if group in self._asked or (group, num_ranks) in self._refused:
            return False
        return self._has.get(group) != num_ranks

    def _is_ready(self, group: str, num_ranks: int) -> bool:
        why_not = self._why_not(group, num_ranks)
        if why_not or not self._executor.elastic:
            alone = "all of this run's work is done by one process"
            self._refuse(group, num_ranks, why_not or alone)
            return False
        try:
            ready = self._executor.prepare(group, num_ranks)
        except PenstockError as error:
            self._refuse(group, num_ranks, str(error))
            return False
        if not ready:
            self._preparing.add(group)
            return False
        self._preparing.discard(group)
        if num_ranks != self._has[group]:
            self._asked.add(group)
        return True

    def _why_not(self, group: str, num_ranks: int) -> str:
        if not 1 <= num_ranks <= self._num_chunks:
            return f"it can have 1 to {self._num_chunks}, one for each part of a step's rows"
        return why_not_elastic(self._programs, group)

    def _refuse(self, group: str, num_ranks: int, why: str) -> None:
        self._refused.add((group, num_ranks))
        self._preparing.discard(group)
        has = self._has.get(group)
        still = "" if has is None else f"; it still has {has}"
        self._scale.told(f"group '{group}' cannot have {num_ranks} ranks: {why}{still}")


def restartable_groups(programs: Mapping[str, Program]) -> set[str]:
    """The groups that change nothing, so that they can be started again beside a run."""
    return {group.name for group in groups_of(programs) if not _changes(programs, group.name)}


def replica_groups(programs: Mapping[str, Program]) -> set[str]:
    servers = servers_of(programs)
    connected = {*servers, *(name for names in servers.values() for name in names)}
    return restartable_groups(programs) - connected


def why_not_elastic(programs: Mapping[str, Program], name: str) -> str:
    """Why replicas of a group can neither join nor leave during a run; "" if they can."""
    group = next((one for one in groups_of(programs) if one.name == name), None)
    if group is None:
        names = ", ".join(sorted(one.name for one in groups_of(programs)))
        return f"there is no such group; the run has {names}"
    if name not in replica_groups(programs):
        return "it trains, keeps a state or serves another group, so its ranks belong together"
    if group.devices:
        return "it takes turns on its devices with another group"
    if group.pipeline_parallel > 1:
        return "its ranks have pipeline stages, whose processes are numbered by the number of ranks"
    return ""


def _changes(programs: Mapping[str, Program], group: str) -> bool:
    return any(
        group in {*one.placement.state_homes(one.graph).values()}
        or any(one.placement.home(one.graph, role) == group for role in one.graph.trains_per_step)
        for one in programs.values()
    )
