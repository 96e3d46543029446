"""`ledger.jsonl`: what each step of a stage read, made and trained on, a line of JSON for each.

    {"step": 3, "read": {"prompts": 32}, "sha256": {"prompts": "..."},
     "made": {"actor.generate": 128}, "trained": {"actor.train": 128}, "times": 1, "unseen": []}

A run that goes on takes the lines from its first step on away, as of `metrics.jsonl`, and writes
them again; it still compares what it reads with what they said.
"""

from __future__ import annotations

import json
from pathlib import Path

from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph
from ...dataflow.regular_files import opened_to_append
from ...dataflow.runtime.recovery.ledger import Ledger, Line, as_json, from_json
from .atomic import append, write_text
from .run_files import read_lines

LEDGER = "ledger.jsonl"
"""The file, in the folder of each stage."""


def read_ledger(path: Path) -> list[Line]:
    """Every complete line, in order; none if there is no file.

    Raises:
        ConfigError: If a line is not one that a ledger has written.
    """
    return [_line(path, number, line) for number, line in enumerate(read_lines(path))]


def _line(path: Path, number: int, line: str) -> Line:
    try:
        return from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(
            f"{path}:{number + 1}: expected a line of a ledger, got {line[:80]!r}; remove the line "
            "or the file"
        ) from None


def opened_ledger(graph: Graph, path: Path, first_step: int) -> Ledger:
    """The ledger of a stage whose first step comes next, or comes again.

    Args:
        graph: The stage's step.
        path: Its file.
        first_step: Steps that were complete where it goes on.

    Raises:
        ConfigError: As `read_ledger`.
    """
    known = read_ledger(path)
    _rewind(path, first_step)
    last = [first_step - 1]

    def write(line: Line) -> None:
        if line.step <= last[0]:  # computed again, and so will be what follows it
            _rewind(path, line.step)
        with opened_to_append(path) as file:
            append(path, file.fileno(), _text(line))
        last[0] = line.step

    return Ledger(graph, write, known)


def _rewind(path: Path, step: int) -> None:
    kept = [_text(line) for line in read_ledger(path) if line.step < step]
    write_text(path, b"".join(kept).decode())


def _text(line: Line) -> bytes:
    return f"{json.dumps(as_json(line))}\n".encode()
