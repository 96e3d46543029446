"""Open files that someone else may have made: regular files, and nothing else.

A FIFO or a device where a file belongs would be waited for or read without end, and a link where a
process writes would have it write somewhere else. Opening never waits, and what was opened is
looked at, not what had that name before. Links to models and data are fine: caches are made of
them. Where a process writes, nothing follows a link.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from .errors import ConfigError

MOST_TEXT_BYTES = 256 << 20
"""Largest file that is read as a whole; those that Penstock writes and reads so are far smaller."""

# Most digits of a whole number: more than any float has, and few enough to be read fast.
_MOST_DIGITS = 400

_MOST_DEPTH = 100  # Deepest nesting of objects and lists

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotAFile(ConfigError, OSError):
    """Raised where something other than a regular file stands in place of one."""

    def __str__(self) -> str:
        return f"'{self.filename}': {self.strerror}\n    remove it, or put a file in its place"


def open_regular(path: Path, flags: int = os.O_RDONLY, *, links: bool = True) -> int:
    """Open a regular file, without waiting for anything."""
    follow = 0 if links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | follow, 0o644)
    except OSError as error:
        # A FIFO without a reader, a socket, a folder to write to, a link that is not followed.
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ELOOP, errno.ENODEV):
            _refuse(path, os.stat(path, follow_symlinks=links))
        raise
    try:
        _refuse(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path) -> None:
    """Require a regular file, or a link to one, where a library opens files by their names."""
    _refuse(path, os.stat(path))


def check_folder_files(folder: Path) -> None:
    """Require that a folder holds only regular files, folders, and links to these.

    Libraries choose by themselves which files of a model they read. A folder that is not there, and
    a link that leads nowhere, are left to them.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            continue
        if not stat.S_ISDIR(found.st_mode):
            _refuse(path, found)


def _refuse(path: Path, found: os.stat_result) -> None:
    what = next((name for is_kind, name in _KINDS if is_kind(found.st_mode)), "")
    if not what and Path("/proc/version").exists() and found.st_dev == os.stat("/proc").st_dev:
        what = "a queue or state file of the kernel"  # regular by its mode, as /proc/kmsg is
    if what:
        raise NotAFile(errno.EINVAL, f"it is {what} where a file belongs", str(path))


def opened(path: Path) -> BufferedReader:
    """Open a regular file to read it; see `open_regular`."""
    return os.fdopen(open_regular(path), "rb")


def opened_to_append(path: Path) -> FileIO:
    """Open a file to append to it without a buffer, and make it if it does not exist."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    return FileIO(open_regular(path, flags, links=False), "ab")


def created(path: Path) -> FileIO:
    """Make a new file to write to, without a buffer; a file or a link of that name is removed."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return FileIO(open_regular(path, flags, links=False), "wb")


def read_bytes(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """Read a regular file that has at most `most_bytes` bytes."""
    with opened(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        # Read the size at opening: `read(most_bytes)` would allocate the whole bound first.
        content = b"" if size_bytes > most_bytes else file.read(size_bytes)
    if size_bytes > most_bytes:
        said = f"It has {size_bytes} bytes, and at most {most_bytes} are read"
        raise OSError(errno.EFBIG, said, str(path))
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file whose numbers are finite and whose nesting is bounded."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text; see `read_json`."""
    try:
        found: Any = json.loads(
            content, parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(found)
    return found


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise ValueError(f"{text:.40} is no finite number")
    return number


def _check_depth(value: Any) -> None:
    level: list[Any] = [[value]]
    for _ in range(_MOST_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for many in inner for one in many if isinstance(one, dict | list)]  # pyright: ignore[reportUnknownVariableType]
        if not level:
            return
    raise ValueError("it is nested too deeply")
