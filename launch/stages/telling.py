"""Who is told of a stage's steps: trackers, the timeline, whoever watches; and of bad signs.

And who is listened to: somebody may wish for more replicas.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from ...algorithms.roles.language import Policy
from ...configs.schema import MismatchConfig
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, Node, NodeKind
from ...dataflow.graph.role import Role
from ...dataflow.runtime.engine import Engine, StepResult
from ...dataflow.runtime.executor import Program, groups_of
from ...dataflow.runtime.recovery.resizing import Scale, why_not_elastic
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...dataflow.scheduler.schedule import Schedule
from ..inputs.record import load_step, step_cfg
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
from .headline import Headline, needed_nodes, ranked_nodes
from .job import Job
from .measuring import Evaluates
from .samples import newest_sample
from .sign_rules import RULES, SHORT, Past, Progress, Row, Rule, SignFacts
from .stages import Stage

KINDS: tuple[str, ...] = tuple(dict.fromkeys(rule.kind for rule in RULES))
"""All kinds of signs."""


@dataclass(frozen=True)
class BadSign:
    """One sign, at the step that made it certain.

    Attributes:
        kind: One of `KINDS`.
        node: The node whose metric shows it.
        first_step: The first of the steps in a row that show it.
        step: The last one so far.
        seen: What was seen, with numbers.
        means: What it usually means.
        remedy: What to change, with keys.
    """

    kind: str
    node: str
    first_step: int
    step: int
    seen: str
    means: str
    remedy: str

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.step}"
        when = steps if self.first_step < self.step else f"step {self.step}"
        return f"{when}, {self.node}: {self.seen}\n    {self.means}\n    remedy: {self.remedy}"


class Signs:
    """Finds signs of trouble in the steps of one stage, in order.

    Args:
        facts: What is known of the stage.

    Example:
        >>> signs = Signs(SignFacts())
        >>> for step in range(8):
        ...     for sign in signs.look(step, {"actor.generate/truncated": 1.0, **counts}):
        ...         print(sign)
    """

    def __init__(self, facts: SignFacts) -> None:
        self._past = Past(facts, Progress(facts.order))
        self._seen: dict[tuple[str, str], _Stretch] = {}

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take up what the rows of `metrics.jsonl` of earlier steps showed and reported."""
        for row in rows:
            values = {name: math.nan if v is None else float(v) for name, v in row.items()}
            self.look(int(row["step"]), values)

    def look(self, step: int, values: Row) -> list[BadSign]:
        """Return the signs that one more step makes certain.

        Args:
            step: Its index.
            values: `node/name` -> number, as logged.
        """
        self._past.progress.add(values)
        found: list[BadSign] = []
        for rule in RULES:
            for name in values:
                node, _, metric = name.partition("/")
                if metric not in rule.metrics:
                    continue
                seen = rule.look(self._past, node, values, metric)
                stretch = self._seen.setdefault((rule.kind, name), _Stretch())
                stretch.add(step, seen is not None, _num_responses(values))
                if stretch.is_due(rule) and not self._is_there(rule.unless, node):
                    stretch.told = True
                    told = rule.means, rule.remedy(self._past.facts)
                    found.append(BadSign(rule.kind, node, stretch.first, step, seen or "", *told))
        return found

    def _is_there(self, kind: str, node: str) -> bool:
        """Whether the newest step shows a kind of sign at a node."""
        return any(
            stretch.num_steps
            for (other, name), stretch in self._seen.items()
            if other == kind and name.partition("/")[0] == node
        )


def _num_responses(values: Row) -> float:
    """Return how many rows a step made, by its own metrics."""
    return values.get("run/samples_per_s", math.nan) * values.get("run/step_time_s", math.nan)


@dataclass
class _Stretch:
    """How long a sign has been present, or absent."""

    first: int = 0
    num_steps: int = 0
    num_away: int = 0
    num_responses: float = 0.0
    told: bool = False

    def add(self, step: int, there: bool, responses: float) -> None:
        """Count a step, which shows the sign or does not."""
        if there:
            self.first = self.first if self.num_steps else step
            self.num_steps, self.num_away = self.num_steps + 1, 0
            self.num_responses += responses
        else:
            self.num_steps, self.num_responses = 0, 0.0
            self.num_away += 1
            self.told = self.told and self.num_away < SHORT

    def is_due(self, rule: Rule) -> bool:
        """Whether the sign has been there long enough, and was not reported yet."""
        enough = not self.num_responses < rule.num_responses  # nan where it is not known
        return not self.told and self.num_steps >= rule.num_steps and enough


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
        """Return what was waited for -> seconds; in "other" ones no worker was at work.

        Args:
            result: The step.
            begin_s: When the step before it was complete, in seconds since the epoch.
            end_s: When it was itself.
        """
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


def facts_of(stage: Stage, mismatch: MismatchConfig, schedule: Schedule) -> SignFacts:
    """Return what is known of a stage before its first step.

    Args:
        stage: The stage.
        mismatch: When to complain that two engines disagree.
        schedule: How far generation may run ahead.
    """
    config = stage.config
    step = load_step(config.step, f"{stage.at}.step")
    cfg = step_cfg(step, config.cfg, f"{stage.at}.cfg").get("cfg")
    options: dict[str, tuple[str, Any]] = {}
    for name, key, value in _options(cfg, f"{stage.at}.cfg"):
        options.setdefault(name, (key, value))
    keys = {name: key for name, (key, value) in options.items() if not _is_least(name, value)}
    if schedule.max_lag:
        keys["max_lag"] = "schedule.max_lag"
    values = {name: value for name, (_, value) in options.items()}
    return SignFacts(
        at=stage.at,
        options=keys,
        order=tuple(ranked_nodes(stage)),
        needed=needed_nodes(stage),
        compares_groups=_compares_groups(stage),
        judges_clip=values.get("ratio_level", "token") == "token",
        fixed_length=values.get("min_new_tokens", 0) >= values.get("max_new_tokens", 1),
        mismatch_above=mismatch.warn_above,
    )


def _options(value: Any, at: str) -> Iterator[tuple[str, str, Any]]:
    """Yield name, whole key and value of every option of a config, outer ones first."""
    if not is_dataclass(value):
        return
    own = [(field.name, getattr(value, field.name)) for field in fields(value)]
    for name, inner in own:
        yield name, f"{at}.{name}", inner
    for name, inner in own:
        yield from _options(inner, f"{at}.{name}")


def _is_least(name: str, value: Any) -> bool:
    """Whether an option is a number of passes or parts at its least."""
    return name in ("epochs", "num_minibatches") and value == 1


def _compares_groups(stage: Stage) -> bool:
    """Whether an op that the policy's training depends on takes whole groups."""
    needed = needed_nodes(stage)
    return any(
        node.kind is NodeKind.OP and node.scope == "group" and node.name in needed
        for node in stage.graph.nodes
    )


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
    alone = "" if engine.executor.elastic else "one process does all the work"
    return {
        group.name: ElasticGroup(most, alone or why_not_elastic(engine.programs, group.name))
        for group in groups_of(engine.programs)
    }
