"""What each part of a step takes whose rows go on in parts, as `Schedule.streaming` has them.

Rows are independent, so the longest of a part's m rows is at most L with the m-th power of the
share of rows that are. Of n parts the i-th shortest is taken to have the length of which (i + 1/2)
/ n of all parts are no longer. Its other rows are as rows of at most that length are.

All parts are sampled together, and a part has been sampled when its longest row has. Until then the
same rows run as if nothing were ever longer, so that is how long it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from ..cost.time_parts import CallTime
from ..inputs.calls import Call
from ..inputs.workload import Lengths


def part_lengths(response: Lengths, num_rows: int, num_parts: int) -> tuple[Lengths, ...]:
    """Lengths of the rows of each part, the part with the shortest longest row first.

    Args:
        response: Lengths of all rows.
        num_rows: Rows of a part.
        num_parts: Parts.

    Example:
        >>> [found.longest for found in part_lengths(Lengths(tokens=(1, 2, 3, 4)), 1, 4)]
        [1, 2, 3, 4]
    """
    below: list[float] = []
    for share in response.shares:
        below.append(share + (below[-1] if below else 0.0))
    found: list[Lengths] = []
    for part in range(num_parts):
        least = ((part + 0.5) / num_parts) ** (1.0 / num_rows)
        last = next((i for i, share in enumerate(below) if share >= least), len(below) - 1)
        weights = [(num_rows - 1) * share / below[last] for share in response.shares[: last + 1]]
        weights[last] += 1.0
        kept = [(t, w) for t, w in zip(response.tokens, weights, strict=False) if w]
        found.append(Lengths(tokens=tuple(t for t, _ in kept), weights=tuple(w for _, w in kept)))
    return tuple(found)


def part_times(
    call: Call, duration_s: float, time: Callable[[Call], CallTime], num_parts: int
) -> tuple[float, ...]:
    """Seconds of each part of a call.

    Of a generation that is how long after the part before one is there. A train call sums gradients
    over ranks and takes the optimizer's step with its last part.

    Args:
        call: Of a step with at least as many prompts as parts, whose rows end in it.
        duration_s: What it takes with all rows at once.
        time: What a call takes in the layout that the plan has for it.
        num_parts: Parts.
    """
    num_rows = max(1, round(call.num_sequences / num_parts))
    lengths = part_lengths(call.response, num_rows, num_parts)
    if call.kind == "generate":
        return _answers(call, duration_s, time, lengths)
    parts = [_each(time(replace(call, num_sequences=num_rows, response=own))) for own in lengths]
    # What is done once, moving and loading weights too, comes with the last.
    parts[-1] += max(0.0, duration_s - _each(time(call)))
    return tuple(parts)


def _each(time: CallTime) -> float:
    """What of a call is done for every part."""
    return time.total_s - time.grad_sync_s - time.optimizer_s


def _answers(
    call: Call, duration_s: float, time: Callable[[Call], CallTime], lengths: Sequence[Lengths]
) -> tuple[float, ...]:
    """How long after the one before each part has been sampled; all together take the duration."""
    begun: list[float] = [0.0]
    for own in lengths:
        shorter = [(t, s) for t, s in zip(call.response.tokens, call.response.shares, strict=True)
                   if t < own.longest]  # fmt: skip
        left = 1.0 - sum(share for _, share in shorter)
        cut = Lengths(
            tokens=(*(t for t, _ in shorter), own.longest),
            weights=(*(share for _, share in shorter), left),
        )
        begun.append(max(begun[-1], time(replace(call, response=cut)).total_s))
    return tuple((after - before) * duration_s / begun[-1] for before, after in pairwise(begun))
