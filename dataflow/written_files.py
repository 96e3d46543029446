"""Files that are written while something else goes on, and hashed as they are written."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from .file_errors import writing

__all__ = ["Background", "WrittenFile", "write_hashed"]

T = TypeVar("T")


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk, synced, and was hashed as it was written."""

    size_bytes: int
    sha256: str


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write a file part by part and have the disk take all of it.

    Args:
        path: The file; one that is there is replaced.
        parts: Of a few megabytes each: neither hashing nor writing one holds up other threads.

    Raises:
        OSError: If the disk refuses, with `path` as its filename.
    """
    digest, size_bytes = hashlib.sha256(), 0
    with writing(path), path.open("wb", buffering=0) as file:
        for part in parts:
            digest.update(part)
            rest = memoryview(part)
            size_bytes += len(rest)
            while rest:
                rest = rest[file.write(rest) or 0 :]
        os.fsync(file.fileno())
    return WrittenFile(size_bytes, digest.hexdigest())


class Background(Generic[T]):
    """Begins at once. An interpreter that ends does not wait for it: a disk may hang for good.

    Args:
        function: What to do; it must not touch what others change meanwhile.
        name: Of the thread.

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
        """What the function has returned; call it once `wait` has said that it has ended.

        Raises:
            BaseException: What the function raised.
        """
        if self._error is not None:
            raise self._error
        return self._found[0]
