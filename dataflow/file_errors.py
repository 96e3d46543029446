"""Messages about files and folders that cannot be read or written: which, why, what to do.

An error of opening a file names it; one of writing to it does not, and libraries written in Rust
raise errors of their own. `writing` gives both the name that the user needs.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .errors import PenstockError, users_line

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

    What a disk answers counts whoever's code was writing, else only what `file_error` tells.
    """
    return _said(error) if error.errno in _DISK else file_error(error)


def _said(error: OSError) -> str:
    named = isinstance(error.filename, str | bytes)
    what = f"'{os.fsdecode(error.filename)}': " if named else ""
    fix = _FIXES.get(error.errno or 0, "see the machine's disk, memory and permissions")
    return f"{what}{error.strerror or type(error).__name__}\n    {fix}"
