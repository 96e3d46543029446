"""How rows of given lengths run in one step: to their end, or by a segment in each of several.

With segments every step begins equally many rows and goes on with what is unfinished. Once as many
rows end in a step as begin in one, a step has, of the rows that began a steps ago, those that are
longer than a segments; all of them start from what they have and grow together, until they end or
the segment does. Everything here is of that steady state, per row that a step begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .workload import Lengths


@dataclass(frozen=True)
class Stretch:
    """Decode steps of a generation in which the same rows run."""

    begin: int  # tokens that each row has grown by before, in this step
    end: int  # the same after
    rows: float  # rows that run, per row that a step begins
    before: float  # mean tokens that they have from earlier steps


@dataclass(frozen=True)
class Begun:
    """What steps before have left unfinished, of one age."""

    tokens: int  # tokens of each row
    rows: float  # rows, per row that a step begins


def stretches(response: Lengths, segment_tokens: int | None = None) -> tuple[Stretch, ...]:
    """The decode steps of one generation in order, the first token included."""
    segment = min(segment_tokens or response.longest, response.longest)
    ends = {(tokens - 1) % segment + 1 for tokens in response.tokens} | {segment}
    found: list[Stretch] = []
    begin = 0
    for end in sorted(ends):
        running = [(age, _longer(response, age + begin)) for age in _ages(response, segment)]
        rows = sum(share for _, share in running)
        before = sum(age * share for age, share in running) / rows
        found.append(Stretch(begin, end, rows, before))
        begin = end
    return tuple(found)


def begun_before(response: Lengths, segment_tokens: int | None = None) -> tuple[Begun, ...]:
    segment = segment_tokens or response.longest
    ages = [age for age in _ages(response, segment) if age]
    return tuple(Begun(age, _longer(response, age)) for age in ages)


def _ages(response: Lengths, segment: int) -> Iterator[int]:
    return iter(range(0, response.longest, segment))


def _longer(response: Lengths, tokens: int) -> float:
    left = 1.0
    for length, share in zip(response.tokens, response.shares, strict=True):
        if length > tokens:
            return left
        left -= share
    return 0.0
