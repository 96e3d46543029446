"""Turn an unexpected exception into one message with the user's file and line.

What we raise on purpose (`PenstockError`) is said as it is. Of an `OSError` the file and the
reason are said, of an exception in the user's code the user's line, of any other ours.
"""

from __future__ import annotations

from bdb import BdbQuit

from ...dataflow.errors import (
    ConfigError,
    PenstockError,
    StateError,
    Where,
    WorkerError,
    raised_at,
    users_line,
)
from ...dataflow.files import file_error
from ...dataflow.runtime.executor import WorkerLost
from ...dataflow.runtime.ledger import LedgerError

_MOST_CHARACTERS = 2000


class Unforeseen(WorkerError):
    """An unexpected exception that no line of the user's raised."""


def left_debugger(error: BaseException) -> bool:
    """Return whether the user left pdb by `q`."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, BdbQuit):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def may_go_on(error: PenstockError) -> bool:
    """Return whether starting a run again may help.

    The user's own code, and what was refused, would fail again; a run that has gone back as often
    as it may is not to; and what a ledger has found is to be looked at.
    """
    if isinstance(error, LedgerError):
        return False
    if isinstance(error, WorkerLost):
        return not isinstance(error.__cause__, WorkerLost)
    return isinstance(error, Unforeseen | StateError)


def in_our_words(error: BaseException, *, running: bool) -> PenstockError:
    """An error of ours that says what happened, for one that is none."""
    kind = ConfigError
    if running:
        kind = Unforeseen if users_line(error) is None else WorkerError
    made = kind(_text(error))
    made.__cause__ = error
    return made


def _text(error: BaseException) -> str:
    line = users_line(error)
    said = f"{type(error).__name__}: {error}".rstrip(": ")[:_MOST_CHARACTERS]
    if line is not None:
        return f"{line.file}:{line.line}\n    {line.source}\n    {said}"
    if isinstance(error, OSError):  # without a number it is a library's, or ours, and says it all
        return file_error(error) or said
    if isinstance(error, MemoryError):
        return "there is not enough memory\n    free some, or run something smaller"
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return "there are no threads left to start\n    end other processes, or raise ulimit -u"
    at = raised_at(error) if error.__traceback__ is not None else Where("<unknown>", 0, "")
    return (
        f"an error that penstock does not know: {said}\n    raised at {at.file}:{at.line}\n"
        "    --debug shows how it came about; please report it"
    )
