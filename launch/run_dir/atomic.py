"""Files that are complete or absent, even if the process or the machine stops at any moment."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ...dataflow.file_errors import writing
from ...dataflow.regular_files import created, open_regular


def sync_file(path: Path) -> None:
    """Make the file's content survive a power cut."""
    descriptor = open_regular(path, links=False)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder, new, renamed or removed, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, descriptor: int, content: bytes) -> None:
    """Append all of the content or nothing; a full disk may take the beginning of it alone.

    Args:
        path: The file.
        descriptor: Of the file, opened to append.
        content: What is written at once, without a buffer.

    Raises:
        OSError: If the disk refuses; the file is then as it was.
    """
    size_bytes = os.fstat(descriptor).st_size
    with writing(path):
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, size_bytes)
            raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader sees all of the old or all of the new.

    Raises:
        OSError: If the folder is missing or full; `path` is then as it was.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with writing(path), created(draft) as file:
            append(path, file.fileno(), text.encode())
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON in one step.

    Raises:
        ValueError: If `value` holds NaN or an infinity, which JSON has no word for.
        TypeError: If it holds something else that JSON cannot say.
    """
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")
