"""Ending a run in good order: who asks once gets a checkpoint first, who asks twice does not.

While steps are taken, SIGINT (Ctrl-C) and SIGTERM ask the run to stop: it completes what it has
begun to train, writes a checkpoint and ends. The second signal ends it at once, and so does a wait
that outlasts its deadline. A process that was started deaf to SIGINT, as a script starts what is to
run on in the background, stays deaf to it; SIGTERM always counts.

Ctrl-C ends the reader of standard error as well in `penstock run ... 2>&1 | tee log`. What is said
from then on is lost, and no more than that.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TextIO


class Terminated(BaseException):
    """SIGTERM came; raised so that everything on the stack is closed on the way out."""


class StopRequest:
    """Whether a run is to stop.

    Args:
        deadline_s: How long it may take to, from the first signal on.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._signal: int | None = None
        self._timer: threading.Timer | None = None

    def __call__(self) -> bool:
        """Whether somebody asked."""
        return self._signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal.

        Raises:
            KeyboardInterrupt: If it is the second one, and SIGINT.
            Terminated: If it is the second one, and SIGTERM.
        """
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
        """The steps are over; stop if that was asked for.

        Args:
            what: How far the run has come: "after 3 of 10 steps".

        Raises:
            KeyboardInterrupt: If SIGINT asked.
            Terminated: If SIGTERM did.
        """
        if self._signal is not None:
            raise _error(self._signal, what)

    def close(self) -> None:
        """Forget the deadline."""
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
    """Say it at once, and from within a signal handler, where a buffered file may be in use."""
    # If nobody reads it any longer, an error here would be raised wherever the run is and take its
    # checkpoint, or the deadline, away.
    with suppress(OSError):
        os.write(2, f"penstock: {text}\n".encode())


_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that command a terminal, turn the order of others, or cannot be written."""


def visible(text: str) -> str:
    """A text that only shows: control characters as Python writes them, lines and tabs as they are.

    File names, rows of data, sources and errors of the user's code end up in messages, and what
    a model wrote in some of them.
    """
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


_MOST_CHARACTERS = 20_000
"""Of a message: an error's text may be as long as the user's code likes."""


def say(message: str) -> None:
    """Print `penstock: message` to standard error, if somebody reads it still."""
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
    """Have standard error or output lead nowhere: a write to it has failed, as every other would.

    The next one may be that of the interpreter when it ends, which would change the exit code.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # It may have no descriptor, or be closed: nothing of it is left to fail then.
    with suppress(OSError, ValueError):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def stoppable(deadline_s: float) -> Generator[StopRequest]:
    """Have signals ask for a stop while the body runs, which must be in the main thread.

    Args:
        deadline_s: How long the body may go on from the first signal on.

    Raises:
        KeyboardInterrupt: In the body, if the second signal is SIGINT or the deadline passes.
        Terminated: The same of SIGTERM.
    """
    request = StopRequest(deadline_s)
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, request.handle) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        request.close()
