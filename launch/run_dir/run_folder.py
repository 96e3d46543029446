"""`runs/<id>/`: everything one run leaves behind, in plain files.

    run.json         name, seed, start, code version, fingerprint of the data, hashes of the user's
                     own files and of the models it began with, every package's version and the
                     machine, the configuration and what was changed of it when, why it is not
                     reproducible if it is not; its presence makes the folder a run
    config.yaml      the composed configuration, as it is run
    plan.json        where the main stage's nodes run; a resumed run goes on there
    graph.svg        the graph of the main stage's step
    metrics.jsonl    one line per step, beside events.jsonl, ledger.jsonl and trace.json (step_logs)
    checkpoints/     the newest usable ones (checkpoint)
    evaluations/     one file for each evaluation (evaluations)
    stages/          of each stage before the main one, a folder like this
    groups.json      the groups whose number of ranks can change
    scale.json       the ranks that `penstock scale` asked for; a resumed run begins with its plan's
    .lock            held by the run's process
    summary.json     written at the end; its presence means that the run finished

Trackers write theirs beside these (`trackers/`). No service is needed to list or compare runs:
`list_runs` reads these files.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from ...dataflow.errors import ConfigError, WorkerError
from ...dataflow.files import open_regular
from .files import (
    differences,
    json_field,
    optional_field,
    parse_object,
    parsed,
    plain,
    read_object,
    required_object,
    typed,
    write_json,
    write_text,
)
from .provenance import CodeVersion, Origins, code_version
from .step_logs import METRICS


class _Part:
    """A file or folder of a run by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, or of one of its stages, and where its parts are."""

    path: Path
    about = _Part("run.json")
    config = _Part("config.yaml")
    plan = _Part("plan.json")
    graph = _Part("graph.svg")
    metrics = _Part(METRICS)
    trace = _Part("trace.json")
    checkpoints = _Part("checkpoints")
    lock = _Part(".lock")
    summary = _Part("summary.json")

    @property
    def id(self) -> str:
        return self.path.name

    def stage(self, name: str) -> RunFolder:
        return RunFolder(self.path / "stages" / name)

    @property
    def stage_names(self) -> list[str]:
        """The stages before the main one, in the order of their folders' names."""
        stages = self.path / "stages"
        return sorted(path.name for path in stages.iterdir()) if stages.is_dir() else []

    def write_summary(self, values: Mapping[str, Any]) -> None:
        write_json(self.summary, plain(values))

    def set_summary_aside(self) -> None:
        num_steps = required_object(self.summary).get("num_steps", "unknown")
        self.summary.rename(self.path / f"summary-{num_steps!s:.20}-steps.json")

    @contextmanager
    def watched(self) -> Generator[Callable[[], None]]:
        """Give a check that this folder has been neither removed nor renamed.

        Open files can still be written to after they were removed, so no write would fail.
        """
        held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        is_run = self.about.exists()  # the folder of a stage is not a run's

        def check() -> None:
            try:
                same = os.path.samestat(os.fstat(held), os.stat(self.path))
            except FileNotFoundError:
                same = False
            # A checkpoint that is just being written keeps `rm -r` from removing the folder itself.
            same = same and (self.about.exists() or not is_run)
            if not same:
                raise WorkerError(
                    f"'{self.path}' is no longer there: the run's folder was removed or renamed "
                    "while the run wrote to it\n    nothing more is written"
                )

        try:
            yield check
        finally:
            os.close(held)  # kept open until here, so that no new folder got its inode

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the run for this process; the lock goes with the process, however it ends.

        It is a POSIX record lock: a child that outlives its parent does not keep it. The kernel
        knows who holds it, so nothing is written to the file.
        """
        descriptor = open_regular(self.lock, os.O_RDWR | os.O_CREAT, links=False)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = lock_holder(descriptor)
                raise ConfigError(
                    f"run '{self.id}' is being run by process {holder or '(unknown)'}; "
                    "wait until it ends, stop it, or start a run of its own"
                ) from None
            yield
        finally:
            os.close(descriptor)


# struct flock: Linux has type, whence, start, length, process; macOS begins with start.
_FLOCK = ("qqihh", 3, 2) if sys.platform == "darwin" else ("hhqqi4x", 0, 4)


def lock_holder(descriptor: int) -> int | None:
    """Return the process that holds a file's lock; None if no other process does.

    It does not take the lock: holding it for a moment could refuse a run that just starts.
    """
    layout, kind, process = _FLOCK
    fields = [0, 0, 0, 0, 0]
    fields[kind] = fcntl.F_WRLCK
    answer = struct.unpack(
        layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, *fields))
    )
    return None if answer[kind] == fcntl.F_UNLCK else answer[process]


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run's run.json and summary.json.

    Older versions recorded less: what they did not is None or empty.
    """

    folder: RunFolder
    name: str  # such as the algorithm's
    seed: int
    created: datetime  # when it was started, in UTC
    code: CodeVersion
    data: str | None = None  # fingerprint of the problems it was started on
    summary: Mapping[str, Any] | None = field(default=None, hash=False)  # None until it finishes
    config: Mapping[str, Any] | None = field(default=None, hash=False)  # NaN and inf are None
    # Changes of the configuration when the run was resumed, oldest first: `step`, `at`, and `keys`,
    # of each its value before and since.
    changes: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    fault: str | None = None  # why its files cannot be read in full
    origins: Origins = field(default_factory=Origins, hash=False)
    not_reproducible: str = ""  # why what came out does not follow from its seed; "" if it does


def create_run(
    runs: Path,
    *,
    name: str,
    seed: int,
    config: str,
    data: str,
    origins: Origins | None = None,
    plan: str | None = None,
    graph: str | None = None,
    code: CodeVersion | None = None,
    not_reproducible: str = "",
    now: datetime | None = None,
) -> RunFolder:
    """Make the folder of a new run; no two processes ever get the same one.

    `name`, the algorithm's, has `-` for anything but letters, digits, `.`, `_` and `-`. `config` is
    YAML, `plan` JSON and `graph` SVG; `data` is a fingerprint of the problems, which a resumed run
    must find again. The folder is called `20261121-031454-grpo-seed0`, in UTC, so that names sort
    by time.
    """
    created = (now or datetime.now(UTC)).astimezone(UTC)
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    wanted = f"{created:%Y%m%d-%H%M%S}-{short}-seed{seed}"
    runs.mkdir(parents=True, exist_ok=True)
    folder, number = RunFolder(runs / wanted), 1
    while True:
        try:
            folder.path.mkdir()
            break
        except FileExistsError:
            number += 1
            folder = RunFolder(runs / f"{wanted}-{number}")
    about = {
        "name": name,
        "seed": seed,
        "created": created.isoformat(timespec="seconds"),
        "code": asdict(code or code_version()),
        "data": data,
        **asdict(origins or Origins()),
        "config": plain(yaml.safe_load(config)),
        "changes": [],
        "not_reproducible": not_reproducible or None,
    }
    texts = {folder.config: config, folder.plan: plan, folder.graph: graph}
    try:
        for path, text in texts.items():
            if text is not None:
                write_text(path, text)
        write_json(folder.about, about)
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)  # without run.json it is no run
        raise
    return folder


def change_config(
    folder: RunFolder,
    config: str,
    *,
    step: int,
    plan: str | None = None,
    not_reproducible: str = "",
    now: datetime | None = None,
) -> None:
    """Write another configuration, and note what changed, when, and after how many steps.

    A process that stops halfway leaves a configuration that looks edited in the keys it was to
    change, until the run is resumed with them again.
    """
    about = required_object(folder.about)
    recorded = plain(yaml.safe_load(config))
    before = about.get("config") or plain(parsed(folder.config, yaml.safe_load))
    keys = differences(before, recorded)
    at = (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    change = {"step": step, "at": at, "keys": {name: list(two) for name, two in keys.items()}}
    about["changes"] = [*about.get("changes", []), *([change] if keys else [])]
    about["config"] = recorded
    about["not_reproducible"] = about.get("not_reproducible") or not_reproducible or None
    write_text(folder.config, config)
    if plan is not None:
        write_text(folder.plan, plan)
    write_json(folder.about, about)


def open_run(path: Path) -> RunFolder:
    """Return the folder of a run, which must exist."""
    folder = RunFolder(path)
    if not folder.about.is_file():
        near = "runs" / path
        typo = f"; did you mean '{near}'?" if (near / "run.json").is_file() else ""
        raise ConfigError(
            f"'{path}' is not the folder of a run: it has no run.json{typo}\n"
            "    give a folder that `penstock run` made, such as runs/20261121-031454-grpo-seed0"
        )
    return folder


def list_runs(runs: Path) -> list[RunRecord]:
    """Return every run of a folder, oldest first; a damaged one has a fault."""
    if not runs.is_dir():
        return []
    folders = [RunFolder(path) for path in runs.iterdir() if (path / "run.json").is_file()]
    records = [record_of(folder) for folder in folders]
    return sorted(records, key=lambda record: (record.created, record.folder.id))


def record_of(folder: RunFolder) -> RunRecord:
    unknown = RunRecord(
        folder, folder.id, 0, datetime.fromtimestamp(0, UTC), CodeVersion("unknown")
    )
    record = unknown
    try:
        about = parsed(folder.about, lambda content: _record(folder, parse_object(content)))
        if about is None:
            return replace(unknown, fault="run.json is missing")
        record = about
        return replace(record, summary=read_object(folder.summary))
    except ConfigError as error:
        return replace(record, fault=str(error).split("\n")[0])


def _record(folder: RunFolder, about: Mapping[str, Any]) -> RunRecord:
    created = datetime.fromisoformat(json_field(about, "created", str))
    if created.tzinfo is None:
        raise ValueError(f"'created' has no time zone: {about['created']:.40}")
    code = json_field(about, "code", dict)
    changes: list[dict[str, Any]] = []
    for entry in optional_field(about, "changes", list) or []:
        changes.append(typed(entry, dict[str, Any], "a change"))
        for name, kind in (("step", int), ("at", str), ("keys", dict)):
            json_field(changes[-1], name, kind)
    sections = {
        name: optional_field(about, name, dict) or {}
        for name in ("files", "models", "versions", "hardware")
    }
    return RunRecord(
        folder,
        json_field(about, "name", str),
        json_field(about, "seed", int),
        created,
        CodeVersion(
            json_field(code, "package", str),
            optional_field(code, "commit", str),
            bool(code.get("dirty")),
        ),
        optional_field(about, "data", str),
        config=optional_field(about, "config", dict),
        changes=tuple(changes),
        origins=Origins(**sections),
        not_reproducible=optional_field(about, "not_reproducible", str) or "",
    )


State = Literal["running", "finished", "stopped", "not running", "damaged", "gone"]

# The evidence for each.
WHY: Mapping[State, str] = {
    "running": "a process holds the run's lock",
    "finished": "it has a summary.json",
    "stopped": "its summary.json says that it ended before its last step",
    "not running": (
        "no process holds the run's lock, and there is no summary.json: it was interrupted or "
        "killed; penstock run resume=FOLDER goes on with it"
    ),
    "damaged": "its run.json or summary.json cannot be read",
    "gone": "its folder is no longer there",
}


def state_of(record: RunRecord) -> State:
    if not record.folder.about.is_file():
        return "gone"
    try:
        descriptor = open_regular(record.folder.lock, links=False)
    except OSError:
        pass  # it was not run here, or the file is none of ours
    else:
        try:
            holder = lock_holder(descriptor)
        finally:
            os.close(descriptor)
        if holder is not None:
            return "running"
    if record.fault:
        return "damaged"
    if record.summary is None:
        return "not running"
    return "stopped" if record.summary.get("stopped") else "finished"


_GROUPS, _WISH = "groups.json", "scale.json"


@dataclass(frozen=True)
class ElasticGroup:
    """A group whose number of ranks can change, unless there is a reason why not."""

    most: int  # of its ranks
    why_not: str = ""


def write_groups(folder: Path, groups: Mapping[str, ElasticGroup]) -> None:
    write_json(folder / _GROUPS, {name: asdict(group) for name, group in groups.items()})


def read_groups(folder: Path) -> dict[str, ElasticGroup]:
    def parse(content: bytes) -> dict[str, ElasticGroup]:
        return {
            name: ElasticGroup(json_field(group, "most", int), json_field(group, "why_not", str))
            for name, group in parse_object(content).items()
        }

    groups = parsed(folder / _GROUPS, parse)
    if groups is None:
        raise ConfigError(
            f"run '{folder.name}' has no {_GROUPS}: it has not come to its main stage yet, or an "
            "older version made it\n    try again once it takes steps"
        )
    return groups


def write_wish(folder: Path, wish: Mapping[str, int]) -> None:
    """Ask for numbers of ranks by group, beside those that are asked for already."""
    write_json(folder / _WISH, {**read_wish(folder), **wish})


def read_wish(folder: Path) -> dict[str, int]:
    def parse(content: bytes) -> dict[str, int]:
        wish = parse_object(content)
        for name in wish:
            if json_field(wish, name, int) < 1:
                raise ValueError(f"'{name}' is {wish[name]}, and a group has at least one rank")
        return wish

    try:
        return parsed(folder / _WISH, parse) or {}
    except ConfigError as error:
        raise ConfigError(f"{error}; or delete it, and call `penstock scale` again") from error


def wish_version(folder: Path) -> int:
    """Another number each time that something has been wished; 0 if nothing has."""
    try:
        return (folder / _WISH).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
