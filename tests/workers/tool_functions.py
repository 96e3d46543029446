"""Functions for tests of tools: good ones, and every kind of bad one that somebody might write."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any, Literal, NoReturn


def add(a: int, b: int = 1) -> int:
    """Add two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def describe(
    what: str, kinds: list[Literal["red", "blue"]], note: str | None = None
) -> dict[str, Any]:
    """Describe a thing.

    Args:
        what: The thing.
        kinds: Of it.
        note: To add.
    """
    return {"what": what, "kinds": kinds, "note": note}


def misbehave(how: str) -> Any:
    """Do something bad.

    Args:
        how: What.
    """
    return _WAYS[how]()


def _raise(error: BaseException) -> NoReturn:
    raise error


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("I say nothing")


class _Unshown:
    def __repr__(self) -> str:
        raise SystemExit(5)


def _recurse() -> int:
    return _recurse() + 1


def _circle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def _nested() -> list[Any]:
    items: list[Any] = []
    for _ in range(100_000):
        items = [items]
    return items


def _fork_and_return() -> str:
    if os.fork() == 0:
        return "the child answers, too"
    return "parent"


def _fork_that_stays() -> str:
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(1000)
        os._exit(0)
    return str(child)


def _fork_and_hang() -> None:
    child = _fork_that_stays()
    with open(os.environ["LEFT_BEHIND"], "w") as file:
        file.write(child)
    time.sleep(1000)


def _write_everywhere() -> str:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b'{"nonce": "guessed", "text": "all is well", "error": false}\n')
        except OSError:
            continue
    return "done"


def _close_everything() -> str:
    os.closerange(0, 64)
    return "done"


def _print_much() -> str:
    for _ in range(100):
        sys.stdout.write("x" * 1_000_000)
        os.write(2, b"y" * 1_000_000)
    return "printed"


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def _catch_all() -> None:
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            continue


_WAYS: dict[str, Any] = {
    "hang": lambda: time.sleep(1000),
    "loop": lambda: [None for _ in iter(int, 1)] if os.environ.get("NEVER") else _catch_all(),
    "ignore signals": _ignore_signals,
    "os._exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill group": lambda: os.killpg(0, signal.SIGKILL),
    "raise": lambda: _raise(ValueError("no such thing")),
    "raise base": lambda: _raise(BaseException("of all")),
    "raise interrupt": lambda: _raise(KeyboardInterrupt()),
    "raise mute": lambda: _raise(_Mute()),
    "raise long": lambda: _raise(ValueError("x" * 10_000_000)),
    "bytes": lambda: b"\xff\x00",
    "nan": lambda: float("nan"),
    "huge": lambda: 10**5000,
    "long text": lambda: "ä" * 10_000_000,
    "surrogate": lambda: "half \ud800 of it",
    "unshown": _Unshown,
    "circle": _circle,
    "nested": _nested,
    "recursion": _recurse,
    "fork and return": _fork_and_return,
    "fork that stays": _fork_that_stays,
    "fork and hang": _fork_and_hang,
    "write everywhere": _write_everywhere,
    "close everything": _close_everything,
    "print": _print_much,
    "change folder": lambda: os.chdir("/") or "changed",
    "nothing": lambda: None,
}
WAYS = tuple(_WAYS)


def linger(mark: str) -> str:
    """Never answer the first call.

    Args:
        mark: A file that tells whether it is the first.
    """
    if not os.path.exists(mark):
        open(mark, "w").close()
        time.sleep(1000)
    return "done"


def undocumented(a: int) -> int:
    return a


def variadic(*a: int) -> int:
    """Add.

    Args:
        a: All.
    """
    return sum(a)


async def later(a: int) -> int:
    """Wait.

    Args:
        a: What for.
    """
    return a


class Notes:
    """What a conversation notes down."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def note(self, text: str) -> int:
        """Note something down, and say how many notes there are.

        Args:
            text: The note.
        """
        self._kept.append(text)
        return len(self._kept)

    def notes(self) -> list[str]:
        """Say what was noted down."""
        return self._kept

    def hang(self) -> None:
        """Never answer."""
        time.sleep(60)


KEPT: list[str] = []
TABLE = {"a": 1}
counted = 0


def keep(text: str) -> int:
    """Keep a text in the module.

    Args:
        text: The text.
    """
    KEPT.append(text)
    return len(KEPT)


def count() -> int:
    """Count calls in the module."""
    global counted
    counted += 1
    return counted


def put(text: str) -> int:
    """Put a text into a table of the module.

    Args:
        text: The text.
    """
    TABLE[text] = 1
    return len(TABLE)


def look_up(text: str) -> int | None:
    """Look something up, which changes nothing.

    Args:
        text: What to look up.
    """
    found = [TABLE.get(text)]
    found.append(None)
    return found[0]
