"""The process a verifier runs in: a script of the standard library alone, so that it starts fast.

It speaks JSON, one message a line. First comes `{"path", "factory", "arguments"}`; it makes the
verifier and answers `{"ready": true}` or `{"fatal": traceback}`. Then each line is a call's list of
arguments, answered by `{"score": number}` or `{"error": traceback}`. Nothing is ever unpickled.

The verifier has the main thread, so signal handlers work in it. Another thread reads the input and
ends the process, and what it has started, when the input closes. That thread cannot run while the
verifier is in a C call that keeps Python's lock, so on Linux the kernel does the same when the
parent's end of a second pipe closes (its read end is the script's argument): a parent that dies,
however it dies, leaves nothing behind. Standard output of the verifier goes to standard error; the
messages have a descriptor of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import queue
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Serve calls until the input closes."""
    _end_with_parent(int(sys.argv[1]))
    with contextlib.suppress(OSError):  # only Linux has it
        # If memory runs out, this process is the one to go, not the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    setup = json.loads(lines.get())
    sys.path[:] = setup["path"]
    try:
        module, _, name = setup["factory"].partition(":")
        verify = getattr(import_module(module), name)(**setup["arguments"])
    except BaseException:  # even SystemExit: the parent must hear why nothing was made
        _reply(replies, {"fatal": traceback.format_exc()})
        return
    _reply(replies, {"ready": True})
    while True:
        _reply(replies, _verdict(verify, json.loads(lines.get())))


def _end_with_parent(lifeline: int) -> None:
    """Have the kernel kill this process group once nobody holds the pipe's other end."""
    if os.getpgrp() != os.getpid() or not hasattr(fcntl, "F_SETSIG"):  # only Linux has it
        return
    os.set_inheritable(lifeline, False)
    # Nothing is ever written to the pipe, so the only event to signal is that it was closed.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # closed before the kernel was asked
        os.killpg(0, signal.SIGKILL)


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _verdict(verify: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        score = verify(*arguments)
    except KeyboardInterrupt:
        os._exit(1)
    except BaseException:  # user code may raise SystemExit; the row fails, the process lives
        return {"error": traceback.format_exc()}
    if isinstance(score, (bool, int, float)) and math.isfinite(score):
        return {"score": float(score)}
    return {"error": f"the verifier returned {score!r:.200}, not a finite number\n"}


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
