"""A run as one file that can be sent: a tar archive with a checksum of every file in it.

    penstock-run.json     the format, the run's name, and the size and SHA-256 of each file
    <run>/...             the run's folder
    own/...               files of the user's own that the run imported

Nothing in it is code that unpacking runs, and nothing is unpacked by the names that it has: a
member must be a regular file that the list names, in the order of the list, and of the listed size
and hash. It is unpacked beside its place and moved there when all of it was right.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from ...dataflow.errors import ConfigError
from ...dataflow.file_errors import writing
from ...dataflow.regular_files import created, opened
from ..run_dir.run_files import field, parse_object
from ..run_dir.run_folder import RunFolder, RunRecord

_MANIFEST = "penstock-run.json"
_FORMAT = 1
_OWN = "own-files"
"""Below an imported run's folder: the user's own files, which nothing imports by itself."""

_LEFT_OUT = ("checkpoints", ".lock")
"""What only the machine it ran on goes on with; models and results are all there."""

_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)
_PIECE_BYTES = 1 << 20
_MOST_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True)
class _Member:
    """One file: its name in the archive, size in bytes, and SHA-256 in hex."""

    name: str
    size_bytes: int
    sha256: str


def export_run(record: RunRecord, path: Path, *, checkpoints: bool = False) -> int:
    """Write a run's archive; what is written halfway has another name.

    Args:
        record: Of the run, which nobody changes meanwhile.
        path: Of the archive, which must not be there.
        checkpoints: Whether checkpoints are in it too: with them the run can be resumed.

    Returns:
        Its size, bytes.

    Raises:
        ConfigError: If there is something at `path`, or the run is being run.
    """
    if path.exists():
        raise ConfigError(f"'{path}' is there\n    give another name, or remove it")
    folder, draft = record.folder, path.with_name(f".{path.name}.new")
    left_out = _LEFT_OUT[checkpoints:]
    files = {
        f"{folder.id}/{file.relative_to(folder.path).as_posix()}": file
        for file in sorted(folder.path.rglob("*"))
        if file.is_file()
        and not file.is_symlink()
        and not {*file.relative_to(folder.path).parts} & {*left_out}
    }
    files = dict(sorted({**files, **dict(_own_files(record))}.items()))
    try:
        with (
            writing(path),
            folder.locked(),
            created(draft) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            members = [_member(name, file) for name, file in files.items()]
            about = {"format": _FORMAT, "run": folder.id, "files": [asdict(m) for m in members]}
            _add(tar, _MANIFEST, json.dumps(about, indent=1).encode())
            for member in members:
                with opened(files[member.name]) as content:
                    tar.addfile(_header(member.name, member.size_bytes), content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path.stat().st_size


def _own_files(record: RunRecord) -> Iterable[tuple[str, Path]]:
    """The files that the run imported, as far as they are still what it imported."""
    own = record.folder.path / _OWN
    for name, recorded in record.origins.files.items():
        inside = name.lstrip("/").replace("..", "__")
        for path in (own / inside, Path(name)):
            if path.is_file() and _hash(path) == recorded:
                yield f"{record.folder.id}/{_OWN}/{inside}", path
                break


def _member(name: str, path: Path) -> _Member:
    return _Member(name, path.stat().st_size, _hash(path))


def _hash(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(name: str, size_bytes: int) -> tarfile.TarInfo:
    """Without owner, time and rights: the same run has the same archive."""
    header = tarfile.TarInfo(name)
    header.size, header.mode = size_bytes, 0o644
    return header


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    tar.addfile(_header(name, len(content)), io.BytesIO(content))


def import_run(path: Path, runs: Path) -> RunFolder:
    """Unpack an archive into a folder of runs.

    Args:
        path: Of the archive.
        runs: The folder of runs; made if it is not there.

    Returns:
        The run's folder.

    Raises:
        ConfigError: If it is no such archive, is damaged, or the run is there already; nothing
            is left of it then.
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
        name, members = field(about, "run", str), [*map(_listed, field(about, "files", list))]
        for member in members:
            _check_name(member.name, name)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"'{path}': its list of files cannot be read: {error}") from error
    if f"{name}/run.json" not in {member.name for member in members}:
        raise ConfigError(f"'{path}' holds no run.json\n    penstock runs export makes one")
    return name, members


def _listed(entry: Any) -> _Member:
    member = _Member(
        field(entry, "name", str), field(entry, "size_bytes", int), field(entry, "sha256", str)
    )
    if member.size_bytes < 0:
        raise ValueError(f"{member.name!r:.100} has {member.size_bytes} bytes")
    return member


def _next(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """Return the next member; None after the last one."""
    try:
        header = tar.next()
    except (ValueError, LookupError, ArithmeticError, TypeError) as error:  # of damaged headers
        raise tarfile.ReadError(f"a header is damaged: {error!s:.100}") from error
    if header is not None and (header.type not in _PLAIN or header.issparse()):
        raise tarfile.ReadError(f"{header.name!r:.100} is no plain file")
    return header


def _check_name(name: str, run: str) -> None:
    """Of a file: below the run's folder, whose name is one part."""
    parts = name.split("/")
    name.encode()  # fails for half of a surrogate pair
    strange = "/" in run or run.startswith(".") or "\\" in name or "\0" in name
    if strange or len(parts) < 2 or parts[0] != run or {"", ".", ".."} & {*parts}:
        raise ValueError(f"{name!r:.100} is no name of a file of run {run!r:.60}")


def _content(tar: tarfile.TarFile, header: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(header)
    assert content is not None, f"{header.name} is a regular file"
    return content


def _unpack(tar: tarfile.TarFile, member: _Member, draft: Path, path: Path) -> None:
    header = _next(tar)
    damaged = ConfigError(f"'{path}' is damaged at {member.name}\n    get it anew")
    if header is None or header.name != member.name:
        raise damaged
    if header.size != member.size_bytes:
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
