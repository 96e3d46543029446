"""Log messages of server and protocol libraries in single lines: the first of each kind.

Those libraries log whatever the other side does wrong, with tracebacks, so that a server that
prints or a client that hangs up could fill a run's output.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextvars import ContextVar

SPEAKER: ContextVar[str] = ContextVar("penstock_speaker", default="")
"""Other side of a connection, for messages; tasks that serve the connection inherit it."""

_LOG = logging.getLogger("penstock.agents")
_MOST_KINDS = 64
"""Most kinds of messages that are told apart; messages of further kinds are not shown."""
_SHOWN = 200  # most characters of a line that are shown


class LibraryLines(logging.Handler):
    """Logs the first record of each kind and speaker in one line, and counts the others.

    Attributes:
        num_seen: Number of records by speaker and kind.
    """

    def __init__(self, library: str) -> None:
        super().__init__(logging.WARNING)
        self._library = library
        self.num_seen: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record if it is the first of its kind; else count it."""
        speaker, error = SPEAKER.get() or self._library, record.exc_info and record.exc_info[1]
        # A message with an error is of the same kind whatever the error says.
        key = (speaker, f"{record.pathname}:{record.lineno}")
        if key not in self.num_seen and len(self.num_seen) >= _MOST_KINDS:
            return
        self.num_seen[key] += 1
        if self.num_seen[key] > 1:
            return
        why = "" if error is None else f": {_reason(error)}"
        said = f"{str(record.msg) if record.args is None else record.getMessage()}{why}"
        _LOG.warning("%s: %s; this is said once", speaker, said.partition("\n")[0])


def tame(*loggers: str) -> None:
    """Log all records of some loggers, and of those below them, in single lines."""
    for name in loggers:
        logger = logging.getLogger(name)
        if not any(isinstance(one, LibraryLines) for one in logger.handlers):
            logger.addHandler(LibraryLines(name))
        logger.propagate = False


def _reason(error: BaseException) -> str:
    """Describe an error; a text that could not be read is quoted."""
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        first = errors(include_url=False)[0]  # pyright: ignore[reportIndexIssue, reportUnknownVariableType]
        return f"got {str(first['input'])[:_SHOWN]!r}"  # pyright: ignore[reportUnknownArgumentType]
    return f"{type(error).__name__}: {str(error)[:_SHOWN]}"
