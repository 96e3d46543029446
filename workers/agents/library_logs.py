"""What server and protocol libraries log, as single lines of ours: the first of each kind.

Those libraries log whatever the other side does wrong, with tracebacks, so that a server that
prints or a client that hangs up could fill a run's output.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextvars import ContextVar

SPEAKER: ContextVar[str] = ContextVar("penstock_speaker", default="")
"""Whom a connection is to, for messages; tasks that serve the connection inherit it."""

_LOG = logging.getLogger("penstock.agents")
_MOST_KINDS = 64
"""Kinds of messages that are told apart; of more, nothing is said."""
_SHOWN = 200
"""Characters of a line that are shown."""


class LibraryLines(logging.Handler):
    """Says the first record of each kind and speaker in one line, and counts the others.

    Args:
        library: Its name, where no speaker is known.

    Attributes:
        num_seen: Records, by speaker and kind.
    """

    def __init__(self, library: str) -> None:
        super().__init__(logging.WARNING)
        self._library = library
        self.num_seen: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        speaker, error = SPEAKER.get() or self._library, record.exc_info and record.exc_info[1]
        # Of a message with an error the kind is what was logged, whatever the error says.
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
    """Have all records of some loggers, and of those below them, said in single lines.

    Args:
        *loggers: Their names; one that is tamed already stays so.
    """
    for name in loggers:
        logger = logging.getLogger(name)
        if not any(isinstance(one, LibraryLines) for one in logger.handlers):
            logger.addHandler(LibraryLines(name))
        logger.propagate = False


def _reason(error: BaseException) -> str:
    """What was wrong; of a text that could not be read, the text."""
    errors = getattr(error, "errors", None)
    if callable(errors):  # pydantic's
        first = errors(include_url=False)[0]  # pyright: ignore[reportIndexIssue, reportUnknownVariableType]
        return f"got {str(first['input'])[:_SHOWN]!r}"  # pyright: ignore[reportUnknownArgumentType]
    return f"{type(error).__name__}: {str(error)[:_SHOWN]}"
