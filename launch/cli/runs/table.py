"""Tables on a terminal, of texts that somebody else may have written."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...run_dir.stop import visible

_MOST_CHARACTERS = 64
"""Of a value: an example's response may be as long as a page; a SHA-256 is shown whole."""


def print_table(rows: Sequence[Sequence[str]], *, whole: bool = False) -> None:
    """Print rows of as many cells each, as wide as the widest of a column.

    Args:
        rows: At least one. Control characters only show.
        whole: Whether long texts are shown to their end.
    """
    most = sys.maxsize if whole else _MOST_CHARACTERS
    cells = [[_cell(text, most) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(text: str, most: int) -> str:
    shown = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
