"""Somebody who kills processes from outside, as a test says when."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable

import psutil

_LIMIT_S = 60.0


@contextlib.contextmanager
def killing(find: Callable[[], Iterable[int]], when: Callable[[], bool]) -> Generator[None]:
    """Once `when` is true, kill what `find` finds then; by the end that has been done."""
    killed: list[int] = []
    end_s = time.monotonic() + _LIMIT_S

    def kill() -> None:
        while time.monotonic() < end_s:
            if when() and (found := [*find()]):
                for process in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                        killed.append(process)
                while any(map(lives, killed)) and time.monotonic() < end_s:
                    time.sleep(0.01)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join(_LIMIT_S)
    assert killed


def lives(process: int) -> bool:
    """Whether it is there and not merely still to be waited for."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
