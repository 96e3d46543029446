"""`runs/<id>/`: everything one run leaves behind, in plain files.

    run.json         name, seed, start, code version, fingerprint of the data, hashes of the user's
                     own files and of the models it began with, every package's version and the
                     machine, the configuration and what was changed of it when, why it is not
                     reproducible if it is not; its presence makes the folder a run
    config.yaml      the composed configuration, as it is run
    plan.json        where the main stage's nodes run
    graph.svg        the graph of the main stage's step
    metrics.jsonl    one line per step               (trackers/jsonl.py)
    events.jsonl     what it warned of, if it did    (events.py)
    ledger.jsonl     the rows that each step read, made and trained on (ledger.py)
    trace.json       the timeline of every task      (trace.py)
    checkpoints/     the newest usable ones          (checkpoint.py)
    stages/          of each stage before the main one, a folder like this
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
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import yaml

from ... import __version__
from ...dataflow.errors import ConfigError, WorkerError
from ...dataflow.regular_files import open_regular
from .atomic import write_json, write_text
from .environment import Environment
from .origins import Origins
from .run_files import field as json_field
from .run_files import optional_field, parse_object, parsed, read_object, required_object, typed
from .trackers.jsonl import METRICS, finite_or_none

_ROOT = Path(__file__).resolve().parents[2]
_GIT_DEADLINE_S = 20.0


@dataclass(frozen=True)
class CodeVersion:
    """Which code ran.

    Attributes:
        package: The package's version.
        commit: The git commit of the source tree, or None outside one.
        dirty: Whether that tree differed from its commit.
    """

    package: str
    commit: str | None = None
    dirty: bool = False

    def __str__(self) -> str:
        if self.commit is None:
            return self.package
        return f"{self.package} ({self.commit[:12]}{', changed' if self.dirty else ''})"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, and where its parts are."""

    path: Path

    @property
    def id(self) -> str:
        """The run's name among all runs."""
        return self.path.name

    @property
    def about(self) -> Path:
        """Name, seed, start, code version, data and configuration, as JSON."""
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        """The composed configuration."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """Where the main stage's nodes run, as JSON; a resumed run goes on there."""
        return self.path / "plan.json"

    @property
    def graph(self) -> Path:
        """The graph of the main stage's step, as a picture."""
        return self.path / "graph.svg"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / METRICS

    @property
    def trace(self) -> Path:
        """The timeline, for Perfetto or chrome://tracing."""
        return self.path / "trace.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        """The file whose lock the run's process holds."""
        return self.path / ".lock"

    def stage(self, name: str) -> RunFolder:
        """The folder of a stage before the main one."""
        return RunFolder(self.path / "stages" / name)

    @property
    def summary(self) -> Path:
        """What came out, as JSON."""
        return self.path / "summary.json"

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json in one step; NaN and infinities become null.

        Raises:
            TypeError: If a value is none of what JSON can say.
        """
        write_json(self.summary, {name: plain(value) for name, value in values.items()})

    def set_summary_aside(self) -> None:
        """The run goes on: what came out so far becomes `summary-200-steps.json`."""
        num_steps = required_object(self.summary).get("num_steps", "unknown")
        self.summary.rename(self.path / f"summary-{num_steps!s:.20}-steps.json")

    @contextmanager
    def watched(self) -> Generator[Callable[[], None]]:
        """Give a check that this folder has been neither removed nor renamed.

        Open files can still be written to after they were removed, so no write would fail.

        Raises:
            WorkerError: By the check.
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

        Raises:
            ConfigError: If another process is running it, or `.lock` is a link or no file.
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
    """What a listing says of a run.

    Attributes:
        folder: Where it is.
        name: Its short name, such as the algorithm's.
        seed: Its seed.
        created: When it was started, in UTC.
        code: Which code ran.
        data: Fingerprint of the problems it was started on; None in a run older than these.
        summary: What came out, or None if it has not finished.
        config: Its configuration as JSON has it, in which no number is NaN or infinite; None of a
            run of a version that did not record it.
        changes: What was changed of it when the run was resumed, oldest first: `step`, `at`, and
            `keys`, of each its value before and since.
        fault: Why its files cannot be read in full; None if they can.
        origins: What else it began with; empty in a run older than these.
        not_reproducible: Why what came out does not follow from its seed, in words; "" if it does.
        environment: What it was run with; empty in a run older than these.
    """

    folder: RunFolder
    name: str
    seed: int
    created: datetime
    code: CodeVersion
    data: str | None = None
    summary: Mapping[str, Any] | None = field(default=None, hash=False)
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    changes: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    fault: str | None = None
    origins: Origins = field(default_factory=Origins, hash=False)
    not_reproducible: str = ""
    environment: Environment = field(default_factory=Environment, hash=False)


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
    environment: Environment | None = None,
    now: datetime | None = None,
) -> RunFolder:
    """Make the folder of a new run; no two processes ever get the same one.

    Args:
        runs: The folder of all runs; made if it is not there.
        name: Short name; anything but letters, digits, `.`, `_` and `-` becomes `-`.
        seed: The run's seed.
        config: The composed configuration as YAML.
        data: Fingerprint of the problems; a resumed run must have the same.
        origins: What else it begins with; if that is to be kept.
        plan: Where the main stage's nodes run, as JSON; if that is to be kept.
        graph: The graph of the main stage's step as SVG; if that is to be kept.
        code: Which code runs; read now if it is not given.
        not_reproducible: Why what comes out will not follow from the seed; "" if it will.
        environment: What it is run with; if that is to be kept.
        now: When the run starts; for tests.

    Returns:
        The folder, named `20261121-031454-grpo-seed0`, in UTC, so that names sort by time.

    Raises:
        OSError: If it cannot be written; nothing of it is left.
    """
    created = (now or datetime.now(UTC)).astimezone(UTC)
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    folder = _new_folder(runs, f"{created:%Y%m%d-%H%M%S}-{short}-seed{seed}")
    about = {
        "name": name,
        "seed": seed,
        "created": created.isoformat(timespec="seconds"),
        "code": asdict(code or code_version()),
        "data": data,
        **asdict(origins or Origins()),
        **asdict(environment or Environment()),
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
    """Go on with another configuration, and note what changed, when, and after how many steps.

    A process that stops halfway leaves a configuration that looks edited in the keys it was to
    change, until the run is resumed with them again.

    Args:
        folder: Of a run that nobody else goes on with.
        config: The configuration as YAML.
        step: Steps taken so far.
        plan: Where the main stage's nodes run from now on, as JSON; None if where they did.
        not_reproducible: Why what comes out will not follow from the seed; it stays so.
        now: When that is; for tests.
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


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], at: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configurations differ, with both values; None stands for no value.

    Args:
        before: One.
        after: The other.
        at: What stands before each key.

    Returns:
        `section.key` -> the value in each.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            sections = cast(Mapping[str, Any], one), cast(Mapping[str, Any], other)
            found |= differences(*sections, f"{at}{key}.")
        elif one != other:
            found[f"{at}{key}"] = (one, other)
    return found


def flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested sections as one mapping, `section.key` -> value.

    Args:
        values: Sections and values; what has no name, as the suite of the run's own task, adds
            nothing to a key.
        at: What stands before each key.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(cast(Mapping[str, Any], value), f"{at}{key}." if key else at)
        else:
            found[f"{at}{key}"] = value
    return found


def _new_folder(runs: Path, wanted: str) -> RunFolder:
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = runs / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return RunFolder(path)


def open_run(path: Path) -> RunFolder:
    """The folder of a run that exists, to read or to resume it.

    Raises:
        ConfigError: If there is no run.
    """
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
    """Every run in a folder of runs, oldest first; a damaged one is listed with its fault."""
    if not runs.is_dir():
        return []
    folders = [RunFolder(path) for path in runs.iterdir() if (path / "run.json").is_file()]
    records = [record_of(folder) for folder in folders]
    return sorted(records, key=lambda record: (record.created, record.folder.id))


def record_of(folder: RunFolder) -> RunRecord:
    """What a run's own files say of it; what cannot be read is its fault."""
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
    """Parse run.json; raises `ValueError`, or what follows from values of an unexpected kind."""
    created = datetime.fromisoformat(json_field(about, "created", str))
    if created.tzinfo is None:
        raise ValueError(f"'created' has no time zone: {about['created']:.40}")
    code, changes = json_field(about, "code", dict), optional_field(about, "changes", list) or []
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
        changes=tuple(_change(one) for one in changes),
        origins=Origins(sections["files"], sections["models"]),
        not_reproducible=optional_field(about, "not_reproducible", str) or "",
        environment=Environment(sections["versions"], sections["hardware"]),
    )


def _change(entry: Any) -> dict[str, Any]:
    """Parse a change of configuration; raises `ValueError` unless `change_config` can write it."""
    change = typed(entry, dict[str, Any], "a change")
    for name, kind in (("step", int), ("at", str), ("keys", dict)):
        json_field(change, name, kind)
    return change


def code_version(root: Path = _ROOT) -> CodeVersion:
    """The version of the code at `root`: this package's own source tree by default.

    A package installed below somebody else's repository does not take that repository's commit.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return CodeVersion(__version__)
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    status = _git(root, "status", "--porcelain")
    return CodeVersion(__version__, commit, status is None or status != "")


def _git(root: Path, *arguments: str) -> str | None:
    """What git answers, or None where it is not installed, has nothing to say, or does not end."""
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def plain(value: Any) -> Any:
    """A value as JSON can say it: keys are texts, and NaN and the infinities are None."""
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
    return value
