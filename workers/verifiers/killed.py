"""Whether a process was killed from outside, which is no fault of what it was doing.

Whoever has it starts another and has it do the same again, once: what kills itself, or is killed
because memory runs out, looks alike, and would go on for ever.
"""

from __future__ import annotations

import signal

__all__ = ["was_killed"]

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""What is sent to a process from outside. All else comes of what it does itself."""


def was_killed(exit_code: int | None) -> bool:
    """Whether a process with this exit code, minus a signal or of a shell, was killed."""
    if exit_code is None:
        return False
    return (128 - exit_code if exit_code > 128 else exit_code) in {-s for s in _FROM_OUTSIDE}
