"""Carrying out one stage: its engine, its logs, its checkpoints, and what it leaves behind."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError, StateError
from ...dataflow.graph.graph import NodeKind
from ...dataflow.graph.role import Role
from ...dataflow.runtime.checkpoint import read_resume_point
from ...dataflow.runtime.engine import Engine, StepResult
from ...dataflow.runtime.executor import Restart
from ...dataflow.runtime.placement import follow
from ...dataflow.runtime.recovery.ledger import check, text_of
from ...dataflow.runtime.recovery.limits import Recovered
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...dataflow.scheduler.scheduler import Scheduler
from ..placement.place import make_executor
from ..run_dir.checkpoint import CheckpointStore, checkpoints_in
from ..run_dir.evaluations import Evaluations, Measured
from ..run_dir.ledger import LEDGER, opened_ledger, read_ledger
from ..run_dir.progress import RunProgress, StageProgress
from ..run_dir.progress_events import format_duration
from ..run_dir.run_files import required_object
from ..run_dir.run_folder import RunFolder
from ..run_dir.stop import stoppable
from ..run_dir.trackers.registry import Trackers
from .checks import node_seconds
from .env_evaluation import EnvEvaluator, env_actors
from .evaluation import stage_evaluator
from .export import combined_sha256, export_roles, files_sha256
from .held_out_loss import HeldOutLoss
from .job import Job
from .measuring import Evaluates, Measuring
from .samples import SampleTables, sample_watch
from .stages import Stage
from .streaming import stage_flow, stage_schedule
from .telling import TimedEvaluator, stage_scale, told
from .worker_specs import Results, exporting_specs, worker_specs

Tell = Callable[[str, int, str, dict[str, Any]], None]
"""Function called with a death: its kind, the step, a message, and further fields of the event."""

_MEMORY = Path("/dev/shm")


@dataclass
class Deaths:
    """The deaths of processes that a stage went on from.

    Attributes:
        recovered: Those after which it went back, in order.
        restarts: Groups that were started again beside it.
        tell: Is called with each death; does nothing before the first step.
        num_complete: Steps that are complete.
    """

    recovered: list[Recovered] = field(default_factory=list[Recovered])
    restarts: list[Restart] = field(default_factory=list[Restart])
    tell: Tell | None = None
    num_complete: int = 0

    def note(self, one: Recovered | Restart) -> None:
        """Note that the run has gone back, or that a group was started again beside it."""
        if isinstance(one, Recovered):
            self.recovered.append(one)
            seen = one.said.partition("\n")[0]
            self._say("recovered", one.step, seen, _means(one))
            return
        self.restarts.append(one)
        means = f"it was started again beside the run, which took {format_duration(one.took_s)}"
        self._say("restarted", self.num_complete, f"a process of group '{one.group}' died", means)

    def _say(self, kind: str, step: int, seen: str, means: str) -> None:
        if self.tell is not None:
            fields = {"node": "", "seen": seen, "means": means, "remedy": _REMEDY}
            self.tell(kind, step, f"{seen}; {means}", fields)

    @property
    def summary(self) -> dict[str, Any]:
        """The fields about deaths of the run's summary.json."""
        return {
            "num_recoveries": len(self.recovered),
            "num_restarts": len(self.restarts),
            "longest_pause_s": max(
                (
                    *(one.took_s for one in self.recovered),
                    *(one.held_up_s for one in self.restarts),
                ),
                default=0.0,
            ),
            "steps_recomputed": sum(one.completed - one.step for one in self.recovered),
        }

    @property
    def text(self) -> str:
        """Return one line about workers that died; "" if none did."""
        if not (self.recovered or self.restarts):
            return ""
        said = self.summary
        return (
            f"processes died: the run went back {said['num_recoveries']} times and computed "
            f"{said['steps_recomputed']} steps again, groups were started again beside it "
            f"{said['num_restarts']} times; the longest pause was "
            f"{format_duration(said['longest_pause_s'])}"
        )


_REMEDY = "none is needed as long as the run goes on; `recovery` says how often it may"


def _means(one: Recovered) -> str:
    where = "its start" if one.source == "start" else f"step {one.step} of its {one.source}"
    count = one.completed - one.step
    again = f"{count} step is" if count == 1 else f"{count} steps are"
    pause = format_duration(one.took_s)
    return f"the run goes on from {where}, {again} computed again (pause {pause})"


@contextmanager
def mirror_of(folder: Path, *, mirrored: bool) -> Generator[CheckpointStore | None]:
    """Open the store for a stage's state in this machine's memory; None unless `mirrored`.

    Args:
        folder: The stage's folder; what a killed process has left of its store is removed.
        mirrored: Whether the state is kept there after every step.
    """
    if not mirrored:
        yield None
        return
    memory = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    place = memory / f"penstock-mirror-{os.getuid()}-{name}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        yield CheckpointStore(place / "checkpoints", keep=1)
    finally:
        shutil.rmtree(place, ignore_errors=True)


MODELS = "models"
"""Below a stage's folder: a model folder for each trained role."""

_ENV_STEPS, _ENV_RESTARTS = "env_steps", "env_restarts"
"""Of a rollout: the metrics that count steps of environments, those of resets left out, and those
that went wrong and were restarted."""

_MOVES = "num_moves"
"""A metric of games alone."""


@dataclass
class Outcome:
    """What a stage came to.

    Attributes:
        weights_sha256: Hash of all trained roles' weights.
        roles_sha256: Role name -> hash of its weights.
        step_times_s: Wall time of every step taken by this process.
        node_times_s: Node -> how long its busiest rank worked on it, in each of those steps.
        node_peaks: Node -> the most bytes that any rank's CUDA device held during it; 0 without.
        first_step: The step it began at: above 0 if it went on from a checkpoint.
        num_steps: Steps taken by its end, those before `first_step` included.
        num_samples: Rows made by those steps.
        num_env_steps: Steps of environments, or moves of games, taken in them.
        num_env_restarts: Environments that went wrong in them and were restarted.
        env_unit: What `num_env_steps` counts.
        before: Suite -> what was measured before the first step; empty if nothing is.
        after: And after the last.
        checkpoints_missed: Checkpoints that were due and could not be written.
        stopped: Why it ended before its last step, in words; "" if it did not.
        deaths: Of processes, that it went on from.
        ledger: What its ledger says, once that adds up.
        wall_time_s: From the first model built to the last file written.
    """

    weights_sha256: str = ""
    roles_sha256: dict[str, str] = field(default_factory=dict[str, str])
    step_times_s: list[float] = field(default_factory=list[float])
    node_times_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    node_peaks: dict[str, int] = field(default_factory=dict[str, int])
    first_step: int = 0
    num_steps: int = 0
    num_samples: int = 0
    num_env_steps: float = 0.0
    num_env_restarts: float = 0.0
    env_unit: str = "environment steps"
    before: dict[str, Measured] = field(default_factory=dict[str, Measured])
    after: dict[str, Measured] = field(default_factory=dict[str, Measured])
    checkpoints_missed: int = 0
    stopped: str = ""
    deaths: Deaths = field(default_factory=Deaths)
    ledger: str = ""
    wall_time_s: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Rows made per second of stepping; nan if this process took no step."""
        return self._per_s(self.num_samples)

    @property
    def env_steps_per_s(self) -> float | None:
        """Steps of environments per second of stepping; None if there are none."""
        return self._per_s(self.num_env_steps) if self.num_env_steps else None

    def _per_s(self, count: float) -> float:
        total_s = sum(self.step_times_s)
        return count / total_s if total_s else float("nan")

    @property
    def step_time_s(self) -> float:
        """Median wall time of a step; nan if this process took none."""
        return statistics.median(self.step_times_s) if self.step_times_s else float("nan")


def run_stage(
    job: Job,
    stage: Stage,
    home: RunFolder,
    results: Results,
    trackers: Trackers,
    progress: RunProgress,
) -> Outcome:
    """Train one stage to its end, from its newest checkpoint if there is one.

    Args:
        job: The run.
        stage: The stage.
        home: Its folder: the run's own for the main stage.
        results: Stages that have finished.
        trackers: Where its metrics go.
        progress: Whoever watches.

    Raises:
        WorkerError: If user code fails, or nothing comes back within the deadline.
        KeyboardInterrupt: If SIGINT ended it early.
        Terminated: If SIGTERM did.
    """
    specs = worker_specs(stage, job.run, job.data, results)
    store = CheckpointStore(home.checkpoints, keep=job.run.keep_checkpoints)
    point = read_resume_point(store, stage.graph, stage.seed)
    first_step = point.state.step if point else 0
    with progress.stage(stage.name, first_step) as shown:
        return _carried_out(job, stage, home, results, trackers, shown, specs, store, first_step)


def _carried_out(
    job: Job,
    stage: Stage,
    home: RunFolder,
    results: Results,
    trackers: Trackers,
    shown: StageProgress,
    specs: dict[str, WorkerSpec | Role],
    store: CheckpointStore,
    first_step: int,
) -> Outcome:
    """The stage's steps and evaluations from its first step on, and what is left of them."""
    started_s = time.monotonic()
    run, evaluator = job.run, _evaluator(job, stage, home, shown)
    outcome = Outcome(first_step=first_step, deaths=Deaths(num_complete=first_step))
    engine = _engine(job, stage, specs, evaluator, home, outcome.deaths)
    config, num_steps, kept = run.evaluation, stage.config.num_steps, Evaluations(home.path)
    tables = SampleTables(stage.name, home.path, first_step, run.samples.track_every, trackers)
    measuring = Measuring(evaluator, config, kept, first_step, num_steps, store)
    shown.working = engine.working
    took = (lambda: evaluator.took_s) if evaluator else (lambda: None)
    with engine, told(job, stage, home, shown, trackers, first_step, took) as all_told:
        outcome.deaths.tell = all_told.died
        measuring.begin(engine, all_told.evaluated)
        with (
            mirror_of(home.path, mirrored=run.mirrored) as mirror,
            stoppable(engine.longest.limit_s) as stop,
        ):
            steps = engine.run(
                job.sources[stage.name],
                num_steps,
                checkpoint_every=run.checkpoint_every,
                checkpoints=store,
                stop=stop,
                pauses=measuring.pauses(engine),
                scale=stage_scale(engine, home.path, shown.note) if stage is job.main else None,
                mirror=mirror,
                ledger=opened_ledger(stage.graph, home.path / LEDGER, first_step),
            )
            left = steps if measuring.stopped is None else ()
            for result in _timed(left, stage, outcome, measuring):
                samples, env_steps = num_samples(stage, result), num_env_steps(result)
                took_s = outcome.step_times_s[-1]
                all_told.step(result, took_s, samples, env_steps, outcome.env_unit)
                outcome.deaths.num_complete = result.step + 1
                tables.send(result.step)
        outcome.num_steps = first_step + len(outcome.step_times_s)
        saved = max(checkpoints_in(store.folder), default=0)  # less, if it had gone back just now
        stop.end(f"after {saved} of {num_steps} steps, with a checkpoint")
        unmeasured = measuring.end(engine)
    outcome.ledger = _ledger(stage, home, outcome.num_steps)
    tables.send(outcome.num_steps)
    outcome.checkpoints_missed = store.num_missed
    outcome.before, outcome.after = measuring.before, measuring.after
    outcome.stopped = measuring.why_stopped
    _export(job, stage, home, results, store, outcome)
    if unmeasured is not None:
        raise unmeasured  # what was learnt is written by now
    outcome.wall_time_s = time.monotonic() - started_s
    return outcome


def _ledger(stage: Stage, home: RunFolder, num_steps: int) -> str:
    """Describe what the stage's ledger says."""
    lines = read_ledger(home.path / LEDGER)
    if not lines:
        return "no step was taken since there are ledgers"
    first = lines[0].step
    check([replace(line, step=line.step - first) for line in lines], num_steps - first)
    rollouts = [node.name for node in stage.graph.nodes if node.kind is NodeKind.ROLLOUT]
    return text_of(lines, rollouts)


def _evaluator(
    job: Job, stage: Stage, home: RunFolder, shown: StageProgress
) -> TimedEvaluator | None:
    """Who measures the stage, if there is anything to measure."""
    if stage is not job.main:
        return None
    found: Evaluates | None = None
    if job.suites:
        found = stage_evaluator(stage, job.suites, job.run.evaluation.num_examples, home.path)
    elif job.run.evaluation.num_episodes and env_actors(stage):
        found = EnvEvaluator(stage, job.run.evaluation, job.sources[stage.name], job.data.spec)
    if job.held_out_rows is not None:
        found = HeldOutLoss(
            job.held_out_rows, found, lambda graph: follow(graph, stage.graph, stage.placement)
        )
    return TimedEvaluator(found, shown) if found else None


def _engine(
    job: Job,
    stage: Stage,
    specs: dict[str, WorkerSpec | Role],
    evaluator: Evaluates | None,
    home: RunFolder,
    deaths: Deaths,
) -> Engine:
    watch, log = sample_watch(stage, job.run.samples, job.data, home.path)
    return Engine(
        stage.graph,
        stage.placement,
        workers={**specs, **(evaluator.workers if evaluator else {}), **log},
        schedule=stage_schedule(stage.graph, job.run.schedule),
        seed=stage.seed,
        executor=make_executor(job.run.placement.executor),
        also=evaluator.programs if evaluator else None,
        watch=watch,
        recovery=job.run.recovery,
        recovered=deaths.note,
    )


def _timed(
    steps: Iterable[StepResult], stage: Stage, outcome: Outcome, measuring: Measuring
) -> Iterator[StepResult]:
    """Yield the steps, noting how long each took and how many rows it made.

    Time spent on evaluations between steps is not theirs.
    """
    mark_s, measured_s = time.monotonic(), 0.0
    for result in steps:
        now_s = time.monotonic()
        outcome.step_times_s.append(now_s - mark_s - (measuring.took_s - measured_s))
        outcome.num_samples += num_samples(stage, result)
        outcome.num_env_steps += num_env_steps(result)
        outcome.num_env_restarts += _total(result, _ENV_RESTARTS)
        outcome.env_unit = _unit_of(result.metrics)
        for node, seconds in node_seconds(result.spans).items():
            outcome.node_times_s.setdefault(node, []).append(seconds)
        for span in result.spans:
            most = max(span.peak_bytes, outcome.node_peaks.get(span.node, 0))
            outcome.node_peaks[span.node] = most
        yield result
        mark_s, measured_s = now_s, measuring.took_s


def num_samples(stage: Stage, result: StepResult) -> int:
    """Rows that a step's rollouts made; without rollouts, items its tables brought."""
    rollouts = [node.name for node in stage.graph.nodes if node.kind is NodeKind.ROLLOUT]
    if rollouts:
        return sum(result.num_rows.get(name, 0) for name in rollouts)
    return sum(stage.config.per_step.values())


def num_env_steps(result: StepResult) -> float:
    """Steps of environments, or moves of games, that a step's rollouts counted."""
    return _total(result, _ENV_STEPS)


def _total(result: StepResult, metric: str) -> float:
    return sum(value for name, value in result.metrics.items() if name.endswith(f"/{metric}"))


def _unit_of(metrics: Mapping[str, float]) -> str:
    """What `num_env_steps` counts."""
    is_game = any(name.endswith(f"/{_MOVES}") for name in metrics)
    return "moves" if is_game else "environment steps"


def _export(
    job: Job,
    stage: Stage,
    home: RunFolder,
    results: Results,
    store: CheckpointStore,
    outcome: Outcome,
) -> None:
    """Write the trained models; a warm-up's checkpoints go, for its models are its result.

    Whatever engine trained them, the default one reads its checkpoint.
    """
    last = store.latest()
    if last is None:
        raise StateError(f"stage '{stage.name}' ended without a checkpoint in {store.folder}")
    specs = exporting_specs(stage, job.run, job.data, results)
    trained = {role: specs[role] for role in stage.graph.trains_per_step}
    tokenizer = job.data.tokenizer if job.data.has_text else None
    exported = export_roles(trained, last, tokenizer, home.path / MODELS, stage.seed)
    outcome.roles_sha256 = dict(exported.weights_sha256)
    outcome.weights_sha256 = combined_sha256(outcome.roles_sha256)
    if stage is not job.main:
        _write_stage_summary(stage, home, outcome)
        shutil.rmtree(home.checkpoints)


def _write_stage_summary(stage: Stage, home: RunFolder, outcome: Outcome) -> None:
    home.write_summary(
        {
            "stage": stage.name,
            "graph": stage.graph.name,
            "num_steps": stage.config.num_steps,
            "weights_sha256": outcome.weights_sha256,
            "roles_sha256": outcome.roles_sha256,
            "files_sha256": files_sha256(home.path / MODELS),
            "samples_per_s": outcome.samples_per_s,
            "env_steps_per_s": outcome.env_steps_per_s,
            "step_time_s": outcome.step_time_s,
        }
    )


def check_stage_models(stage: str, home: RunFolder) -> None:
    """Require that the models of a stage that has ended are as it wrote them.

    Raises:
        ConfigError: If one of their files is missing or has changed, or the stage's summary is
            damaged.
    """
    try:
        summary = required_object(home.summary)
        if summary["stage"] == stage and "files_sha256" not in summary:
            return  # of a version that did not write them
        written = summary["files_sha256"]
        there = files_sha256(home.path / MODELS)
        changed = sorted(dict(written.items() ^ there.items()))
    except (ConfigError, OSError, TypeError, KeyError, AttributeError) as error:
        said = str(error).split("\n")[0]
        said = said if isinstance(error, ConfigError) else f"{type(error).__name__}: {said}"
        raise ConfigError(
            f"stage '{stage}' has ended, but '{home.summary}' does not say with which models: "
            f"{said}\n    remove '{home.path}' to train it again"
        ) from error
    if changed:
        raise ConfigError(
            f"stage '{stage}': '{home.path / MODELS / changed[0]}' is not as the stage wrote it\n"
            f"    bring it back, or remove '{home.path}' to train it again"
        )


def steps_taken(job: Job, folder: RunFolder) -> int:
    """Steps of the main stage in the run's newest checkpoint, from which the job can go on.

    Raises:
        ConfigError: If it cannot: it is to take fewer steps than that, or more than its checkpoint
            can be continued by.
    """
    main, num_steps = job.main, job.main.config.num_steps
    store = CheckpointStore(folder.checkpoints, keep=job.run.keep_checkpoints)
    point = read_resume_point(store, main.graph, main.seed)
    if point is None:
        return 0
    step = point.state.step
    if step > num_steps:
        raise ConfigError(
            f"run '{folder.id}' has taken {step} steps already, which is more than "
            f"algorithm.num_steps={num_steps}\n    give it at least {step}"
        )
    try:
        flow = stage_flow(main.graph, main.placement, job.run.schedule)
        Scheduler(flow, job.run.schedule, num_steps, resume=point.state)
    except ValueError as error:
        raise ConfigError(
            f"run '{folder.id}' cannot take more steps: {error}\n"
            "    start a new run from its models instead"
        ) from error
    return step
