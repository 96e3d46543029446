"""Taking a run back to where it can go on from: groups, checkpoints and books are put right."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import PlanError, WorkerError
from ..scheduler.events import NodeTask, Output, Versions
from .checkpoint import Saving
from .dispatcher import Dispatcher, Submission
from .executor import Executor, Recovered, Recoveries, Recovery, Told, WorkerLost
from .messages import Done, Handle

_Key = tuple[NodeTask, Versions]


@dataclass(frozen=True)
class Made:
    """A finished call."""

    task: NodeTask
    outputs: Mapping[Output, Handle]  # Its outputs, all stored
    done: tuple[Done, ...]  # Its ranks' reports

    @property
    def size(self) -> int:
        """Length of its longest row, of a call that was streamed."""
        return max(one.report.size for one in self.done)

    @property
    def num_rows(self) -> tuple[int, ...] | None:
        """Rows of each output."""
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
        """Note what the workers are still busy with: whoever goes on hears of it."""
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
        """A step is complete: nothing more is asked of it."""
        self.made = {key: one for key, one in self.made.items() if key[0].step > step}
        self.out = {key: one for key, one in self.out.items() if key[0].step > step}

    def survives(
        self, groups: Collection[str], group_of: Mapping[str, str], outlives: Callable[[str], bool]
    ) -> None:
        """Forget what is gone."""
        self.forget_out(groups)
        gone = {name for name in groups if not outlives(name)}
        self.made = {k: one for k, one in self.made.items() if group_of[k[0].node] not in gone}


class GoingBack:
    """Recovery of one run from processes that die."""

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
