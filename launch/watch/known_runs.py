"""The runs of the page, and parts of their files that somebody else may be writing meanwhile.

A request names a run by a key of `KnownRuns.found`, and a stage by its place in `stages_of`, never
by a path: what is in neither is not there. A file is read by offsets and never as a whole: it may
hold gigabytes, of which a page shows a thousand lines. What follows the last line end is a line
that is still being written, or that a kill cut short, and does not count.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.files import open_regular
from ..run_dir.run_folder import WHY, RunFolder, RunRecord, record_of, state_of


class Gone(ConfigError):
    """Something that a request names is not there, or no longer; the page says so and goes on."""


@dataclass(frozen=True)
class _Stamp:
    inode: int
    size_bytes: int
    modified_ns: int


class KnownRuns:
    """The runs that a page shows."""

    def __init__(self, folders: Sequence[Path], runs: Path) -> None:
        self._folders, self._runs = tuple(folders), runs
        self._records: dict[Path, tuple[tuple[_Stamp | None, ...], RunRecord]] = {}

    def found(self) -> dict[str, RunFolder]:
        """Key -> folder: those that were given, or all that are there now.

        A key is the folder's name, with a number behind it if two have the same.
        """
        paths = self._folders or tuple(sorted(_runs_in(self._runs)))
        keys: dict[str, RunFolder] = {}
        for path in paths:
            key, number = path.name, 2
            while key in keys:
                key, number = f"{path.name} ({number})", number + 1
            keys[key] = RunFolder(path)
        return keys

    def folder(self, key: str) -> RunFolder:
        folder = self.found().get(key)
        if folder is None or not folder.about.is_file():
            raise Gone("this run is no longer there: its folder was removed or renamed")
        return folder

    def listed(self) -> list[dict[str, Any]]:
        return [self._line(key, folder) for key, folder in self.found().items()]

    def _line(self, key: str, folder: RunFolder) -> dict[str, Any]:
        if not folder.about.is_file():
            return {"key": key, "state": "gone", "why": WHY["gone"], "stages": []}
        record = self.record(folder)
        state = state_of(record)
        return {
            "key": key,
            "name": record.name,
            "seed": record.seed,
            "created": record.created.isoformat(),
            "state": state,
            "why": record.fault or WHY[state],
            "stages": stages_of(folder),
        }

    def record(self, folder: RunFolder) -> RunRecord:
        stamps = (_stamp(folder.about), _stamp(folder.summary))
        known = self._records.get(folder.path)
        if known is None or known[0] != stamps:
            known = self._records[folder.path] = (stamps, record_of(folder))
        return known[1]


def stages_of(folder: RunFolder) -> list[str]:
    """The names of a run's stages before the main one, in the order of their folders' names."""
    stages = folder.path / "stages"
    return sorted(path.name for path in stages.iterdir()) if stages.is_dir() else []


def home_of(folder: RunFolder, stage: str) -> Path:
    """The folder of a stage, or of the main one for ""."""
    if not stage:
        return folder.path
    if stage not in stages_of(folder):
        raise Gone("this run has no such stage")
    return folder.stage(stage).path


def _runs_in(runs: Path) -> list[Path]:
    if not runs.is_dir():
        return []
    return [path for path in runs.iterdir() if (path / "run.json").is_file()]


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


_CHUNK_BYTES = 8192
# of a line; what is longer counts as damaged, so that no file fills the memory
MOST_LINE_BYTES = 4 << 20
# bytes searched for a line end: no line of ours is so long, and a hole can exceed any disk
_MOST_SEARCHED_BYTES = 16 * MOST_LINE_BYTES
_MARKED_BYTES = 64


@dataclass(frozen=True)
class LogLine:
    """A complete line."""

    start: int  # offset of its first byte
    stop: int  # offset behind its line end
    text: bytes  # its bytes without the line end; empty if it is longer than any line of ours


class RegularFile:
    """A file open for reading, as long as it was when it was opened."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino
        self.size_bytes = os.fstat(descriptor).st_size
        self.end = self._line_start(self.size_bytes)
        """Offset behind the last line end; 0 without any."""

    def read(self, start: int, num_bytes: int) -> bytes:
        return os.pread(self._descriptor, max(0, num_bytes), start)

    def mark(self, offset: int) -> str:
        # A resumed run writes its metrics anew, and the new file may be longer than the old one
        # was.
        before = self.read(max(0, offset - _MARKED_BYTES), min(offset, _MARKED_BYTES))
        return f"{self._inode:x}-{blake2b(before, digest_size=12).hexdigest()}"

    def line_from(self, offset: int) -> LogLine | None:
        start = offset
        if offset > 0 and self.read(offset - 1, 1) != b"\n":
            ended = self._next_end(offset)
            if ended is None:
                return None
            start = ended
        stop = self._next_end(start)
        if stop is None:
            return None
        short = stop - start <= MOST_LINE_BYTES
        return LogLine(start, stop, self.read(start, stop - start - 1) if short else b"")

    def line_before(self, offset: int) -> LogLine | None:
        if offset <= 0:
            return None
        return self.line_from(self._line_start(offset - 1))

    def lines(self, start: int, stop: int) -> Generator[LogLine]:
        while start < stop:
            line = self.line_from(start)
            if line is None:
                return
            yield line
            start = line.stop

    def _next_end(self, offset: int) -> int | None:
        step, begun = _CHUNK_BYTES, offset
        while offset < self.end:
            self._check_searched(offset - begun)
            chunk = self.read(offset, min(step, self.end - offset))
            if not chunk:
                return None  # it has become shorter
            found = chunk.find(b"\n")
            if found >= 0:
                return offset + found + 1
            offset += len(chunk)
            step = min(2 * step, 1 << 20)
        return None

    def _line_start(self, offset: int) -> int:
        begun = offset
        while offset > 0:
            self._check_searched(begun - offset)
            start = max(0, offset - _CHUNK_BYTES)
            found = self.read(start, offset - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            offset = start
        return 0

    def _check_searched(self, num_bytes: int) -> None:
        if num_bytes > _MOST_SEARCHED_BYTES:
            raise Gone(f"the file is damaged: no line ends within {num_bytes >> 20} MiB")


@contextmanager
def opened(path: Path) -> Generator[RegularFile]:
    """Open a file to read parts of it."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
        raise Gone(f"{path.name}: {reason}") from error
    try:
        yield RegularFile(descriptor)
    finally:
        os.close(descriptor)
