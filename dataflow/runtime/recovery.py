"""Taking a run back to where it can go on from, and replicas that join and leave while it goes on.

Groups, checkpoints and books are put right after a failure. The ranks of a group that keeps nothing
are replicas: they have nothing to do with each other. A rank that joins is started beside the run,
which goes on meanwhile. Then the scheduler has the group finish what it has begun, and it gets its
new ranks, with the weights that the others have. Chunks stay as they are, and random numbers belong
to samples, so the run's result does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import PenstockError, PlanError, WorkerError
from ..scheduler.events import NodeTask, Output, Resize, Resized, ResizeGroup, Versions
from ..scheduler.schedule import Flow
from .checkpoint import Saving
from .dispatcher import Dispatcher, Submission
from .executor import (
    Executor,
    Program,
    Recovered,
    Recoveries,
    Recovery,
    Told,
    WorkerLost,
    groups_of,
    servers_of,
)
from .messages import Done, Handle

_Key = tuple[NodeTask, Versions]


@dataclass(frozen=True)
class Made:
    task: NodeTask
    outputs: Mapping[Output, Handle]  # Its outputs, all stored
    done: tuple[Done, ...]  # Its ranks' reports

    @property
    def size(self) -> int:
        """Length of its longest row, of a call that was streamed."""
        return max(one.report.size for one in self.done)

    @property
    def num_rows(self) -> tuple[int, ...] | None:
        (rows, *_) = (one.report.num_rows for one in self.done)
        return rows or None


def made_by(
    done: Iterable[Done], stored: Mapping[Output, Handle], num_parts: Mapping[str, int]
) -> dict[_Key, Made]:
    """The finished calls all of whose outputs are still stored."""
    by_task: dict[_Key, list[Done]] = {}
    for one in done:
        if one.task.node in num_parts:
            by_task.setdefault((one.task, one.versions), []).append(one)
    found: dict[_Key, Made] = {}
    for (task, versions), reports in by_task.items():
        first, count = (0, num_parts[task.node]) if task.chunk is None else (task.chunk, 1)
        outputs = [Output(task.node, task.step, first + i) for i in range(count)]
        if all(output in stored for output in outputs):
            handles = {output: stored[output] for output in outputs}
            found[task, versions] = Made(task, handles, tuple(reports))
    return found


@dataclass
class Known:
    """Results that a run which went back has left, until they are used again."""

    made: dict[_Key, Made] = field(default_factory=dict[_Key, Made])  # The calls that were finished
    # Those that workers are still busy with, or have answered since.
    out: dict[_Key, Submission] = field(default_factory=dict[_Key, Submission])

    def __len__(self) -> int:
        return len(self.made) + len(self.out)

    def leave_out(
        self, submissions: Iterable[Submission], versions: Mapping[NodeTask, Versions]
    ) -> None:
        """Record what the workers are still busy with, for the message when the run goes on."""
        for submission in submissions:
            task = submission.task
            if isinstance(task, NodeTask) and task in versions:
                if not submission.carried:
                    self.out[task, versions[task]] = submission
                submission.carried = True

    def take(self, tasks: Sequence[NodeTask], versions: Versions) -> list[Made]:
        """All of these calls, by the lengths of their rows; none if one of them is not finished."""
        keys = [(task, versions) for task in tasks]
        if not all(key in self.made for key in keys):
            return []
        found = [self.made.pop(key) for key in keys]
        return sorted(found, key=lambda made: (made.size, made.task.chunk or 0))

    def take_out(self, task: NodeTask, versions: Versions) -> Submission | None:
        """The same of a call that may still be out; from now on it is the run's own.

        None of one that has failed: it is done again.
        """
        submission = self.out.pop((task, versions), None)
        if submission is None or submission.failed is not None:
            return None
        submission.carried = False
        return submission

    def forget_out(self, groups: Collection[str]) -> None:
        self.out = {key: one for key, one in self.out.items() if one.group not in groups}

    def forget(self, step: int) -> None:
        self.made = {key: one for key, one in self.made.items() if key[0].step > step}
        self.out = {key: one for key, one in self.out.items() if key[0].step > step}

    def survives(
        self, groups: Collection[str], group_of: Mapping[str, str], outlives: Callable[[str], bool]
    ) -> None:
        self.forget_out(groups)
        gone = {name for name in groups if not outlives(name)}
        self.made = {k: one for k, one in self.made.items() if group_of[k[0].node] not in gone}


class GoingBack:
    def __init__(
        self,
        executor: Executor,
        dispatcher: Dispatcher,
        recovery: Recovery,
        told: Told | None,
        *,
        group_of: Mapping[str, str],
        homes: Collection[str],
        saving: Saving | None,
        reset: Callable[[], None] | None,
    ) -> None:
        self._executor, self._dispatcher = executor, dispatcher
        self._recoveries, self._told = Recoveries(recovery), told
        self._group_of, self._homes = group_of, frozenset(homes)
        self._saving, self._reset = saving, reset
        self._lost: WorkerLost | None = None
        self._since_s = 0.0
        self._completed = 0
        self.known = Known()

    def back(self, lost: WorkerLost, completed: int, known: Known) -> None:
        """Start again what has died; the run that goes on is to be made then."""
        self._since_s, self._completed = time.monotonic(), max(completed, self._completed)
        self.known = Known() if lost.stored else known
        while True:
            self._lost = lost
            if self._saving is not None:
                self._saving.go_back()
            self._check_can(lost)
            pause_s = self._recoveries.pause_s(lost, self._completed)
            time.sleep(pause_s)
            try:
                self._start_again()
            except (WorkerError, PlanError) as error:
                # A start that fails counts as one more death, so that the limits of recovery end
                # this loop.
                lost = WorkerLost(f"{lost}\nand what was to be started again: {error}")
                self.known = Known()
                continue
            return

    def begun(self, step: int) -> None:
        """The run that goes on has been brought to where it begins."""
        lost, self._lost = self._lost, None
        if lost is None or self._told is None:
            return
        source = self._saving.source_of(step) if self._saving is not None else "start"
        self._told(
            Recovered(
                lost.said,
                step,
                self._completed,
                source,
                time.monotonic() - self._since_s,
                self._recoveries.number,
            )
        )

    def _check_can(self, lost: WorkerLost) -> None:
        saved = self._saving is not None and self._saving.has_any()
        if saved or (self._reset is not None and (self._saving is not None or not self._homes)):
            return
        if self._saving is None:
            raise lost
        raise WorkerLost(
            f"{lost}\n    there is no checkpoint yet, and what the run began with is gone: an "
            "earlier run had trained it\n    give the run checkpoints, or begin again"
        ) from lost

    def _start_again(self) -> None:
        from_start = self._saving is None or not self._saving.has_any()
        revived = self._executor.revive(self._homes if from_start else ())
        self._dispatcher.drop(revived)
        self.known.survives(revived, self._group_of, self._executor.outlives)
        if from_start and self._reset is not None:
            self._reset()


_LOOK_S = 1.0  # Between two looks for requests to resize


@dataclass(frozen=True)
class Scale:
    """Callbacks that request a resize and report its result."""

    # Group -> how many ranks it is to have; asked about once a second.
    wish: Callable[[], Mapping[str, int]]
    told: Callable[[str], None]  # Is told what has become of it, a sentence at a time
    # Counts the requests, so that a repeated one is a new one.
    version: Callable[[], int] = lambda: 0


class Resizing:
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
        """Return the resizes that are wished for and whose new ranks are ready."""
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
    return {
        group.name
        for group in groups_of(programs)
        if not (group.within or _changes(programs, group.name))
    }


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
