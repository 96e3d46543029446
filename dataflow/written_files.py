"""Files that are written while something else goes on, and hashed as they are written."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Generic, TypeVar

from .file_errors import writing
from .regular_files import created

T = TypeVar("T")

_AT_ONCE = 8 << 20  # Bytes that are written at once past the page cache; whole pages


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk, synced, and was hashed as it was written."""

    size_bytes: int
    sha256: str


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write a file part by part and have the disk take all of it.

    A large file goes past the system's page cache, as far as its file system lets it. Nobody reads
    it soon, and to fill the cache can take several times as much processor time as all else.
    """
    digest, size_bytes = hashlib.sha256(), 0
    gathered, num_gathered = memoryview(mmap.mmap(-1, _AT_ONCE)), 0  # begins where a page does
    with writing(path), created(path) as file:
        for part in parts:
            digest.update(part)
            rest = memoryview(part)
            size_bytes += len(rest)
            while rest:
                some = rest[: _AT_ONCE - num_gathered]
                gathered[num_gathered : num_gathered + len(some)] = some
                rest, num_gathered = rest[len(some) :], num_gathered + len(some)
                if num_gathered == _AT_ONCE:
                    _go_past_cache(file, wanted=True)
                    _write(file, gathered)
                    num_gathered = 0
        _go_past_cache(file, wanted=False)  # it takes whole blocks only
        _write(file, gathered[:num_gathered])
        os.fsync(file.fileno())
    return WrittenFile(size_bytes, digest.hexdigest())


def _write(file: FileIO, rest: memoryview) -> None:
    while rest:
        try:
            written = file.write(rest)
        except OSError as error:
            if error.errno != errno.EINVAL or not _go_past_cache(file, wanted=False):
                raise
            continue  # a file system that says only now that it cannot, or after part of a block
        rest = rest[written or 0 :]


def _go_past_cache(file: FileIO, *, wanted: bool) -> bool:
    direct = getattr(os, "O_DIRECT", 0)  # macOS has none
    before = fcntl.fcntl(file, fcntl.F_GETFL)
    after = before | direct if wanted else before & ~direct
    if after == before:
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, after)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot
            raise
        return False
    return True


class Background(Generic[T]):
    """Begins at once. An interpreter that ends does not wait for it: a disk may hang for good.

    Example:
        >>> hashed = Background(lambda: sha256(path), "hash")
        >>> hashed.wait(10.0) and hashed.result()
    """

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._found: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end for so long; says whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._found[0]
