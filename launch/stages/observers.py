"""Observers of a stage: trackers, trace, console, health checks, samples.

A stage tells them of its steps, of its evaluations, and of events: bad signs and process deaths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...algorithms.roles.language import Policy
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.engine import StepResult
from ..inputs.record import Stage
from ..inputs.run import Run
from ..run_dir.progress import StagePlan, StageProgress
from ..run_dir.run_folder import RunFolder
from ..run_dir.step_logs import EVENTS, EventLog, TraceLog, read_metrics
from ..run_dir.trackers import Trackers
from .evaluation import env_actors
from .headline import Headline
from .samples import SampleTables, newest_sample
from .signs import Signs, facts_of
from .stage_result import env_unit, num_env_steps, num_samples


@dataclass(frozen=True)
class ObservedStep:
    """A step that is complete.

    Attributes:
        result: What the engine returned.
        took_s: Seconds it took, without evaluations.
        samples: Rows it made.
        env_steps: Steps of environments, or moves of games, it took.
        env_unit: What these are.
        ended_s: When it was complete, in seconds since the epoch.
        values: `node/name` -> number.
        headline: The few of these that are worth showing, under short names.
    """

    result: StepResult
    took_s: float
    samples: int
    env_steps: float
    env_unit: str
    ended_s: float
    values: Mapping[str, float]
    headline: Mapping[str, float]

    @classmethod
    def of(
        cls, stage: Stage, result: StepResult, took_s: float, headline: Headline
    ) -> ObservedStep:
        """Add a step's own metrics to those of its nodes."""
        samples, env_steps = num_samples(stage, result), num_env_steps(result)
        values = {
            **result.metrics,
            "run/step_time_s": took_s,
            "run/samples_per_s": samples / took_s if took_s else 0.0,
            "run/controller_bytes": float(result.controller_bytes),
            "run/lag_max": float(max((lag for lag, _ in result.lag), default=0)),
        }
        if env_steps:
            values["run/env_steps_per_s"] = env_steps / took_s if took_s else 0.0
        shown = headline.shown(values)
        unit = env_unit(result.metrics)
        return cls(result, took_s, samples, env_steps, unit, time.time(), values, shown)


class StageObserver:
    """Watches a stage; what it does not override does nothing."""

    def on_stage(self, first_step: int) -> None:
        """The stage begins, or goes on from a checkpoint, at this step."""

    def on_step(self, step: ObservedStep) -> None:
        """A step is complete."""

    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        """The weights after so many steps were evaluated; `took_s` is None if that was before."""

    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        """A sign of trouble, or a death that the run goes on from."""

    def on_end(self, num_steps: int) -> None:
        """The last step has been taken, and all that follows is in the stage's folder."""


class Observers(StageObserver):
    """The observers of one stage, told in order.

    Args:
        every: The observers.
        check_there: Raises `WorkerError` if the run's folder was removed.
    """

    def __init__(self, every: Sequence[StageObserver], check_there: Callable[[], None]) -> None:
        self._every, self._check_there = every, check_there

    @override
    def on_stage(self, first_step: int) -> None:
        for one in self._every:
            one.on_stage(first_step)

    @override
    def on_step(self, step: ObservedStep) -> None:
        self._check_there()
        for one in self._every:
            one.on_step(step)

    @override
    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        for one in self._every:
            one.on_evaluation(step, found, took_s)

    @override
    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        for one in self._every:
            one.on_event(kind, step, text, fields)

    @override
    def on_end(self, num_steps: int) -> None:
        for one in self._every:
            one.on_end(num_steps)


class TrackerObserver(StageObserver):
    """Hands metrics to the run's trackers.

    Args:
        trackers: The trackers.
        stage: The stage's name.
        curves: Whether evaluations are steps of a curve.
    """

    def __init__(self, trackers: Trackers, stage: str, *, curves: bool) -> None:
        self._trackers, self._stage, self._curves = trackers, stage, curves

    @override
    def on_stage(self, first_step: int) -> None:
        self._trackers.rewind(first_step, self._stage)

    @override
    def on_step(self, step: ObservedStep) -> None:
        self._trackers.log(step.result.step, self._stage, step.values)

    @override
    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        self._trackers.note(step, self._stage, found, recorded=self._curves)


class TraceObserver(StageObserver):
    """Writes the timeline."""

    def __init__(self, trace: TraceLog) -> None:
        self._trace = trace

    @override
    def on_step(self, step: ObservedStep) -> None:
        self._trace.write(step.result.spans)
        # What conversations wait for is apart from what they generate.
        waits = {name: value for name, value in step.values.items() if name.endswith("/waiting_s")}
        self._trace.write_counters(step.result.step, step.ended_s, {**step.headline, **waits})


class EventObserver(StageObserver):
    """Writes `events.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVENTS

    @override
    def on_stage(self, first_step: int) -> None:
        self._log = EventLog(self._path, first_step=first_step)

    @override
    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        self._log.write({"kind": kind, "step": step, **fields})


class ConsoleObserver(StageObserver):
    """Shows how the stage goes to a person, or as JSON to a program."""

    def __init__(self, shown: StageProgress, graph: Graph) -> None:
        self._shown, self._waits = shown, Waits(graph)

    @override
    def on_step(self, step: ObservedStep) -> None:
        self._shown.step(
            step.result.step,
            took_s=step.took_s,
            amount=step.env_steps or step.samples,
            values=step.headline,
            unit=step.env_unit if step.env_steps else "samples",
            waits_s=self._waits.of(step.result, step.ended_s - step.took_s, step.ended_s),
        )

    @override
    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        if took_s is not None:
            short = {name.removeprefix("evaluation/"): value for name, value in found.items()}
            self._shown.evaluated(step, took_s, short)

    @override
    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        self._shown.warn(kind, step, text, fields)


class HealthObserver(StageObserver):
    """Looks for signs that the stage goes wrong, and reports each as an event."""

    def __init__(self, signs: Signs, metrics: Path, report: Callable[..., None]) -> None:
        self._signs, self._metrics, self._report = signs, metrics, report

    @override
    def on_stage(self, first_step: int) -> None:
        if first_step:
            self._signs.recall(read_metrics(self._metrics))

    @override
    def on_step(self, step: ObservedStep) -> None:
        for sign in self._signs.look(step.result.step, step.values):
            self._report(sign.kind, sign.step, str(sign), asdict(sign))


class SampleObserver(StageObserver):
    """Shows a response now and then, and gives responses to the trackers that have tables.

    Args:
        shown: Where one is shown.
        home: The stage's folder.
        num_steps: Of the stage.
        show_every: `samples.show_every`.
        tables: Of the trackers.
    """

    def __init__(
        self,
        shown: StageProgress,
        home: Path,
        num_steps: int,
        show_every: int | None,
        tables: SampleTables,
    ) -> None:
        self._shown, self._home, self._num_steps = shown, home, num_steps
        self._show_every, self._tables = show_every, tables

    @override
    def on_step(self, step: ObservedStep) -> None:
        number, live = step.result.step, self._shown.is_live
        if is_shown(number, self._num_steps, self._show_every, live=live):
            sample = newest_sample(self._home, number)
            if sample is not None:
                self._shown.show(sample)
        self._tables.send(number)

    @override
    def on_end(self, num_steps: int) -> None:
        self._tables.send(num_steps)


@contextmanager
def observing(
    run: Run,
    stage: Stage,
    home: RunFolder,
    shown: StageProgress,
    trackers: Trackers,
    first_step: int,
) -> Generator[Observers]:
    """The observers of a stage, while it goes on."""
    config = run.config
    tracker = TrackerObserver(trackers, stage.name, curves=config.evaluation.every is not None)
    tracker.on_stage(first_step)
    with ExitStack() as stack:
        check_there = stack.enter_context(home.watched())
        trace = stack.enter_context(TraceLog(home.trace, first_step=first_step))
        events, console = EventObserver(home.path), ConsoleObserver(shown, stage.graph)
        reported = Observers([events, console], check_there)
        signs = Signs(facts_of(stage, config.mismatch, config.schedule))
        health = HealthObserver(signs, home.metrics, reported.on_event)
        num_steps, samples = stage.config.num_steps, config.samples
        tables = SampleTables(stage.name, home.path, first_step, samples.track_every, trackers)
        shows = SampleObserver(shown, home.path, num_steps, samples.show_every, tables)
        others = [TraceObserver(trace), console, events, health, shows]
        for one in others:
            one.on_stage(first_step)
        yield Observers([tracker, *others], check_there)
        check_there()  # models are written next


def is_shown(step: int, num_steps: int, every: int | None, *, live: bool) -> bool:
    """Return whether a response of this step is shown on the console."""
    done = step + 1
    if every is None:
        return live and (done == num_steps or str(done).strip("0") == "1")
    return every > 0 and done % every == 0


def stage_plans(run: Run) -> list[StagePlan]:
    """The steps, evaluations and predicted times of each stage."""
    prediction, config = run.placed.prediction, run.config.evaluation
    plans: list[StagePlan] = []
    for stage in run.stages:
        num_steps, step_s = stage.config.num_steps, None
        evaluated: tuple[int, ...] = ()
        if stage is run.main:
            step_s = prediction.step_time_s if prediction else None
            if run.suites or (config.num_episodes and env_actors(stage)):
                evaluated = (*range(0, num_steps, config.every or num_steps), num_steps)
        plans.append(StagePlan(stage.name, num_steps, step_s, evaluated))
    return plans


WEIGHTS = "weights"

Spans = Sequence[tuple[float, float]]


class Waits:
    """Measures what the steps of one stage wait for.

    Args:
        graph: The stage's step.
    """

    def __init__(self, graph: Graph) -> None:
        self._what = {node.name: _what(graph, node) for node in graph.nodes}

    def of(self, result: StepResult, begin_s: float, end_s: float) -> Mapping[str, float]:
        """Return what was waited for -> seconds; in "other" ones no worker was at work."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for span in result.spans:
            spans.setdefault(self._what[span.node], []).append((span.start_s, span.end_s))
        if result.weights_s:
            spans[WEIGHTS] = list(result.weights_s)
        every = [one for each in spans.values() for one in each]
        found = {what: union_s(its, begin_s, end_s) for what, its in spans.items()}
        found["other"] = max(0.0, end_s - begin_s - union_s(every, begin_s, end_s))
        return found


def union_s(spans: Spans, begin_s: float, end_s: float) -> float:
    """Return the seconds between two moments in which at least one span was going on."""
    total_s, reached_s = 0.0, begin_s
    for start_s, stop_s in sorted(spans):
        start_s, stop_s = max(start_s, reached_s), min(stop_s, end_s)
        if stop_s > start_s:
            total_s += stop_s - start_s
            reached_s = stop_s
    return total_s


def _what(graph: Graph, node: Node) -> str:
    match node.kind:
        case NodeKind.ROLLOUT:
            is_policy = issubclass(graph.roles[node.role or ""], Policy)
            return "generation" if is_policy else "environments"
        case NodeKind.TRAIN:
            return "training"
        case NodeKind.FORWARD:
            return "reward" if node.method == "score" else "forward passes"
        case _:
            return "ops"
