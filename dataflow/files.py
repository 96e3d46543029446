"""Files that users name and others may have made: opened, read, written; and their errors.

Regular files, and nothing else: a FIFO or a device where a file belongs would be waited for or read
without end, and a link where a process writes would have it write somewhere else. Opening never
waits, and what was opened is looked at, not what had that name before. Links to models and data are
fine: caches are made of them. Where a process writes, nothing follows a link.

An error of opening a file names it; one of writing to it does not, and libraries written in Rust
raise errors of their own. `writing` gives both the name that the user needs.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import ConfigError, PenstockError, users_line

# Error numbers of disks: an error without a file's name may be about a socket otherwise.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)

# The end of Rust's I/O errors, which safetensors and tokenizers pass on as text.
_IN_RUST = re.compile(r"\(os error (\d+)\)")

_FIXES = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
    errno.EFBIG: "give a smaller file, or see the machine's limit: ulimit -f",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "see who owns it and who may use it, or choose another",
    errno.EPERM: "see who owns it and who may use it, or choose another",
    errno.ENOENT: "see that it is there, and how its name is spelt",
    errno.EEXIST: "there is a file where a folder belongs; choose another",
    errno.ENOTDIR: "there is a file where a folder belongs; choose another",
    errno.EISDIR: "give the name of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow this process more open files: ulimit -n",
    errno.ENOMEM: "free some memory, or run something smaller",
}


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Around writing to a file, or to files of a folder."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _DISK:
            error.filename = str(path)
        raise
    except Exception as error:
        found = _IN_RUST.search(str(error))
        if found is None or isinstance(error, PenstockError) or users_line(error) is not None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def file_error(error: BaseException | None) -> str | None:
    """`'FILE': reason`, and what to do; None if it is no such error, or the user's code's."""
    if not isinstance(error, OSError) or error.errno is None or users_line(error) is not None:
        return None
    return _said(error)


def disk_refusal(error: OSError) -> str | None:
    """The same of a file that could not be written; None if it is no matter of the disk.

    Errors of the disk count in any code that writes; other errors only as `file_error` says.
    """
    return _said(error) if error.errno in _DISK else file_error(error)


def _said(error: OSError) -> str:
    named = isinstance(error.filename, str | bytes)
    what = f"'{os.fsdecode(error.filename)}': " if named else ""
    fix = _FIXES.get(error.errno or 0, "see the machine's disk, memory and permissions")
    return f"{what}{error.strerror or type(error).__name__}\n    {fix}"


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


T = TypeVar("T")

_AT_ONCE = 8 << 20  # Bytes that are written at once past the page cache; whole pages


@dataclass(frozen=True)
class WrittenFile:
    """A file that is on the disk, synced, and was hashed as it was written."""

    size_bytes: int
    sha256: str


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write a file part by part and have the disk take all of it.

    A large file goes past the system's page cache, as far as its file system lets it. It is not
    read soon, and to fill the cache can take several times as much processor time as all else.
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
