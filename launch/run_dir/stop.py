"""Messages on standard error, and how a run is stopped: by signals, or under a supervisor.

While steps are taken, SIGINT (Ctrl-C) and SIGTERM ask the run to stop: it completes what it has
begun to train, writes a checkpoint and ends. The second signal ends it at once, and so does a wait
that outlasts its deadline. A process that was started with SIGINT ignored, as a script starts what
is to run on in the background, ignores it still; SIGTERM always counts.

Ctrl-C ends the reader of standard error as well in `penstock run ... 2>&1 | tee log`. What is
printed from then on is lost, and no more than that.

A run under `penstock run --supervise` reports to its parent by lines of JSON in a file without a
name, which both hold open: the parent reads it once the run's process has ended, however it ended.
The parent gives its descriptor in an environment variable, with its own process, so that no other
process that inherits the variable reports to it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO


class Terminated(BaseException):
    """SIGTERM came; raised so that everything on the stack is closed on the way out."""


def unhidden(error: BaseException) -> BaseException:
    """The end that a signal asked for, where C code that it came in hides it in a `SystemError`."""
    asked = error.__cause__ if isinstance(error, SystemError) else None
    return asked if isinstance(asked, KeyboardInterrupt | Terminated) else error


class StopRequest:
    """A request to stop the run, by a signal within `deadline_s`, or by the run's own code."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._signal: int | None = None
        self.reason = ""  # of the run's own code
        self._timer: threading.Timer | None = None

    def __call__(self) -> bool:
        return self._signal is not None or bool(self.reason)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal; the second one raises `KeyboardInterrupt` or `Terminated`."""
        if self._signal is not None:
            raise _error(number, "")
        self._signal = number
        self._timer = threading.Timer(self._deadline_s, self._expire, (number,))
        self._timer.daemon = True
        self._timer.start()
        _tell(
            "stopping: what has begun to train is completed and a checkpoint written, within "
            f"{self._deadline_s:g} s; interrupt again to stop at once"
        )

    def end(self, what: str) -> None:
        """Raise what was asked for, once the steps are over; `what`: "after 3 of 10 steps"."""
        if self._signal is not None:
            raise _error(self._signal, what)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            if self._timer.is_alive():  # else a second signal came before it was started
                self._timer.join()

    def _expire(self, number: int) -> None:
        _tell(f"no checkpoint was written within {self._deadline_s:g} s; stopping at once")
        main = threading.main_thread().ident
        assert main is not None, "the main thread has started"
        signal.pthread_kill(main, number)


def _error(number: int, what: str) -> BaseException:
    return KeyboardInterrupt(what) if number == signal.SIGINT else Terminated(what)


def _tell(text: str) -> None:
    # At once: in a signal handler a buffered file may be in use. If it is read no longer, an
    # error would be raised wherever the run is and take its checkpoint, or the deadline, away.
    with suppress(OSError):
        start = (
            "\n" if os.isatty(2) else ""
        )  # the live line is still open, and ^C stands at its end
        os.write(2, f"{start}penstock: {text}\n".encode())


# Characters that command a terminal, turn the order of others, or cannot be written.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Write control characters as Python does, but for lines and tabs.

    File names, rows of data, sources and errors of the user's code end up in messages, and what
    a model wrote in some of them.
    """
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


_MOST_CHARACTERS = 20_000  # of a message: an error's text may be as long as the user's code likes


def say(message: str) -> None:
    """Print `penstock: message` to standard error, if it still has a reader."""
    if len(message) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        left_out = len(message) - 2 * half
        message = f"{message[:half]}\n[{left_out} characters]\n{message[-half:]}"
    first, *others = visible(message).split("\n")
    # No line of a text that is not ours may look like a message.
    lines = [f"    {line}" if line.startswith("penstock: ") else line for line in others]
    try:
        print("\n".join([f"penstock: {first}", *lines]), file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: the user's code has closed it
        drop_output(sys.stderr)


def drop_output(stream: TextIO) -> None:
    """Have standard error or output lead nowhere, after a write to it has failed.

    The next one may be that of the interpreter when it ends, which would change the exit code.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # It may have no descriptor, or be closed: nothing of it is left to fail then.
    with suppress(OSError, ValueError):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Generator[None]:
    """Have signals handled while the body runs, but for those that are ignored."""
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


@contextmanager
def stoppable(deadline_s: float) -> Generator[StopRequest]:
    """Have signals request a stop while the body runs, which must be in the main thread."""
    request = StopRequest(deadline_s)
    try:
        with handled((signal.SIGINT, signal.SIGTERM), request.handle):
            yield request
    finally:
        request.close()


_VARIABLE = "PENSTOCK_SUPERVISED"


def environment_of(descriptor: int) -> dict[str, str]:
    """Return environment variables that tell a child process where to write to its parent."""
    return {_VARIABLE: f"{os.getpid()}:{descriptor}"}


def tell(**said: Any) -> None:
    """Report to the supervisor, if there is one.

    `recovery`: how often it may start the run again. `folder`: where the run is. `may_go_on`:
    whether starting again may fix the error with which this process ends.
    """
    parent, _, descriptor = os.environ.get(_VARIABLE, "").partition(":")
    if parent != str(os.getppid()):
        return
    # A full disk of the parent's is no reason for the run to end.
    with suppress(OSError):
        os.write(int(descriptor), f"{json.dumps(said)}\n".encode())


def what_was_told(descriptor: int) -> Mapping[str, Any]:
    """Return the latest report of each kind; a line cut short by a kill is left out."""
    found: dict[str, Any] = {}
    told = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    for line in told.split(b"\n")[:-1]:
        found |= json.loads(line)
    return found
