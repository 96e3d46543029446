"""Carrying out a run: from nothing to a trained policy, on from where it was stopped, or dry.

With `--dry-run`, all that a launch checks is checked, against the cluster that `cluster=` describes
or, without it, the one that a plan's file was made for. Nothing is started, downloaded or written,
so a laptop can say what a cluster would. Only `placement=auto` without a described cluster asks the
Ray that `RAY_ADDRESS` names, if it is set, what there is.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from ...configs.schema import ClusterConfig
from ...configs.validate import validated
from ...dataflow.errors import NOT_STARTED, ConfigError, PenstockError, WorkerError, no_exit
from ...dataflow.render.svg import to_svg
from ...planner.inputs.cluster import ClusterSpec
from ...planner.plan.plan import Plan
from ...planner.report.plan_texts import cluster_text
from ...workers.executors.process_setup import threads_within
from ..inputs.run import AUTO, Run, dumped, executor_kind, resolve, run_config
from ..inputs.sizes import streaming_lines
from ..placement.machine import cluster_spec, machine_name, named_devices, with_cluster
from ..placement.place import check_fits, process_lines
from ..run_dir.failures import in_our_words, left_debugger
from ..run_dir.progress import RunProgress
from ..run_dir.provenance import (
    CodeVersion,
    Origins,
    ProcessUsage,
    changed_files,
    changed_versions,
    check_models,
    code_version,
    origins_now,
)
from ..run_dir.resume import Resumed, resumed_config
from ..run_dir.run_folder import RunFolder, RunRecord, change_config, create_run, record_of
from ..run_dir.stop import Terminated, say, tell, unhidden
from ..run_dir.trackers import TRACKERS, RunInfo, Tracker, Trackers
from ..stages.export import check_token
from ..stages.observers import callback_class, stage_plans
from ..stages.prepare import model_folders, prepare
from ..stages.push import check_push_folder
from ..stages.report import (
    about_model,
    first_notes,
    not_reproducible,
    shown_rows,
    statistics,
    summary_of,
    write_report,
)
from ..stages.run_stage import MODELS, check_stage_models, run_stage, steps_taken
from ..stages.stage_result import StageResult
from .hydra_app import refuse_resume


def run_composed(
    composed: dict[str, Any], given: Sequence[str], shown: Tracker | None = None
) -> RunFolder:
    """Carry out what was composed: a new run, or one that goes on."""
    path, resumed = composed.pop("resume"), None
    if path is not None:
        if not isinstance(path, str):
            raise ConfigError(f"'resume': expected the folder of a run, got {path!r}")
        resumed = resumed_config(Path(path), composed, given)
        composed = resumed.config
    # A run that goes on is held before its data are read, which may take minutes.
    with _plain_warnings(), nullcontext() if resumed is None else resumed.folder.locked():
        return _carry_out(composed, resumed, shown=shown)


def carry_out_again(before: RunRecord, config: dict[str, Any]) -> RunFolder:
    with _plain_warnings(), no_exit(ConfigError):
        return _carry_out(config, None, before)


def _carry_out(
    composed: dict[str, Any],
    resumed: Resumed | None,
    again: RunRecord | None = None,
    shown: Tracker | None = None,
) -> RunFolder:
    code = code_version()
    file = None if resumed is None or resumed.moved else resumed.folder.plan
    file = file if again is None else again.folder.plan
    placed = Plan.read(file) if file is not None and file.exists() else None
    config = run_config(composed)
    tell(recovery=asdict(config.recovery))
    check_token("push.hub", config.push.hub)
    check_push_folder(config.push.folder)
    for reference in config.callbacks:
        callback_class(reference)
    trackers = Trackers(config.tracker, tables=config.samples.track_every is not None)
    if shown is not None:
        trackers.add("the notebook's curve", shown)
    run = prepare(resolve(config), placed)
    progress = RunProgress(stage_plans(run), config.progress)
    for line in first_notes(run):
        progress.note(line)
    if again is not None:
        _check_data(again, run.data.fingerprint)
    origins = origins_now(model_folders(run), machine_name())
    plain = dumped(run)
    written = yaml.safe_dump(plain, sort_keys=False)
    plan = run.placed.model_dump_json(indent=2, exclude_defaults=True)
    runs = Path(config.runs)
    had_runs = runs.exists()
    if resumed is None:
        folder = create_run(
            runs,
            name=config.name or run.main.name,
            seed=config.seed,
            config=written,
            data=run.data.fingerprint,
            origins=origins,
            plan=plan,
            graph=to_svg(run.main.graph),
            code=code,
            not_reproducible=not_reproducible(run),
        )
    else:
        folder = resumed.folder
        _check_unchanged(folder, run.data.fingerprint, origins, code)
    with (
        _ended_early(folder, resumed is None, had_runs, trackers),
        folder.locked() if resumed is None else nullcontext(),
        ProcessUsage() as usage,
        trackers,
        threads_within(run.executor.num_threads),
    ):
        if resumed is not None and resumed.noted:
            step = steps_taken(run, folder)
            if resumed.extended:
                folder.set_summary_aside()
            moved = plan if resumed.moved else None
            why = not_reproducible(run)
            change_config(folder, written, step=step, plan=moved, not_reproducible=why)
        tell(folder=str(folder.path))
        homes = {stage.name: folder.stage(stage.name) for stage in run.stages[:-1]}
        homes[run.main.name] = folder
        paths = {name: home.path for name, home in homes.items()}
        why = record_of(folder).not_reproducible
        trackers.start(RunInfo(folder.id, paths, plain, resumed is not None, why))
        if about := about_model(run):
            progress.note(about)
        _stages(run, homes, code, usage, progress, resumed is not None, trackers)
    return folder


def _check_data(record: RunRecord, found: str) -> None:
    if record.data not in (None, found):
        raise ConfigError(
            f"run '{record.folder.id}' was started on other problems: the data's fingerprint was "
            f"{record.data} and is {found} now\n"
            "    bring the data back as it was, or start a new run"
        )


def _check_unchanged(folder: RunFolder, data: str, origins: Origins, code: CodeVersion) -> None:
    record = record_of(folder)
    _check_data(record, data)
    check_models(folder.id, record.origins, origins)
    others = [f"with another {path}" for path in changed_files(record.origins, origins)]
    if record.code != code:
        others.append(f"by penstock {record.code} and goes on with {code}")
    if versions := changed_versions(record.origins, origins):
        others.append(f"with other versions of packages ({versions})")
    for other in others:
        say(
            f"warning: run '{folder.id}' was started {other}; what comes out may differ from a run "
            "of either"
        )


def _stages(
    run: Run,
    homes: Mapping[str, RunFolder],
    code: CodeVersion,
    usage: ProcessUsage,
    progress: RunProgress,
    resumed: bool,
    trackers: Trackers,
) -> None:
    for line in [] if resumed else statistics(run):
        progress.note(line)
    started_s = time.monotonic()
    results: dict[str, Any] = {}
    outcome, folder = StageResult(), homes[run.main.name]
    for stage in run.stages:
        home = homes[stage.name]
        home.path.mkdir(parents=True, exist_ok=True)
        if stage is not run.main:
            results[stage.name] = (stage, home.path / MODELS)
            if home.summary.exists():
                check_stage_models(stage.name, home)
                progress.time.end(stage.name, 0.0)
                continue
        outcome = run_stage(run, stage, home, results, trackers, progress)
    wall_time_s = time.monotonic() - started_s
    usage.sample()
    summary = summary_of(
        run,
        outcome,
        folder,
        code=code,
        usage=usage,
        wall_time_s=wall_time_s,
        stage_times_s=progress.time.took_s,
        resumed=resumed,
    )
    write_report(run, folder, outcome, summary, progress, trackers.place)
    folder.write_summary(summary)
    trackers.finish(summary)


@contextmanager
def _ended_early(
    folder: RunFolder, is_new: bool, had_runs: bool, trackers: Trackers
) -> Generator[None]:
    # Say how a run that has ended early goes on; a new one that is refused leaves nothing.
    # Some of what cannot be is found only when workers are built. What is refused cannot go on as
    # it is, so nothing is said of that.
    try:
        yield
    except BaseException as error:
        begun, error = trackers.num_steps > 0, unhidden(error)
        if left_debugger(error):
            error = KeyboardInterrupt("in the debugger")
        if not isinstance(error, PenstockError | KeyboardInterrupt | Terminated):
            error = in_our_words(error, running=begun or not is_new)
        refused = isinstance(error, NOT_STARTED)
        if begun and refused:
            error = WorkerError(str(error)).with_traceback(error.__traceback__)
            error.add_note(f"what was trained before is in {folder.path}")
        if not folder.about.exists():
            error.add_note(f"'{folder.path}' was removed during the run; start a new one")
        elif not refused:
            error.add_note(f"to continue: penstock run resume={folder.path}")
        elif is_new and not begun:
            shutil.rmtree(folder.path, ignore_errors=True)  # what is in the way has been said
            if not had_runs:
                with suppress(OSError):  # another run is there by now
                    folder.path.parent.rmdir()
        raise error


@contextmanager
def _plain_warnings() -> Generator[None]:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category.__module__.startswith("penstock.") or issubclass(category, UserWarning):
            say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# --- dry run


def dry_run(composed: dict[str, Any], *, rows: bool = False) -> None:
    """Check all that a launch checks; with `rows`, print those of the first step instead of it."""
    refuse_resume(composed, "run --dry-run")
    cluster, section = None, composed.pop("cluster", None)
    if section is not None:
        cluster = cluster_spec(validated(ClusterConfig, named_devices(section), "cluster"))
    config = run_config(composed)
    # Refuses what a tracker lacks. One of the user's own may open files as soon as it is made.
    if config.tracker.all.keys() <= TRACKERS.keys():
        Trackers(config.tracker, tables=config.samples.track_every is not None)
    run = resolve(config, None if cluster is None else cluster.device_type)
    if cluster is not None or config.placement != AUTO:
        run = replace(run, cluster=cluster)
    else:
        run = with_cluster(run)
    run = prepare(run, dry=True)
    if rows:
        print("\n".join([*first_notes(run), *shown_rows(run)]))
        return
    plan = run.placed
    if cluster is None and isinstance(plan.cluster, ClusterSpec):
        cluster = plan.cluster
    nodes = {} if cluster is None else check_fits(plan, run.main.placement, cluster)
    lines = [f"{run.main.graph.name} can start; this was a dry run, and nothing was started"]
    lines += [f"cluster  {cluster_text(cluster)}"] if cluster is not None else []
    lines += [*first_notes(run, tries=True), *statistics(run)]
    in_processes = executor_kind(run.executor.kind).has_processes
    for stage in run.stages:
        lines += streaming_lines(stage, run.config.schedule, in_processes=in_processes)
    print("\n".join([*lines, *process_lines(run, nodes)]))
