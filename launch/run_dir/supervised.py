"""What a run tells the process that started it to look after it: `penstock run --supervise`.

A line of JSON in a file without a name, which both hold open: the parent reads it once the run's
process has ended, however it ended. The parent gives its descriptor in an environment variable,
with its own process: whoever else inherits that variable is nobody's child, and tells nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

_VARIABLE = "PENSTOCK_SUPERVISED"


def environment_of(descriptor: int) -> dict[str, str]:
    """Return environment variables that tell a child process where to write to its parent."""
    return {_VARIABLE: f"{os.getpid()}:{descriptor}"}


def tell(**said: Any) -> None:
    """Tell the parent something, if it looks after this process.

    Args:
        **said: `recovery`: how often it may start the run again. `folder`: where the run is.
            `may_go_on`: whether the error with which this process ends is one that starting again
            may fix.
    """
    parent, _, descriptor = os.environ.get(_VARIABLE, "").partition(":")
    if parent != str(os.getppid()):
        return
    # A disk that is full where the parent looks is no reason for the run to end.
    with contextlib.suppress(OSError):
        os.write(int(descriptor), f"{json.dumps(said)}\n".encode())


def what_was_told(descriptor: int) -> Mapping[str, Any]:
    """All that was told, the latest of each; a line cut short by a kill is left out."""
    found: dict[str, Any] = {}
    told = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    for line in told.split(b"\n")[:-1]:
        found |= json.loads(line)
    return found
