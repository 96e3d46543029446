"""The process a verifier runs in: a script of the standard library alone, so that it starts fast.

It speaks JSON, one message a line, and numbers every message. First comes `{"row", "nonce", "path",
"factory", "arguments"}`, from which it makes the verifier; then each line is a call, `{"row",
"nonce", "arguments"}`. Either is answered once, by `{"row", "nonce", "score": number or null}` (0
for the verifier) or `{"row", "nonce", "error": text}`. Nothing is ever unpickled.

The script forks first. The child runs the verifier, which has its main thread. The parent only
supervises: whatever the verifier's processes start becomes its own child when they end (Linux calls
that a subreaper), also what has changed its session. When the verifier has ended, or the other end
of a pipe is closed (its read end is the script's argument) because the pool wants it so or has
died, it kills them until there are none left, and then ends as the verifier did. On other systems
it kills the verifier's process group.

Standard input of the verifier is empty and its standard output goes to standard error; the messages
have descriptors of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import math
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from decimal import Decimal
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

DEATH_SIGNAL, SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux's prctl."""
USER_ERRORS = (Exception, SystemExit, GeneratorExit)
"""What user code may raise that counts as its failure. KeyboardInterrupt and other exceptions of
that kind are left out where signals raise them too."""
_OURS = tuple(
    f"{Path(__file__).resolve().parents[2] / name}{os.sep}"
    for name in ("algorithms", "configs", "dataflow", "launch", "planner", "workers")
)
"""Folders of this package: frames in them say nothing to somebody whose function failed."""
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""What is sent to a process from outside. All else comes of what it does itself."""
_HEAD, _TAIL = 1000, 3000
"""Characters of an error that are told. As JSON a character takes 12 bytes at most."""


def main(serve: Callable[[int, int], None]) -> None:
    """Serve calls until the input closes.

    Args:
        serve: Run in the child; takes the descriptors of calls and of replies.
    """
    lifeline = int(sys.argv[1])
    calls, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    prctl(SUBREAPER, 1)
    verifier = os.fork()
    if verifier:
        os.close(calls)
        os.close(replies)
        supervise(verifier, lifeline)
    supervisor = os.getppid()
    os.close(lifeline)
    os.setsid()  # signals to its group are not for the supervisor
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == supervisor:  # else it died before it was to be told of
        serve(calls, replies)


def prctl(option: int, value: int) -> None:
    """Ask Linux for something; other systems have no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def supervise(verifier: int, lifeline: int) -> NoReturn:
    """Wait for the verifier, end whatever it has started, and end in the same way."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the verifier has written one if it may
    threading.Thread(target=_end_with_pool, args=(lifeline, verifier), daemon=True).start()
    status = None
    with contextlib.suppress(ChildProcessError):  # there is no process left: the proof
        while True:
            process, how = os.wait()
            status = how if process == verifier else status
            if status is not None:
                kill_children(verifier)
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def was_killed(exit_code: int | None) -> bool:
    """Whether a process was killed from outside, which is no fault of what it was doing.

    Whoever has it starts another and has it do the same again, once: what kills itself, or is
    killed because memory runs out, looks alike, and would go on for ever.

    Args:
        exit_code: The code, minus a signal or of a shell.
    """
    if exit_code is None:
        return False
    return (128 - exit_code if exit_code > 128 else exit_code) in {-s for s in _FROM_OUTSIDE}


def _end_with_pool(lifeline: int, verifier: int) -> None:
    os.read(lifeline, 1)
    kill_children(verifier)


def kill_children(verifier: int) -> None:
    """Kill the processes right below this one; those below them take their place, to be found next.

    To look for all that are below takes longer than one that only starts another one and ends.
    """
    listed = Path(f"/proc/self/task/{os.getpid()}/children")  # Linux has it, nearly always
    kill, found = (
        (os.kill, listed.read_text().split()) if listed.exists() else (os.killpg, [verifier])
    )
    for process in found:
        with contextlib.suppress(OSError):  # it has ended
            kill(int(process), signal.SIGKILL)


def _serve(calls: int, replies: int) -> None:
    with contextlib.suppress(OSError):  # only Linux has it
        # If memory runs out, this process is the one to go, not the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    process = os.getpid()

    def reply(call: dict[str, Any], answer: dict[str, Any]) -> None:
        if os.getpid() != process:  # user code has forked, and returned on both sides
            os._exit(0)
        message = {"row": call["row"], "nonce": call["nonce"], **answer}
        left = memoryview(json.dumps(message).encode() + b"\n")
        while left:
            left = left[os.write(replies, left) :]

    with os.fdopen(calls, "rb") as lines:
        setup = json.loads(lines.readline())
        sys.path[:] = setup["path"]
        made: list[Callable[..., Any]] = []

        def make() -> float:
            module, _, name = setup["factory"].partition(":")
            made.append(getattr(import_module(module), name)(**setup["arguments"]))
            return 0.0

        reply(setup, verdict(make, (), caught=BaseException))
        while made and (line := lines.readline()):
            call = json.loads(line)
            reply(call, verdict(made[0], call["arguments"], caught=BaseException))


def verdict(
    verify: Callable[..., Any],
    arguments: Any,
    *,
    caught: type[BaseException] | tuple[type[BaseException], ...] = USER_ERRORS,
) -> dict[str, Any]:
    """Call user code, which may return or raise anything.

    Args:
        verify: The user's function.
        arguments: What to call it with.
        caught: What counts as a failure of this call and not of the process.

    Returns:
        `{"score": ...}` as `as_score` has it, or `{"error": text}` of at most some 4,000
        characters.
    """
    try:
        score = verify(*arguments)
        try:
            return {"score": as_score(score)}
        except ValueError as error:
            return {"error": f"the verifier returned {error}\n"}
    except caught as error:
        try:
            text = _described(error)
        except Exception as other:  # user code again: it describes its error
            text = f"{type(error).__name__}, which cannot be shown: {type(other).__name__}\n"
        left_out = len(text) - _HEAD - _TAIL
        if left_out > 0:
            text = f"{text[:_HEAD]}... {left_out} characters ...{text[-_TAIL:]}"
        return {"error": text}


def as_score(value: Any) -> float | None:
    """Read what user code returned as a score; None where it says that there is none.

    Every reward, judge and environment is read by this. A number is a Python or numpy number, a
    truth value, or an array or tensor without dimensions. None and nan mean "cannot say".

    Raises:
        ValueError: If it is anything else, or infinite; the message says what came.
    """
    given = value
    if value is not None and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, (Real, Decimal)):
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that nothing has awaited it
            raise ValueError("a coroutine, not a number; a reward must not be `async`")
        raise ValueError(f"{given!r:.200}, not a finite number")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if math.isinf(score):
        raise ValueError(f"{given!r:.200}, not a finite number")
    return None if math.isnan(score) else score


def _described(error: BaseException) -> str:
    """`file:line` and source of each frame that is the user's, and what was raised."""
    lines: list[str] = []
    for frame in traceback.extract_tb(error.__traceback__):
        # Resolved: an installed package may be links to its files.
        if (
            not os.path.realpath(frame.filename).startswith(_OURS)
            and "<frozen " not in frame.filename
        ):
            lines.append(f"{frame.filename}:{frame.lineno}\n    {frame.line}\n")
    return "".join([*lines, *traceback.format_exception_only(error)])


if __name__ == "__main__":
    main(_serve)
