"""What workers had made when a run went back, for the run that is asked for the same again.

A call's outputs are a function of the call and of the versions that it reads, so those that are
still stored are not made again, and a call that is still out is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...scheduler.events import NodeTask, Output, Versions
from ..dispatcher import Submission
from ..messages import Handle
from ..step_result import Done

_Key = tuple[NodeTask, Versions]


@dataclass(frozen=True)
class Made:
    """A finished call.

    Attributes:
        task: It.
        outputs: Its outputs, all stored.
        done: Its ranks' reports.
    """

    task: NodeTask
    outputs: Mapping[Output, Handle]
    done: tuple[Done, ...]

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
    """The finished calls all of whose outputs are still stored.

    Args:
        done: What ranks have reported.
        stored: The outputs that are there.
        num_parts: Node -> parts that it makes in a step. Others' calls are always made again.
    """
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
    """What a run that went back has left, as far as nobody has asked for it again.

    Attributes:
        made: The calls that were finished.
        out: Those that workers are still busy with, or have answered since.
    """

    made: dict[_Key, Made] = field(default_factory=dict[_Key, Made])
    out: dict[_Key, Submission] = field(default_factory=dict[_Key, Submission])

    def __len__(self) -> int:
        return len(self.made) + len(self.out)

    def leave_out(
        self, submissions: Iterable[Submission], versions: Mapping[NodeTask, Versions]
    ) -> None:
        """Note what the workers are still busy with: whoever goes on hears of it.

        Args:
            submissions: All that is out.
            versions: What each task reads, of those that may be asked for again.
        """
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
        """What groups are busy with is done again when it is asked for."""
        self.out = {key: one for key, one in self.out.items() if one.group not in groups}

    def forget(self, step: int) -> None:
        """A step is complete: nothing more is asked of it."""
        self.made = {key: one for key, one in self.made.items() if key[0].step > step}
        self.out = {key: one for key, one in self.out.items() if key[0].step > step}

    def survives(
        self, groups: Collection[str], group_of: Mapping[str, str], outlives: Callable[[str], bool]
    ) -> None:
        """Forget what is gone.

        Args:
            groups: Those that were started again.
            group_of: Node -> where it runs.
            outlives: Whether what a group made is there after its processes have died.
        """
        self.forget_out(groups)
        gone = {name for name in groups if not outlives(name)}
        self.made = {k: one for k, one in self.made.items() if group_of[k[0].node] not in gone}
