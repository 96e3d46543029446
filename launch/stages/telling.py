"""Who is told of a stage's steps: trackers, the timeline, whoever watches; and of bad signs.

And who is listened to: somebody may wish for more replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.graph.role import Role
from ...dataflow.runtime.engine import Engine, StepResult
from ...dataflow.runtime.executor import Program, groups_of
from ...dataflow.runtime.recovery.resizing import ElasticExecutor, Scale, why_not_elastic
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ..run_dir.evaluations import Measured, logged_name
from ..run_dir.events import EVENTS, EventLog
from ..run_dir.progress import StageProgress
from ..run_dir.run_folder import RunFolder
from ..run_dir.scaling import ElasticGroup, read_wish, wish_version, write_groups
from ..run_dir.time_left import StagePlan
from ..run_dir.trace import TraceLog
from ..run_dir.trackers.jsonl import read_metrics
from ..run_dir.trackers.registry import Trackers
from .env_evaluation import env_actors
from .headline import Headline
from .job import Job
from .measuring import Evaluates
from .samples import newest_sample
from .sign_facts import facts_of
from .signs import BadSign, Signs
from .stages import Stage
from .waits import Waits


def stage_plans(job: Job) -> list[StagePlan]:
    """What is to be done in each stage, as far as it is known before the first."""
    prediction, config = job.plan.prediction, job.run.evaluation
    plans: list[StagePlan] = []
    for stage in job.stages:
        num_steps, step_s = stage.config.num_steps, None
        evaluated: tuple[int, ...] = ()
        if stage is job.main:
            step_s = prediction.step_time_s if prediction else None
            if job.suites or (config.num_episodes and env_actors(stage)):
                evaluated = (*range(0, num_steps, config.every or num_steps), num_steps)
        plans.append(StagePlan(stage.name, num_steps, step_s, evaluated))
    return plans


class TimedEvaluator:
    """An evaluator whose every evaluation is told of while it goes on.

    Args:
        inner: Who measures.
        shown: Who is told.

    Attributes:
        took_s: Seconds of the latest evaluation; None if there was none.
    """

    def __init__(self, inner: Evaluates, shown: StageProgress) -> None:
        self._inner, self._shown = inner, shown
        self.took_s: float | None = None

    @property
    def programs(self) -> dict[str, Program]:
        """See `Evaluates.programs`."""
        return self._inner.programs

    @property
    def workers(self) -> dict[str, WorkerSpec | Role]:
        """See `Evaluates.workers`."""
        return self._inner.workers

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """See `Evaluates.measure`."""
        since_s = time.monotonic()
        with self._shown.evaluation():
            found = self._inner.measure(engine)
        self.took_s = time.monotonic() - since_s
        return found


def is_shown(step: int, num_steps: int, every: int | None, *, live: bool) -> bool:
    """Whether one of the responses of a step is shown to whoever watches.

    Args:
        step: The step that was just taken.
        num_steps: Of the stage.
        every: `samples.show_every`: None for a few times where there is a live line.
        live: Whether there is one.
    """
    done = step + 1
    if every is None:
        return live and (done == num_steps or str(done).strip("0") == "1")
    return every > 0 and done % every == 0


class Told:
    """Tells of one stage's steps.

    Args:
        job: The run.
        stage: The stage.
        home: Its folder.
        shown: Whoever watches.
        trace: Its timeline.
        trackers: Where its metrics go.
        first_step: The step it goes on from.
        evaluation_s: Seconds that the latest evaluation took; None if there was none.
        check_there: Ends the run if its folder was removed.
    """

    def __init__(
        self,
        job: Job,
        stage: Stage,
        home: RunFolder,
        shown: StageProgress,
        trace: TraceLog,
        trackers: Trackers,
        first_step: int,
        evaluation_s: Callable[[], float | None],
        check_there: Callable[[], None],
    ) -> None:
        self._curves = job.run.evaluation.every is not None
        self._show_every = job.run.samples.show_every
        self._stage, self._home, self._shown = stage, home, shown
        self._trace, self._trackers, self._evaluation_s = trace, trackers, evaluation_s
        self._check_there = check_there
        self._headline, self._waits = Headline(stage), Waits(stage.graph)
        self._signs = Signs(facts_of(stage, job.run.mismatch, job.run.schedule))
        self._events = EventLog(home.path / EVENTS, first_step=first_step)
        if first_step:
            self._signs.recall(read_metrics(home.metrics))

    def evaluated(self, step: int, found: Mapping[str, Measured]) -> None:
        """Tell what was measured after so many steps, where steps need not follow each other."""
        values = {
            f"evaluation/{logged_name(suite, name)}": value
            for suite, measured in found.items()
            for name, value in measured.values.items()
        }
        self._trackers.note(step, self._stage.name, values, recorded=self._curves)
        took_s = self._evaluation_s()
        if took_s is not None:
            short = {name.removeprefix("evaluation/"): value for name, value in values.items()}
            self._shown.evaluated(step, took_s, short)

    def step(
        self, result: StepResult, took_s: float, samples: int, env_steps: float, env_unit: str
    ) -> None:
        """Tell of one step everywhere.

        Args:
            result: The step.
            took_s: Seconds it took.
            samples: Rows it made.
            env_steps: Steps of environments it took.
            env_unit: What these are.

        Raises:
            WorkerError: If the run's folder is no longer there.
        """
        self._check_there()
        now_s = time.time()  # trackers may take their time
        values = {
            **result.metrics,
            "run/step_time_s": took_s,
            "run/samples_per_s": samples / took_s if took_s else 0.0,
            "run/controller_bytes": float(result.controller_bytes),
            "run/lag_max": float(max((lag for lag, _ in result.lag), default=0)),
        }
        if env_steps:
            values["run/env_steps_per_s"] = env_steps / took_s if took_s else 0.0
        self._trackers.log(result.step, self._stage.name, values)
        shown = self._headline.shown(values)
        self._trace.write(result.spans)
        # What conversations wait for is apart from what they generate.
        waits = {name: value for name, value in values.items() if name.endswith("/waiting_s")}
        self._trace.write_counters(result.step, now_s, {**shown, **waits})
        self._shown.step(
            result.step,
            took_s=took_s,
            amount=env_steps or samples,
            values=shown,
            unit=env_unit if env_steps else "samples",
            waits_s=self._waits.of(result, now_s - took_s, now_s),
        )
        for sign in self._signs.look(result.step, values):
            self._warn(sign)
        self._show_sample(result.step)

    def _warn(self, sign: BadSign) -> None:
        fields = asdict(sign)
        self._events.write(fields)
        self._shown.warn(sign.kind, sign.step, str(sign), fields)

    def died(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        """Tell of a death that the run went on from; see `Deaths`."""
        self._events.write({"kind": kind, "step": step, **fields})
        self._shown.warn(kind, step, text, fields)

    def _show_sample(self, step: int) -> None:
        num_steps, live = self._stage.config.num_steps, self._shown.is_live
        if is_shown(step, num_steps, self._show_every, live=live):
            sample = newest_sample(self._home.path, step)
            if sample is not None:
                self._shown.show(sample)


@contextmanager
def told(
    job: Job,
    stage: Stage,
    home: RunFolder,
    shown: StageProgress,
    trackers: Trackers,
    first_step: int,
    evaluation_s: Callable[[], float | None],
) -> Generator[Told]:
    """While it is entered the stage's steps are told of; see `Told`."""
    trackers.rewind(first_step, stage.name)
    with home.watched() as check_there, TraceLog(home.trace, first_step=first_step) as trace:
        yield Told(job, stage, home, shown, trace, trackers, first_step, evaluation_s, check_there)
        check_there()  # models are written next


def stage_scale(engine: Engine, folder: Path, told: Callable[[str], None]) -> Scale:
    """Say in a run's folder which groups can have other ranks, and listen there for wishes.

    Args:
        engine: Of the main stage.
        folder: The run's.
        told: Is told what becomes of a wish.
    """
    write_groups(folder, _groups(engine))
    damaged: list[str] = []

    def wish() -> Mapping[str, int]:
        try:
            return read_wish(folder)
        except ConfigError as error:
            if not damaged:
                damaged.append(str(error))
                told(str(error))
            return {}

    return Scale(wish, told, lambda: wish_version(folder))


def _groups(engine: Engine) -> dict[str, ElasticGroup]:
    most = engine.programs["main"].placement.num_chunks
    alone = "" if isinstance(engine.executor, ElasticExecutor) else "one process does all the work"
    return {
        group.name: ElasticGroup(most, alone or why_not_elastic(engine.programs, group.name))
        for group in groups_of(engine.programs)
    }
