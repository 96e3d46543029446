"""Taking a run back to where it can go on from: groups, checkpoints and books are put right."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from ...errors import PlanError, WorkerError
from ..dispatcher import Dispatcher
from ..executor import Executor
from ..saving.of_run import Saving
from .known import Known
from .limits import Recovered, Recoveries, Recovery, Told, WorkerLost


class GoingBack:
    """What one run does about processes that die.

    Args:
        executor: Who starts groups again.
        dispatcher: What is out at workers.
        recovery: How often the run may go back.
        told: Who is told.
        group_of: Node -> where it runs.
        homes: Groups with weights or a state that the run changes.
        saving: Its checkpoints; None if it has none.
        reset: Brings groups that were started again to the state that they had before the run; None
            if nobody can.
    """

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
        """Start again what has died; the run that goes on is to be made then.

        Args:
            lost: Why the run has to go back.
            completed: Steps that it had completed, or had before.
            known: What it has left.

        Raises:
            WorkerLost: If it may not, or cannot.
        """
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
        """The run that goes on has been brought to where it begins.

        Args:
            step: Steps that are complete there.
        """
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
        """Raise unless there is a checkpoint or a beginning to go on from."""
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
        """All that has died, and without a checkpoint all that the run has changed."""
        from_start = self._saving is None or not self._saving.has_any()
        revived = self._executor.revive(self._homes if from_start else ())
        self._dispatcher.drop(revived)
        self.known.survives(revived, self._group_of, self._executor.outlives)
        if from_start and self._reset is not None:
            self._reset()
