"""The loop of a stage: engine, steps, evaluations, checkpoints, export."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError, StateError, one_process
from ...dataflow.graph.role import Role
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.checkpoint import read_resume_point
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import groups_of
from ...dataflow.runtime.ledger import check, text_of
from ...dataflow.runtime.placement import follow
from ...dataflow.runtime.recovery import Scale, why_not_elastic
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...dataflow.scheduler.scheduler import Scheduler
from ..inputs.record import Stage
from ..inputs.run import Run
from ..inputs.sizes import stage_flow, stage_schedule
from ..placement.place import make_executor
from ..run_dir.checkpoint import CheckpointStore, checkpoints_in
from ..run_dir.evaluations import Evaluations
from ..run_dir.files import required_object
from ..run_dir.progress import RunProgress
from ..run_dir.run_folder import ElasticGroup, RunFolder, read_wish, wish_version, write_groups
from ..run_dir.samples import SAMPLES
from ..run_dir.step_logs import LEDGER, opened_ledger, read_ledger
from ..run_dir.stop import stoppable
from ..run_dir.trackers import Trackers
from .evaluation import EnvEvaluator, Evaluates, Evaluator, HeldOutLoss, Measuring, env_actors
from .export import MODELS, combined_sha256, export_roles, files_sha256
from .observers import StageObserver, callback_class, observing, sample_watch
from .push import PushObserver
from .stage_result import Deaths, Headline, ObservedStep, StageResult
from .worker_specs import Results, exporting_specs, worker_specs

_MEMORY = Path("/dev/shm")


def run_stage(
    run: Run,
    stage: Stage,
    home: RunFolder,
    results: Results,
    trackers: Trackers,
    progress: RunProgress,
) -> StageResult:
    """Train one stage to its end, from its newest checkpoint if there is one."""
    specs = worker_specs(stage, run, results)
    store = CheckpointStore(home.checkpoints, keep=run.config.keep_checkpoints)
    point = read_resume_point(store, stage.graph, stage.seed)
    first_step, num_steps = point.state.step if point else 0, stage.config.num_steps
    config, kept, headline = run.config.evaluation, Evaluations(home.path), Headline(stage)
    with progress.stage(stage.name, first_step) as shown:
        started_s = time.monotonic()
        evaluator = _evaluator(run, stage, home)
        found = StageResult(first_step=first_step, num_steps=first_step)
        found.deaths.num_complete = first_step
        engine = _engine(run, stage, specs, evaluator, home, found.deaths)
        measuring = Measuring(evaluator, config, kept, first_step, num_steps, store, shown)
        shown.working = engine.working
        own = _own_observers(run, stage, home, results)
        with engine, observing(run, stage, home, shown, trackers, first_step, own) as observers:
            found.deaths.tell = observers.on_event
            measuring.begin(engine, observers.on_evaluation)
            with (
                mirror_of(home.path, mirrored=run.config.checkpoint.mirror == "neighbor") as mirror,
                stoppable(engine.longest.limit_s) as stop,
            ):
                steps = engine.run(
                    run.sources[stage.name],
                    num_steps,
                    checkpoint_every=run.config.checkpoint_every,
                    checkpoints=store,
                    stop=stop,
                    pauses=measuring.pauses(engine),
                    scale=stage_scale(engine, home.path, progress.note)
                    if stage is run.main
                    else None,
                    mirror=mirror,
                    ledger=opened_ledger(stage.graph, home.path / LEDGER, first_step),
                )
                mark_s, measured_s = time.monotonic(), 0.0
                for result in steps if measuring.stopped is None else ():
                    now_s = time.monotonic()
                    took_s = now_s - mark_s - (measuring.took_s - measured_s)
                    step = ObservedStep.of(stage, result, took_s, headline)
                    found.add(step)
                    stop.reason = observers.on_step(step) or stop.reason
                    mark_s, measured_s = now_s, measuring.took_s
            saved = max(checkpoints_in(store.folder), default=0)  # less, if it had just gone back
            stop.end(f"after {saved} of {num_steps} steps, with a checkpoint")
            unmeasured = measuring.end(engine, found.num_steps)
        observers.on_end(found.num_steps)
        found.before, found.after = measuring.before, measuring.after
        found.stopped = measuring.why_stopped
        if stop.reason and not found.stopped:
            found.stopped = f"stopped after {found.num_steps} of {num_steps} steps: {stop.reason}"
        found.ledger = _ledger(stage, home, found.num_steps)
        found.checkpoints_missed = store.num_missed
        _export(run, stage, home, results, store, found)
        if unmeasured is not None:
            raise unmeasured  # what was learnt is written by now
        found.wall_time_s = time.monotonic() - started_s
    return found


@contextmanager
def mirror_of(folder: Path, *, mirrored: bool) -> Generator[CheckpointStore | None]:
    """Open the store for a stage's state in this machine's memory; None unless `mirrored`."""
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


def _own_observers(
    run: Run, stage: Stage, home: RunFolder, results: Results
) -> list[StageObserver]:
    with one_process():
        own = [callback_class(reference)() for reference in run.config.callbacks]
    if stage is run.main and (run.config.push.folder or run.config.push.hub):
        own.append(PushObserver(run, stage, home, results))
    return own


def _ledger(stage: Stage, home: RunFolder, num_steps: int) -> str:
    lines = read_ledger(home.path / LEDGER)
    if not lines:
        return "no step was taken since there are ledgers"
    first = lines[0].step
    check([replace(line, step=line.step - first) for line in lines], num_steps - first)
    rollouts = [node.name for node in stage.graph.nodes if node.kind is NodeKind.ROLLOUT]
    return text_of(lines, rollouts)


def _evaluator(run: Run, stage: Stage, home: RunFolder) -> Evaluates | None:
    if stage is not run.main:
        return None
    found: Evaluates | None = None
    if run.suites:
        found = Evaluator(run.suites, run.config.evaluation.num_examples, home.path, stage)
    elif run.config.evaluation.num_episodes and env_actors(stage):
        found = EnvEvaluator(stage, run.config.evaluation, run.sources[stage.name], run.data.spec)
    if run.held_out_rows is not None:
        graph = run.held_out_rows.graph
        placement = follow(graph, stage.graph, stage.placement)
        found = HeldOutLoss(run.held_out_rows, found, placement)
    return found


def _engine(
    run: Run,
    stage: Stage,
    specs: dict[str, WorkerSpec | Role],
    evaluator: Evaluates | None,
    home: RunFolder,
    deaths: Deaths,
) -> Engine:
    watch, log = sample_watch(stage, run.config.samples, run.data, home.path)
    for role, spec in specs.items() if log else ():
        if hasattr(spec, "samples_folder"):
            shown: Any = spec
            specs[role] = replace(shown, samples_folder=str((home.path / SAMPLES).resolve()))
    return Engine(
        stage.graph,
        stage.placement,
        workers={**specs, **(evaluator.workers if evaluator else {}), **log},
        schedule=stage_schedule(stage.graph, run.config.schedule),
        seed=stage.seed,
        executor=make_executor(run.executor),
        also=evaluator.programs if evaluator else None,
        watch=watch,
        recovery=run.config.recovery,
        recovered=deaths.note,
    )


def stage_scale(engine: Engine, folder: Path, report: Callable[[str], None]) -> Scale:
    """Write into a run's folder which groups can be resized, and read requests from there."""
    most = engine.programs["main"].placement.num_chunks
    alone = "" if engine.executor.elastic else "one process does all the work"
    groups = {
        group.name: ElasticGroup(most, alone or why_not_elastic(engine.programs, group.name))
        for group in groups_of(engine.programs)
    }
    write_groups(folder, groups)
    damaged: list[str] = []

    def wish() -> Mapping[str, int]:
        try:
            return read_wish(folder)
        except ConfigError as error:
            if not damaged:
                damaged.append(str(error))
                report(str(error))
            return {}

    return Scale(wish, report, lambda: wish_version(folder))


def _export(
    run: Run,
    stage: Stage,
    home: RunFolder,
    results: Results,
    store: CheckpointStore,
    found: StageResult,
) -> None:
    """Write the trained models; a warm-up's checkpoints go, for its models are its result.

    Whatever engine trained them, the default one reads its checkpoint.
    """
    last = store.latest()
    if last is None:
        raise StateError(f"stage '{stage.name}' ended without a checkpoint in {store.folder}")
    specs = exporting_specs(stage, run, results)
    trained = {role: specs[role] for role in stage.graph.trains_per_step}
    tokenizer = run.data.tokenizer if run.data.has_text else None
    _, found.roles_sha256 = export_roles(trained, last, tokenizer, home.path / MODELS, stage.seed)
    found.weights_sha256 = combined_sha256(found.roles_sha256)
    if stage is not run.main:
        home.write_summary(
            {
                "stage": stage.name,
                "graph": stage.graph.name,
                "num_steps": stage.config.num_steps,
                "weights_sha256": found.weights_sha256,
                "roles_sha256": found.roles_sha256,
                "files_sha256": files_sha256(home.path / MODELS),
                "samples_per_s": found.samples_per_s,
                "env_steps_per_s": found.env_steps_per_s,
                "step_time_s": found.step_time_s,
            }
        )
        shutil.rmtree(home.checkpoints)


def check_stage_models(stage: str, home: RunFolder) -> None:
    """Require that the models of a stage that has ended are as it wrote them."""
    try:
        written = required_object(home.summary)["files_sha256"]
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


def steps_taken(run: Run, folder: RunFolder) -> int:
    """Steps of the main stage in the run's newest checkpoint, from which the run can go on."""
    main, num_steps = run.main, run.main.config.num_steps
    store = CheckpointStore(folder.checkpoints, keep=run.config.keep_checkpoints)
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
        flow = stage_flow(main.graph, main.placement, run.config.schedule)
        Scheduler(flow, run.config.schedule, num_steps, resume=point.state)
    except ValueError as error:
        raise ConfigError(
            f"run '{folder.id}' cannot take more steps: {error}\n"
            "    start a new run from its models instead"
        ) from error
    return step
