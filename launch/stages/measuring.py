"""When a stage is evaluated: before its first step, between steps, after its last; what follows.

Evaluations are kept in the run's folder. All that follows from them, which checkpoint is the best
and whether the run is to end, is worked out of what is kept there, so that a resumed run decides
as it would have without a break.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from ...configs.schema import EvaluationConfig
from ...dataflow.errors import WorkerError
from ...dataflow.graph.role import Role
from ...dataflow.runtime.checkpoint import Interval, Pauses
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import Program
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ..run_dir.checkpoint import CheckpointStore
from ..run_dir.evaluations import Evaluations, Measured


class Evaluates(Protocol):
    """Whoever measures what a stage has learnt."""

    @property
    def programs(self) -> dict[str, Program]:
        """What the engine must carry besides the stage's own graph."""
        ...

    @property
    def workers(self) -> dict[str, WorkerSpec | Role]:
        """Who plays the roles that only these have."""
        ...

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """Suite -> what was found with the current weights; nothing else may be running."""
        ...


class Measuring:
    """The evaluations of one stage.

    Args:
        evaluator: Who measures; None if nothing is measured.
        config: How often, and what follows.
        kept: Where what was found is kept.
        first_step: The step that the run goes on from.
        num_steps: The stage's.
        store: Its checkpoints.

    Raises:
        ConfigError: If what was found before a run was interrupted cannot be read.

    Attributes:
        before: What was found before the first step; empty if nothing was measured.
        after: And after the last.
        stopped: The step at which the run ends for want of improvement; None if it does not.
        took_s: Seconds spent so far between steps.
    """

    def __init__(
        self,
        evaluator: Evaluates | None,
        config: EvaluationConfig,
        kept: Evaluations,
        first_step: int,
        num_steps: int,
        store: CheckpointStore,
    ) -> None:
        self._evaluator, self._config, self._kept = evaluator, config, kept
        self._first_step, self._num_steps, self._store = first_step, num_steps, store
        self._note: Callable[[int, Mapping[str, Measured]], None] = lambda step, found: None
        for step in kept.steps() if evaluator else ():
            if step <= first_step:
                kept.read(step)
        self.before: dict[str, Measured] = {}
        self.after: dict[str, Measured] = {}
        self.stopped: int | None = None
        self.took_s = 0.0

    def begin(self, engine: Engine, note: Callable[[int, Mapping[str, Measured]], None]) -> None:
        """Measure what the stage begins with, unless the run did before it was interrupted.

        Args:
            engine: Before its first run: it has the weights the stage starts from.
            note: Told of every evaluation, and again of the one at which a run is resumed.
        """
        self._note, first_step = note, self._first_step
        if self._evaluator is None:
            return
        self._kept.rewind(first_step)
        if 0 not in self._kept.steps():
            self._kept.write(0, self._evaluator.measure(engine))
        self.before = self._kept.read(0)
        if first_step in self._kept.steps():
            self._note(first_step, self._kept.read(first_step))
            self._judge(first_step)
        self._keep_best()

    def pauses(self, engine: Engine) -> Pauses:
        """Where the run is to be interrupted, and how it is measured there."""
        due = range(0, self._num_steps, self._config.every or self._num_steps)
        steps = frozenset(due) - {0, *self._kept.steps()}

        def between(interval: Interval) -> bool:
            since_s = time.monotonic()
            self._measure(engine, interval.step)
            is_best = self._judge(interval.step)
            if not interval.saved and (is_best or self.stopped is not None):
                interval.save()
            self.took_s += time.monotonic() - since_s
            return self.stopped is not None

        return Pauses(frozenset() if self._evaluator is None else steps, between)

    def end(self, engine: Engine) -> WorkerError | None:
        """Measure what the stage ends with; returns what that failed of, if it did."""
        if self._evaluator is None:
            return None
        if self.stopped is not None:
            self.after = self._kept.read(self.stopped)
            return None
        try:
            self.after = self._measure(engine, self._num_steps)
        except WorkerError as error:
            return error
        self._judge(self._num_steps)
        return None

    @property
    def why_stopped(self) -> str:
        """Why the run ends before its last step, in words; "" if it does not."""
        if self.stopped is None or self._config.keep_best is None:
            return ""
        return (
            f"stopped after {self.stopped} of {self._num_steps} steps: "
            f"evaluation/{self._config.keep_best} has not improved in "
            f"{self._config.stop_after} evaluations"
        )

    def _measure(self, engine: Engine, step: int) -> dict[str, Measured]:
        assert self._evaluator is not None, "nothing is measured without an evaluator"
        found = self._evaluator.measure(engine)
        self._kept.write(step, found)
        self._note(step, found)
        return found

    def _judge(self, step: int) -> bool:
        """Draw the conclusions of an evaluation; returns whether it is the best so far."""
        metric, patience = self._config.keep_best, self._config.stop_after
        if metric is not None and patience is not None and step:
            worse = self._kept.without_improvement(metric) >= patience
            self.stopped = step if worse else None
        return self._keep_best() == step

    def _keep_best(self) -> int | None:
        """Have the store keep the checkpoint of the best step so far; returns that step."""
        if self._config.keep_best is None:
            return None
        best = self._kept.best(self._config.keep_best)
        self._store.kept = frozenset({best} if best else ())
        return best
