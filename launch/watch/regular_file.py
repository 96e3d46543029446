"""Reading parts of a file that somebody else may be writing, replacing or removing meanwhile.

A file is read by offsets and never as a whole: it may hold gigabytes, of which a page shows a
thousand lines. What follows the last line end is a line that is still being written, or that a kill
cut short, and does not count.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ...dataflow.regular_files import open_regular
from .known_runs import Gone

_CHUNK_BYTES = 8192
MOST_LINE_BYTES = 4 << 20
"""Of a line; what is longer counts as damaged, so that no file fills the memory."""
_MOST_SEARCHED_BYTES = 16 * MOST_LINE_BYTES
"""Bytes searched for a line end: no line of ours is so long, and a hole can exceed any disk."""
_MARKED_BYTES = 64


@dataclass(frozen=True)
class Line:
    """A complete line.

    Attributes:
        start: Offset of its first byte.
        stop: Offset behind its line end.
        text: Its bytes without the line end; empty if it is longer than any line of ours.
    """

    start: int
    stop: int
    text: bytes


class RegularFile:
    """A file open for reading, as long as it was when it was opened.

    Args:
        descriptor: Of the file; whoever opened it closes it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._inode = os.fstat(descriptor).st_ino
        self.size_bytes = os.fstat(descriptor).st_size
        self.end = self._line_start(self.size_bytes)
        """Offset behind the last line end; 0 without any."""

    def read(self, start: int, num_bytes: int) -> bytes:
        """So many bytes from an offset on, or fewer where the file ends."""
        return os.pread(self._descriptor, max(0, num_bytes), start)

    def mark(self, offset: int) -> str:
        """What tells whether the bytes before an offset are still those that were read.

        A resumed run writes its metrics anew, and the new file may be longer than the old one was.
        """
        before = self.read(max(0, offset - _MARKED_BYTES), min(offset, _MARKED_BYTES))
        return f"{self._inode:x}-{blake2b(before, digest_size=12).hexdigest()}"

    def line_from(self, offset: int) -> Line | None:
        """The first complete line that begins at the offset or after it; None if there is none."""
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
        return Line(start, stop, self.read(start, stop - start - 1) if short else b"")

    def line_before(self, offset: int) -> Line | None:
        """The complete line that ends at the offset, which is behind a line end."""
        if offset <= 0:
            return None
        return self.line_from(self._line_start(offset - 1))

    def lines(self, start: int, stop: int) -> Generator[Line]:
        """All complete lines of a range that begins and ends at line ends."""
        while start < stop:
            line = self.line_from(start)
            if line is None:
                return
            yield line
            start = line.stop

    def _next_end(self, offset: int) -> int | None:
        """The offset behind the first line end at or after an offset, within the complete part."""
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
        """The offset behind the last line end before an offset; 0 if there is none."""
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
    """Open a file to read parts of it.

    Raises:
        Gone: If it is not there, or is no regular file.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
        raise Gone(f"{path.name}: {reason}") from error
    try:
        yield RegularFile(descriptor)
    finally:
        os.close(descriptor)
