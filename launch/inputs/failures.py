"""What is said of an exception that nobody foresaw: one message, and whose line it was.

What we raise on purpose (`PenstockError`) is said as it is. Of an `OSError` the file and the
reason are said, of an exception in the user's code the user's line, of any other ours.
"""

from __future__ import annotations

import errno
import os

from ...dataflow.errors import (
    ConfigError,
    PenstockError,
    Where,
    WorkerError,
    raised_at,
    users_line,
)

__all__ = ["foreseen"]

_MOST_CHARACTERS = 2000

_FIXES = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
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


def foreseen(error: BaseException, *, running: bool) -> PenstockError:
    """An error of ours that says what happened, for one that is none.

    Args:
        error: What was raised.
        running: Whether steps have been taken; if not, what was asked for cannot be run.

    Returns:
        A `WorkerError` if running, else a `ConfigError`; with `error` as its cause.
    """
    kind = WorkerError if running else ConfigError
    made = kind(_text(error))
    made.__cause__ = error
    return made


def _text(error: BaseException) -> str:
    line = users_line(error)
    said = f"{type(error).__name__}: {error}".rstrip(": ")[:_MOST_CHARACTERS]
    if line is not None:
        return f"{line.file}:{line.line}\n    {line.source}\n    {said}"
    if isinstance(error, OSError) and error.errno is not None:
        what = (
            f"'{os.fsdecode(error.filename)}': " if isinstance(error.filename, str | bytes) else ""
        )
        fix = _FIXES.get(error.errno, "see the machine's disk, memory and permissions")
        return f"{what}{error.strerror or said}\n    {fix}"
    if isinstance(error, MemoryError):
        return "there is not enough memory\n    free some, or run something smaller"
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return "there are no threads left to start\n    end other processes, or raise ulimit -u"
    at = raised_at(error) if error.__traceback__ is not None else Where("<unknown>", 0, "")
    return (
        f"an error that penstock does not know: {said}\n    raised at {at.file}:{at.line}\n"
        "    --debug shows how it came about; please report it"
    )
