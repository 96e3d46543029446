"""A run as one file that can be sent, and curves that another program exported, as runs.

    penstock-run.json     the format, the run's name, and the size and SHA-256 of each file
    <run>/...             the run's folder
    own/...               files of the user's own that the run imported

Nothing in an archive is code that unpacking runs, and nothing is unpacked by the names that it has:
a member must be a regular file that the list names, in the order of the list, and of the listed
size and hash. It is unpacked beside its place and moved there when all of it was right.

Open RL Benchmark's command line and the web pages of W&B export CSV files with points of one run or
of several: a column names the run, one counts steps or moves in the environment, and each further
column of numbers is a metric. What is made has the curves of a run, and nothing else of it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import shutil
import tarfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO

import yaml

from ...dataflow.errors import ConfigError
from ...dataflow.files import created, opened, writing
from ..run_dir.files import file_sha256, json_field, parse_object
from ..run_dir.provenance import CodeVersion
from ..run_dir.run_folder import RunFolder, RunRecord, create_run
from ..run_dir.step_logs import MetricsLog

_MANIFEST = "penstock-run.json"
_FORMAT = 1
_OWN = "own-files"  # below an imported run's folder; nothing imports them by itself
# Only the machine it ran on goes on with these; models and results are all there.
_LEFT_OUT = ("checkpoints", ".lock")

_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_PIECE_BYTES = 1 << 20
_MOST_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class _Member:
    name: str
    size_bytes: int
    sha256: str


def export_run(record: RunRecord, path: Path, *, checkpoints: bool = False) -> int:
    """Write a run's archive, which is complete once it has its name, and return its size in bytes.

    Nothing may change the run meanwhile. With `checkpoints` in it, the run can be resumed.
    """
    if path.exists():
        raise ConfigError(f"'{path}' is there\n    give another name, or remove it")
    folder, draft = record.folder, path.with_name(f".{path.name}.new")
    left_out = _LEFT_OUT[checkpoints:]
    files: dict[str, Path] = {}
    for file in folder.path.rglob("*"):
        inside = file.relative_to(folder.path)
        if file.is_file() and not file.is_symlink() and not {*inside.parts} & {*left_out}:
            files[f"{folder.id}/{inside.as_posix()}"] = file
    # Files of the user's own, as they were when the run imported them.
    for name, recorded in record.origins.files.items():
        place = name.lstrip("/").replace("..", "__")
        for own in (folder.path / _OWN / place, Path(name)):
            if own.is_file() and file_sha256(own) == recorded:
                files[f"{folder.id}/{_OWN}/{place}"] = own
                break
    files = dict(sorted(files.items()))
    try:
        with (
            writing(path),
            folder.locked(),
            created(draft) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            members = [_Member(n, f.stat().st_size, file_sha256(f)) for n, f in files.items()]
            about = {"format": _FORMAT, "run": folder.id, "files": [asdict(m) for m in members]}
            listing = json.dumps(about, indent=1).encode()
            tar.addfile(_header(_MANIFEST, len(listing)), io.BytesIO(listing))
            for member in members:
                with opened(files[member.name]) as content:
                    tar.addfile(_header(member.name, member.size_bytes), content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path.stat().st_size


def _header(name: str, size_bytes: int) -> tarfile.TarInfo:
    # Without owner, time and rights: the same run has the same archive.
    header = tarfile.TarInfo(name)
    header.size, header.mode = size_bytes, 0o644
    return header


def import_run(path: Path, runs: Path) -> RunFolder:
    """Unpack an archive into a folder of runs, which is made if need be.

    Of one that is damaged, or no such archive, nothing is left.
    """
    with _opened(path) as tar:
        name, members = _manifest(tar, path)
        listed, held = sum(member.size_bytes for member in members), path.stat().st_size
        if listed > held:
            raise ConfigError(
                f"'{path}' lists {listed} bytes and holds {held}\n    get it again; penstock runs "
                "export makes no archive that unpacks to more than it holds"
            )
        target, draft = runs / name, runs / f".{name}.importing"
        if target.exists():
            raise ConfigError(f"'{target}' is there\n    remove it, or give runs=FOLDER")
        had_runs = runs.exists()
        shutil.rmtree(draft, ignore_errors=True)  # of an import that was killed
        try:
            draft.mkdir(parents=True)
            for member in members:
                _unpack(tar, member, draft, path)
            if _next(tar) is not None:
                raise ConfigError(f"'{path}' holds more than it lists\n    get it anew")
            (draft / name).rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            if not had_runs:
                with suppress(OSError):  # another run is there by now
                    runs.rmdir()
            raise
    shutil.rmtree(draft, ignore_errors=True)
    return RunFolder(target)


@contextmanager
def _opened(path: Path) -> Generator[tarfile.TarFile]:
    try:
        # "r:" alone: a compressed archive could be any times larger than its file.
        with opened(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            yield tar
    except (EOFError, tarfile.TarError) as error:
        raise ConfigError(
            f"'{path}' is no archive of a run, or is damaged ({type(error).__name__}: {error})\n"
            "    penstock runs export makes one"
        ) from error


def _manifest(tar: tarfile.TarFile, path: Path) -> tuple[str, list[_Member]]:
    header = _next(tar)
    if header is None or header.name != _MANIFEST:
        raise ConfigError(f"'{path}' is no archive of a run\n    penstock runs export makes one")
    try:
        if header.size > _MOST_MANIFEST_BYTES:
            raise ValueError(f"a list of {header.size} bytes")
        about = parse_object(_content(tar, header).read())
        if about["format"] != _FORMAT:
            raise ValueError(f"of format {about['format']!r:.20}, which this version does not read")
        name = json_field(about, "run", str)
        members: list[_Member] = []
        for entry in json_field(about, "files", list):
            member = _Member(
                json_field(entry, "name", str),
                json_field(entry, "size_bytes", int),
                json_field(entry, "sha256", str),
            )
            if member.size_bytes < 0:
                raise ValueError(f"{member.name!r:.100} has {member.size_bytes} bytes")
            member.name.encode()  # fails for half of a surrogate pair
            run, *inside = member.name.split("/")
            strange = "/" in name or name.startswith(".") or {"\\", "\0"} & {*member.name}
            if strange or run != name or not inside or {"", ".", ".."} & {run, *inside}:
                raise ValueError(f"{member.name!r:.100} is no name of a file of run {name!r:.60}")
            members.append(member)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"'{path}': its list of files cannot be read: {error}") from error
    if f"{name}/run.json" not in {member.name for member in members}:
        raise ConfigError(f"'{path}' holds no run.json\n    penstock runs export makes one")
    return name, members


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        header = tar.next()
    except (ValueError, LookupError, ArithmeticError, TypeError) as error:  # of damaged headers
        raise tarfile.ReadError(f"a header is damaged: {error!s:.100}") from error
    if header is not None and (header.type not in _PLAIN or header.issparse()):
        raise tarfile.ReadError(f"{header.name!r:.100} is no plain file")
    return header


def _content(tar: tarfile.TarFile, header: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(header)
    assert content is not None, f"{header.name} is a regular file"
    return content


def _unpack(tar: tarfile.TarFile, member: _Member, draft: Path, path: Path) -> None:
    header = _next(tar)
    damaged = ConfigError(f"'{path}' is damaged at {member.name}\n    get it anew")
    if header is None or (header.name, header.size) != (member.name, member.size_bytes):
        raise damaged
    target, digest = draft / member.name, hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    source = _content(tar, header)
    with writing(target), created(target) as file:
        while piece := source.read(_PIECE_BYTES):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != member.sha256:
        raise damaged


_STEPS = ("global_step", "_step", "step", "Step")
_TIMES = ("_timestamp", "wall_time_s")
_RUNS = ("run_id", "run", "name", "Name", "run_name")
_SEEDS = ("seed", "Seed")
# W&B's pages write the lowest and highest of a point beside it: `run - metric__MIN`
_SPREADS = ("__MIN", "__MAX")

_MOST_STEP = 2**53


@dataclass
class _Curves:
    points: dict[int, dict[str, float]]
    times_s: dict[int, float]
    seed: int = 0


def import_curves(path: Path, runs: Path) -> list[RunFolder]:
    """Make a run of each that a CSV file has points of."""
    found = _read(path)
    made: list[RunFolder] = []
    try:
        for name, curves in found.items():
            called = name or path.stem
            folder = create_run(
                runs,
                name=called,
                seed=curves.seed,
                config=yaml.safe_dump({"imported": {"file": path.name, "run": called}}),
                data="",
                code=CodeVersion("another program"),
            )
            made.append(folder)
            steps = sorted(curves.points)
            with MetricsLog(folder.metrics) as log:
                for step in steps:
                    log.write(step, curves.points[step], curves.times_s.get(step))
            folder.write_summary({"num_steps": steps[-1]})
    except BaseException:
        for folder in made:
            shutil.rmtree(folder.path)
        raise
    return made


def _read(path: Path) -> dict[str, _Curves]:
    try:
        with TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
            rows = [*csv.reader(file, strict=True)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"'{path}' is no CSV file ({error})") from error
    names = rows[0] if rows else []
    step = next((name for name in _STEPS if name in names), None)
    if step is None:
        raise ConfigError(
            f"'{path}': expected a column of steps, called one of {', '.join(_STEPS)}\n"
            f"    its columns are: {', '.join(names):.300}"
        )
    found: dict[str, _Curves] = {}
    for number, cells in enumerate(rows[1:], 2):
        if len(cells) != len(names):
            raise ConfigError(f"{path}:{number}: expected {len(names)} cells, got {len(cells)}")
        row = dict(zip(names, cells, strict=True))
        value = _number(text := row.pop(step))
        if value is None or not 0 <= value <= _MOST_STEP or value != int(value):
            raise ConfigError(f"{path}:{number}: expected a step, a whole number, got '{text:.40}'")
        _add_row(found, row, int(value))
    found = {name: curves for name, curves in found.items() if curves.points}
    if not found:
        raise ConfigError(f"'{path}' has no column of numbers beside its steps")
    return found


def _add_row(found: dict[str, _Curves], row: Mapping[str, str], step: int) -> None:
    whose = next((row[name] for name in _RUNS if row.get(name)), "")
    seed = next((_number(row[name]) for name in _SEEDS if row.get(name)), None)
    time_s = next((_number(row[name]) for name in _TIMES if row.get(name)), None)
    for column, text in row.items():
        value = _number(text)
        if value is None or column in (*_RUNS, *_SEEDS, *_TIMES) or column.endswith(_SPREADS):
            continue
        name, dash, metric = column.rpartition(" - ")
        curves = found.setdefault(whose or name, _Curves({}, {}))
        curves.seed = curves.seed if seed is None else int(seed)
        curves.points.setdefault(step, {})[metric if dash else column] = value
        if time_s is not None:
            curves.times_s[step] = time_s


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
