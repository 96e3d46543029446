"""`runs/<id>/`: everything one run leaves behind, in plain files.

    run.json         name, seed, start, code version, fingerprint of the data; its presence makes
                     the folder a run
    config.yaml      the composed configuration, as it was run
    plan.json        where the main stage's nodes run
    metrics.jsonl    one line per step               (metrics.py)
    trace.json       the timeline of every task      (trace.py)
    checkpoints/     the newest usable ones          (checkpoint.py)
    stages/          of each stage before the main one, a folder like this
    summary.json     written at the end; its presence means that the run finished

Trackers write theirs beside these (`trackers/`). No service is needed to list or compare runs:
`list_runs` reads these files.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ... import __version__
from ...dataflow.errors import ConfigError
from .atomic import write_json, write_text
from .metrics import finite_or_none

__all__ = [
    "CodeVersion",
    "RunFolder",
    "RunRecord",
    "code_version",
    "create_run",
    "list_runs",
    "open_run",
    "record_of",
]

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
        """Name, seed, start, code version and fingerprint of the data, as JSON."""
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
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """The timeline, for Perfetto or chrome://tracing."""
        return self.path / "trace.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

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
        write_json(self.summary, {name: _plain(value) for name, value in values.items()})

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the run for this process; the lock goes with the process, however it ends.

        It is a POSIX record lock: a child that outlives its parent does not keep it.

        Raises:
            ConfigError: If another process is running it.
        """
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                raise ConfigError(
                    f"run '{self.id}' is being run by process {holder or '(unknown)'}; "
                    "wait until it ends, stop it, or start a run of its own"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


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
        fault: Why its files cannot be read in full; None if they can.
    """

    folder: RunFolder
    name: str
    seed: int
    created: datetime
    code: CodeVersion
    data: str | None = None
    summary: Mapping[str, Any] | None = field(default=None, hash=False)
    fault: str | None = None


def create_run(
    runs: Path,
    *,
    name: str,
    seed: int,
    config: str,
    data: str,
    plan: str | None = None,
    code: CodeVersion | None = None,
    now: datetime | None = None,
) -> RunFolder:
    """Make the folder of a new run; no two processes ever get the same one.

    Args:
        runs: The folder of all runs; made if it is not there.
        name: Short name; anything but letters, digits, `.`, `_` and `-` becomes `-`.
        seed: The run's seed.
        config: The composed configuration as YAML.
        data: Fingerprint of the problems; a resumed run must have the same.
        plan: Where the main stage's nodes run, as JSON; if that is to be kept.
        code: Which code runs; read now if it is not given.
        now: When the run starts; for tests.

    Returns:
        The folder, named `20261121-031454-grpo-seed0`, in UTC, so that names sort by time.
    """
    created = (now or datetime.now(UTC)).astimezone(UTC)
    short = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    folder = _new_folder(runs, f"{created:%Y%m%d-%H%M%S}-{short}-seed{seed}")
    write_text(folder.config, config)
    if plan is not None:
        write_text(folder.plan, plan)
    about = {
        "name": name,
        "seed": seed,
        "created": created.isoformat(timespec="seconds"),
        "code": asdict(code or code_version()),
        "data": data,
    }
    write_json(folder.about, about)
    return folder


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
        raise ConfigError(
            f"'{path}' is not the folder of a run: it has no run.json\n"
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
    try:
        about: dict[str, Any] = json.loads(folder.about.read_bytes())
        record = RunRecord(
            folder,
            str(about["name"]),
            int(about["seed"]),
            datetime.fromisoformat(about["created"]),
            CodeVersion(**about["code"]),
            about.get("data"),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        fault = f"run.json cannot be read ({type(error).__name__}: {error})"
        unknown = datetime.fromtimestamp(0, UTC)
        return RunRecord(folder, folder.id, 0, unknown, CodeVersion("unknown"), fault=fault)
    try:
        text = folder.summary.read_bytes() if folder.summary.exists() else b"null"
        summary: Any = json.loads(text)
    except (OSError, ValueError) as error:
        fault = f"summary.json cannot be read ({type(error).__name__}: {error})"
        return replace(record, fault=fault)
    return replace(record, summary=summary)


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


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast(list[Any], value)]
    return value
