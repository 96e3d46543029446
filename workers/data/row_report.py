"""Report on the rows of the input: kept, or left out for a reason, with file and line.

A run never dies for one bad row and never trains on one silently: whoever reads data adds to a
`DataReport`, the launcher prints it, and `check` stops the run before it starts when too much of
the data is bad.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ...dataflow.errors import ConfigError


class BadRow(Exception):
    """A row that is left out: the kind of fault, and what exactly is wrong with this one.

    The kind has the same words for every row that has it: "malformed JSON".
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)


class DataReport:
    """Counts rows kept and rows left out, and remembers the first examples."""

    def __init__(self, source: str, num_examples: int = 5) -> None:
        self.source = source
        self.num_kept = 0
        self.reasons: Counter[str] = Counter()  # -> number of rows left out for it
        self.examples: list[str] = []  # the first bad rows: file and line, reason and detail
        self.notes: Counter[str] = Counter()  # on rows that are kept -> how many it is about
        self._num_examples = num_examples

    @property
    def num_bad(self) -> int:
        return self.reasons.total()

    @property
    def num_rows(self) -> int:
        return self.num_kept + self.num_bad

    def keep(self, count: int = 1) -> None:
        self.num_kept += count

    def reject(self, where: str, reason: str, detail: str = "") -> None:
        self.reasons[reason] += 1
        if len(self.examples) < self._num_examples:
            self.examples.append(": ".join(filter(None, (where, reason, detail))))

    def drop(self, where: str, reason: str, detail: str = "") -> None:
        self.num_kept -= 1
        self.reject(where, reason, detail)

    def joined(self, other: DataReport) -> DataReport:
        both = DataReport(f"{self.source} and {other.source}", self._num_examples)
        both.num_kept = self.num_kept + other.num_kept
        both.reasons = self.reasons + other.reasons
        both.notes = self.notes + other.notes
        both.examples = (self.examples + other.examples)[: self._num_examples]
        return both

    def check(self, max_bad_fraction: float) -> None:
        if self.num_rows == 0:
            raise ConfigError(f"{self.source} has no rows\n    give a file with at least one row")
        if self.num_kept == 0:
            named = any("missing field" in reason for reason in self.reasons)
            columns = ", or name your columns: task.prompt_field, task.answer_field"
            fix = f"fix the rows above{columns if named else ''}"
            raise ConfigError(f"{self}\n    no row is left to use; {fix}")
        if self.num_bad > max_bad_fraction * self.num_rows:
            raise ConfigError(
                f"{self}\n    that is more than max_bad_fraction={max_bad_fraction:g} of all rows; "
                "fix them, or raise max_bad_fraction to go on without them"
            )

    def with_lengths(self, lengths: Mapping[str, Sequence[int]], num_held_out: int) -> str:
        share = self.num_bad / max(self.num_rows, 1)
        held_out = f" ({num_held_out} held out)" if num_held_out else ""
        parts = [f"{self.source}: {self.num_kept} rows{held_out}, {share:.1%} left out"]
        for what, given in lengths.items():
            ordered = sorted(given)
            mean = sum(ordered) / len(ordered)
            # The smallest value that at least this share of all do not exceed.
            p50, p90 = (ordered[max(0, math.ceil(q * len(ordered)) - 1)] for q in (0.5, 0.9))
            parts.append(f"{what} tokens mean {mean:.1f}, p50 {p50}, p90 {p90}, max {ordered[-1]}")
        return "; ".join(parts)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.num_kept} of {self.num_rows} rows kept"]
        if self.num_bad:
            lines[0] += f", {self.num_bad} left out"
            lines += [f"    {count} x {reason}" for reason, count in self.reasons.most_common()]
            lines += [f"    {row}" for row in self.examples]
            if self.num_bad > len(self.examples):
                lines.append(f"    ... and {self.num_bad - len(self.examples)} more")
        return "\n".join(lines)
