"""`penstock run`: from nothing to a trained policy, or on from where a run was stopped."""

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
from ..run_dir.stop import Terminated, say
from ..run_dir.supervised import tell
from .hydra_app import given_overrides, hydra_app
from .supervise import SUPERVISE, supervise_command

if TYPE_CHECKING:
    from ..inputs.run import Run
    from ..run_dir.environment import Environment
    from ..run_dir.origins import Origins
    from ..run_dir.process_usage import ProcessUsage
    from ..run_dir.progress import RunProgress
    from ..run_dir.resume import Resumed
    from ..run_dir.run_folder import CodeVersion, RunFolder, RunRecord
    from ..run_dir.trackers.registry import Trackers
    from ..run_dir.trackers.tracker import Tracker

DRY_RUN = "--dry-run"
"""As an option of `penstock run`: check everything, and start nothing."""


def run_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock run`."""
    if DRY_RUN in arguments:
        from .dry_run import dry_run_command

        return dry_run_command([w for w in arguments if w not in (DRY_RUN, SUPERVISE)])
    if SUPERVISE in arguments:
        return supervise_command([word for word in arguments if word != SUPERVISE])
    if any(word.startswith("sweep.") for word in arguments):
        from .sweep import sweep_command

        return sweep_command(arguments, lambda composed: run_composed(composed, ()))
    hydra_app("run", arguments, _run)
    return 0


def _run(composed: dict[str, Any]) -> None:
    run_composed(composed, given_overrides())


def run_composed(
    composed: dict[str, Any], given: Sequence[str], shown: Tracker | None = None
) -> RunFolder:
    """Carry out what was composed: a new run, or one that goes on.

    Args:
        composed: As Hydra composed it.
        given: The words it was composed of, `key=value`; a run that goes on takes no others.
        shown: Who shows the run's metrics as they come, beside its trackers.

    Returns:
        The run's folder.

    Raises:
        ConfigError: If it cannot be run.
    """
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
    """Run what another run was, where its nodes ran.

    Args:
        before: The run.
        config: Its configuration.

    Returns:
        The new run's folder.

    Raises:
        ConfigError: If the configuration cannot be run here, or makes other problems.
    """
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
    from ..run_dir.environment import environment_now
    from ..run_dir.origins import origins_of
    from ..run_dir.process_usage import ProcessUsage
    from ..run_dir.progress import RunProgress
    from ..run_dir.run_folder import code_version
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
    environment: Environment,
) -> RunFolder:
    """The folder of a new run."""
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
    """Refuse to go on with a run, or to repeat it, on other problems."""
    if record.data not in (None, found):
        raise ConfigError(
            f"run '{record.folder.id}' was started on other problems: the data's fingerprint was "
            f"{record.data} and is {found} now\n"
            "    bring the data back as it was, or start a new run"
        )


def _tracked(
    run: Run, folder: RunFolder, config: Mapping[str, Any], resumed: bool, trackers: Trackers
) -> dict[str, RunFolder]:
    """Begin to track the run; the folder of each of its stages."""
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
    """Record that the run goes on with other settings, once it is clear that it can."""
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
    environment: Environment,
) -> None:
    """Refuse to go on with other problems or models than the run began with; mention other code."""
    from ..run_dir.environment import changed_versions, versions_text
    from ..run_dir.origins import changed_files, check_models
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
    """Run what is left of a run's stages, each in its folder, and write the run's summary."""
    from ..run_dir.events import count_kinds
    from ..run_dir.run_folder import record_of
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
    """Say how a run that has ended early goes on; a new one that is refused leaves nothing.

    Some of what cannot be is found only when workers are built. What is refused cannot go on as it
    is, so nothing is said of that.
    """
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
    """Show warnings as one message each, without the line of our code that raised them."""
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
