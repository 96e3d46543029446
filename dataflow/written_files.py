"""Files that are hashed as they are written, so that nobody has to read them again for it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .file_errors import writing

__all__ = ["WrittenFile", "write_hashed"]


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
