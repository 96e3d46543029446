"""`penstock run`: from nothing to a trained policy, or on from where a run was stopped.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...dataflow.errors import NOT_STARTED, ConfigError, PenstockError, WorkerError, no_exit
from ..inputs.failures import in_our_words, left_debugger
from ..run_dir.stop import Terminated, say, tell
from .hydra_app import given_overrides, hydra_app, refuse_resume
from .supervise import SUPERVISE, supervise_command

if TYPE_CHECKING:
    from ...planner.inputs.cluster import ClusterSpec
    from ..inputs.run import Run
    from ..run_dir.process_usage import ProcessUsage
    from ..run_dir.progress import RunProgress
    from ..run_dir.provenance import CodeVersion, Origins, RunEnvironment
    from ..run_dir.resume import Resumed
    from ..run_dir.run_folder import RunFolder, RunRecord
    from ..run_dir.trackers.registry import Trackers
    from ..run_dir.trackers.tracker import Tracker

DRY_RUN = "--dry-run"  # as an option of `penstock run`: check everything, and start nothing


def run_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock run`."""
    if DRY_RUN in arguments:
        words = [word for word in arguments if word not in (DRY_RUN, SUPERVISE)]
        hydra_app("dry_run", words, _dry_run)
        return 0
    if SUPERVISE in arguments:
        return supervise_command([word for word in arguments if word != SUPERVISE])
    if any(word.startswith("sweep.") for word in arguments):
        from .sweep import sweep_command

        return sweep_command(arguments, lambda composed: run_composed(composed, ()))

    def run(composed: dict[str, Any]) -> None:
        run_composed(composed, given_overrides())

    hydra_app("run", arguments, run)
    return 0


def run_composed(
    composed: dict[str, Any], given: Sequence[str], shown: Tracker | None = None
) -> RunFolder:
    """Carry out what was composed: a new run, or one that goes on."""
    path, resumed = composed.pop("resume"), None
    if path is not None:
        if not isinstance(path, str):
            raise ConfigError(f"'resume': expected the folder of a run, got {path!r}")
        from ..run_dir.resume import resumed_config

        resumed = resumed_config(Path(path), composed, given)
        composed = resumed.config
    # A run that goes on is held before its data are read, which may take minutes.
    with _plain_warnings(), nullcontext() if resumed is None else resumed.folder.locked():
        return _carry_out(composed, resumed, shown=shown)


def carry_out_again(before: RunRecord, config: dict[str, Any]) -> RunFolder:
    """Run what another run was, where its nodes ran."""
    with _plain_warnings(), no_exit(ConfigError):
        return _carry_out(config, None, before)


def _carry_out(
    composed: dict[str, Any],
    resumed: Resumed | None,
    again: RunRecord | None = None,
    shown: Tracker | None = None,
) -> RunFolder:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from ...planner.plan.plan import Plan
    from ...workers.executors.process_setup import threads_within
    from ..inputs.compose import dumped, resolve, run_config
    from ..placement.machine import machine_name
    from ..run_dir.process_usage import ProcessUsage
    from ..run_dir.progress import RunProgress
    from ..run_dir.provenance import code_version, environment_now, origins_of
    from ..run_dir.trackers.registry import Trackers
    from ..stages.observers import stage_plans
    from ..stages.prepare import about_model, first_notes, model_folders, prepare

    code = code_version()
    file = None if resumed is None or resumed.moved else resumed.folder.plan
    file = file if again is None else again.folder.plan
    placed = Plan.read(file) if file is not None and file.exists() else None
    config = run_config(composed)
    tell(recovery=config.recovery.model_dump())
    tables = config.samples.track_every is not None
    trackers = Trackers(config.tracker, tables=tables)
    if shown is not None:
        trackers.add("the notebook's curve", shown)
    run = prepare(resolve(config), placed)
    progress = RunProgress(stage_plans(run), config.progress)
    for line in first_notes(run):
        progress.note(line)
    if again is not None:
        _check_data(again, run.data.fingerprint)
    origins, environment = origins_of(model_folders(run)), environment_now(machine_name())
    plain = dumped(run)
    written = yaml.safe_dump(plain, sort_keys=False)
    plan = run.placed.model_dump_json(indent=2, exclude_defaults=True)
    runs = Path(config.runs)
    had_runs = runs.exists()
    if resumed is None:
        folder = _created(runs, run, written, plan, origins, code, environment)
    else:
        folder = resumed.folder
        _check_unchanged(folder, run.data.fingerprint, origins, code, environment)
    with (
        _ended_early(folder, resumed is None, had_runs, trackers),
        folder.locked() if resumed is None else nullcontext(),
        ProcessUsage() as usage,
        trackers,
        threads_within(run.executor.num_threads),
    ):
        if resumed is not None and resumed.noted:
            _note_changes(resumed, run, written, plan)
        homes = _tracked(run, folder, plain, resumed is not None, trackers)
        if about := about_model(run):
            progress.note(about)
        _stages(run, homes, code, usage, progress, resumed is not None, trackers)
    return folder


def _created(
    runs: Path,
    run: Run,
    config: str,
    plan: str,
    origins: Origins,
    code: CodeVersion,
    environment: RunEnvironment,
) -> RunFolder:
    from ...dataflow.render.svg import to_svg
    from ..run_dir.run_folder import create_run
    from ..stages.prepare import not_reproducible

    return create_run(
        runs,
        name=run.main.name,
        seed=run.config.seed,
        config=config,
        data=run.data.fingerprint,
        origins=origins,
        plan=plan,
        graph=to_svg(run.main.graph),
        code=code,
        not_reproducible=not_reproducible(run),
        environment=environment,
    )


def _check_data(record: RunRecord, found: str) -> None:
    if record.data not in (None, found):
        raise ConfigError(
            f"run '{record.folder.id}' was started on other problems: the data's fingerprint was "
            f"{record.data} and is {found} now\n"
            "    bring the data back as it was, or start a new run"
        )


def _tracked(
    run: Run, folder: RunFolder, config: Mapping[str, Any], resumed: bool, trackers: Trackers
) -> dict[str, RunFolder]:
    from ..run_dir.run_folder import record_of
    from ..run_dir.trackers.tracker import RunInfo

    tell(folder=str(folder.path))
    homes = {stage.name: folder.stage(stage.name) for stage in run.stages[:-1]}
    homes[run.main.name] = folder
    paths = {name: home.path for name, home in homes.items()}
    said = record_of(folder).not_reproducible
    trackers.start(RunInfo(folder.id, paths, config, resumed, said))
    return homes


def _note_changes(resumed: Resumed, run: Run, config: str, plan: str) -> None:
    from ..run_dir.run_folder import change_config
    from ..stages.prepare import not_reproducible
    from ..stages.run_stage import steps_taken

    step = steps_taken(run, resumed.folder)
    if resumed.extended:
        resumed.folder.set_summary_aside()
    change_config(
        resumed.folder,
        config,
        step=step,
        plan=plan if resumed.moved else None,
        not_reproducible=not_reproducible(run),
    )


def _check_unchanged(
    folder: RunFolder,
    data: str,
    origins: Origins,
    code: CodeVersion,
    environment: RunEnvironment,
) -> None:
    from ..run_dir.provenance import changed_files, changed_versions, check_models, versions_text
    from ..run_dir.run_folder import record_of

    record = record_of(folder)
    _check_data(record, data)
    check_models(folder.id, record.origins, origins)
    others = [f"with another {path}" for path in changed_files(record.origins, origins)]
    if record.code != code:
        others.append(f"by penstock {record.code} and goes on with {code}")
    versions = changed_versions(record.environment.versions, environment.versions)
    if versions:
        others.append(f"with other versions of packages ({versions_text(versions)})")
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
    from ..run_dir.run_folder import record_of
    from ..run_dir.step_logs import count_kinds
    from ..stages.prepare import statistics
    from ..stages.report import summary_of, write_report
    from ..stages.run_stage import MODELS, check_stage_models, run_stage
    from ..stages.stage_result import StageResult

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
        code=code,
        usage=usage,
        wall_time_s=wall_time_s,
        stage_times_s=progress.time.took_s,
        warned=count_kinds(folder.path),
        resumed=resumed,
        record=record_of(folder),
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
        begun = trackers.num_steps > 0
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
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    if category.__module__.startswith("penstock.") or issubclass(category, UserWarning):
        say(f"warning: {message}")


# --- dry run


def _dry_run(composed: dict[str, Any]) -> None:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from dataclasses import replace

    from ..inputs.compose import AUTO, resolve, run_config
    from ..placement.machine import with_cluster
    from ..run_dir.trackers.registry import TRACKERS, Trackers
    from ..stages.prepare import prepare

    refuse_resume(composed, "run --dry-run")
    cluster = _described(composed.pop("cluster", None))
    config = run_config(composed)
    # Refuses what a tracker lacks. One of the user's own may open files as soon as it is made.
    if config.tracker.all.keys() <= TRACKERS.keys():
        Trackers(config.tracker, tables=config.samples.track_every is not None)
    run = resolve(config, None if cluster is None else cluster.device_type)
    if cluster is not None or config.placement != AUTO:
        run = replace(run, cluster=cluster)
    else:
        run = with_cluster(run)
    print(_dry_run_text(prepare(run, dry=True), cluster))


def _described(section: Any) -> ClusterSpec | None:
    from ...configs.plan_schema import ClusterConfig
    from ...configs.validate import validated
    from ..placement.machine import cluster_spec, named_devices

    if section is None:
        return None
    return cluster_spec(validated(ClusterConfig, named_devices(section), "cluster"))


def _dry_run_text(run: Run, cluster: ClusterSpec | None) -> str:
    from ...planner.formatting import aligned, bytes_text
    from ...planner.inputs.cluster import ClusterSpec
    from ...planner.report.plan_texts import cluster_text
    from ..inputs.run import executor_kind
    from ..placement.place import check_fits, seats
    from ..stages.prepare import first_notes, statistics
    from ..stages.streaming import streaming_lines

    plan, placement = run.placed, run.main.placement
    if cluster is None and isinstance(plan.cluster, ClusterSpec):
        cluster = plan.cluster
    nodes = {} if cluster is None else check_fits(plan, placement, cluster)
    lines = [f"{run.main.graph.name} can start; this was a dry run, and nothing was started"]
    lines += [f"cluster  {cluster_text(cluster)}"] if cluster is not None else []
    lines += [*first_notes(run, tries=True), *statistics(run)]
    kind = executor_kind(run.executor.kind)
    for stage in run.stages:
        lines += streaming_lines(
            stage, stage.placement, run.config.schedule, in_processes=kind.has_processes
        )
    memory = plan.memory_bytes_per_device
    rows = [["group", "process", "rank", "node", "device", "memory", "roles"]]
    for seat in seats(run.main.graph, placement, nodes):
        needed = None if seat.device is None else memory.get(seat.device)
        rows.append(
            [
                seat.group,
                str(seat.process),
                str(seat.rank),
                seat.node.removeprefix("node ") or "any",
                "any" if seat.device is None else str(seat.device),
                "-" if needed is None else bytes_text(needed),
                ", ".join(seat.roles) or "-",
            ]
        )
    return "\n".join([*lines, *aligned(rows)])
