"""What a run warned of, in its own words: `events.jsonl`.

One JSON object per line and warning, beside the stage's `metrics.jsonl`:

    {"step": 9, "first_step": 7, "at": "2026-11-21T03:15:01+00:00", "kind": "cut_off",
     "node": "actor.generate", "seen": "...", "means": "...", "remedy": "..."}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ...dataflow.regular_files import opened_to_append
from .atomic import append, write_text
from .run_files import read_lines

EVENTS = "events.jsonl"
"""The file, in the folder of each stage; absent as long as there is nothing to say."""


class EventLog:
    """Writes `events.jsonl`.

    Args:
        path: The file; made with the first event.
        first_step: The step that will be taken first. What the file holds of steps at or after it
            is removed: they come again.

    Raises:
        ConfigError: If the file holds a line that no such log has written.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        if path.exists():  # also without what a kill has left of a last line
            kept = [event for event in read_events(path) if event["step"] < first_step]
            write_text(path, "".join(f"{json.dumps(event)}\n" for event in kept))

    def write(self, event: Mapping[str, Any]) -> None:
        """Append an event, with the time; `step` is one of its fields."""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"step": event["step"], "at": at, **event}, allow_nan=False)
        with opened_to_append(self._path) as file:
            append(self._path, file.fileno(), f"{line}\n".encode())


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every complete line of an `events.jsonl`, in order; none if there is no file.

    Raises:
        ConfigError: If a line is not one that `EventLog` writes.
    """
    return [_event(path, number, line) for number, line in enumerate(read_lines(path))]


def _event(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        event: Any = json.loads(line)
        known = type(event["step"]) is int and isinstance(event["kind"], str)
    except (ValueError, TypeError, KeyError, RecursionError):
        known, event = False, {}
    if not known:
        raise ConfigError(
            f"{path}:{number + 1}: expected a JSON object with a 'step' and a 'kind', got "
            f"{line[:80]!r}; remove the line or the file"
        )
    return cast(dict[str, Any], event)


def stage_events(run: Path) -> list[dict[str, Any]]:
    """What a run warned of, with the `stage` of each event: "" for the main one, which is last.

    Args:
        run: Its folder.

    Raises:
        ConfigError: As `read_events`.
    """
    before = sorted((run / "stages").glob(f"*/{EVENTS}"), key=lambda file: file.parent.name)
    found = [{"stage": f.parent.name, **event} for f in before for event in read_events(f)]
    return found + [{"stage": "", **event} for event in read_events(run / EVENTS)]


def count_kinds(run: Path) -> dict[str, int]:
    """Kind -> how often a run warned of it, in all of its stages.

    Raises:
        ConfigError: As `read_events`.
    """
    return dict(Counter(event["kind"] for event in stage_events(run)))
