"""Micro-batches as they will come up, from a call's sizes alone: what `packing.py` makes of them.

Rows are sampled as long as the call says they are, dealt out to micro-batches and laid out without
padding. Prompts shared by neighboring rows are packed once where that saves a fifth of the tokens.

Shapes: N packed tokens, U positions that are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from ....planner.inputs.calls import Call
from ....planner.inputs.workload import Lengths
from .packing import padded_tokens
from .rectangles import joins_next, padded_width

ALIGN = 16
"""Decoded rows and cache positions come in multiples of it."""

_SIMULATED = 256  # rows sampled to see how micro-batches differ

_Rectangle = tuple[int, int, int]
"""Rows, queries and keys."""


def expected_packs(call: Call, num_rows: int, max_tokens: int) -> set[PackSizes]:
    """The micro-batches of an evaluation or a training.

    Args:
        call: What runs.
        num_rows: Of one rank.
        max_tokens: `micro_batch_tokens`.
    """
    return {_packed(part) for part in _micro_batches(call, num_rows, max_tokens)}


def prompt_pack(lengths: Sequence[int]) -> PackSizes:
    """Prompts of these lengths as a generation packs them."""
    tokens = padded_tokens(sum(lengths) + 1)
    rectangles = _rectangles([*lengths, tokens - sum(lengths)], ALIGN)
    return _pack(tokens, len(lengths), rectangles, [])


class _Row(NamedTuple):
    owner: int
    """Which prompt it answers."""
    prompt: int
    """Tokens."""
    response: int
    """Tokens."""


class PackSizes(NamedTuple):
    """A micro-batch as the engine lays it out."""

    tokens: int
    """N."""
    reads: int
    """U, rounded up."""
    queries: int
    """Query slots of all rectangles."""
    keys: int
    """Key slots of all rectangles."""
    masked: int
    """Query-key pairs of rectangles that need an explicit mask."""
    largest: tuple[int, int, int]
    """Rows, queries and keys of the largest rectangle."""


def _micro_batches(call: Call, num_rows: int, max_tokens: int) -> list[list[_Row]]:
    """Micro-batches as they come up over many minibatches, of lengths spread as the call says."""
    kept = call.passes / call.updates if call.kind == "train" else 1.0
    group = call.samples_per_prompt
    most = max(1, math.ceil(num_rows * kept))
    enough = max(_SIMULATED, 4 * min(most, int(max_tokens / call.tokens_mean)))
    if len(call.prompt.tokens) == len(call.response.tokens) == group == 1:
        enough = min(most, max(1, max_tokens // call.tokens_longest))  # all are alike
        kept = 1.0
    count = math.ceil(enough / kept)
    random = Random(0)
    prompts = spread(call.prompt, -(-count // group), random)
    rows = [
        _Row(at // group, prompts[at // group], response)
        for at, response in enumerate(spread(call.response, count, random))
    ]
    # A minibatch is a random choice of rows, in their order.
    chosen = sorted(random.sample(range(count), enough)) if kept < 1 else range(count)
    made: list[list[_Row]] = []
    taken = max_tokens
    for row in (rows[at] for at in chosen):
        size = row.prompt + row.response
        if not made or taken + size > max_tokens or len(made[-1]) == most:
            made.append([])
            taken = 0
        made[-1].append(row)
        taken += size
    return made


def spread(lengths: Lengths, count: int, random: Random) -> list[int]:
    """As many lengths, each bin as often as its share says, in random order."""
    if len(lengths.tokens) == 1:
        return [lengths.tokens[0]] * count
    made: list[int] = []
    upto = 0.0
    for tokens, share in zip(lengths.tokens, lengths.shares, strict=True):
        upto += share
        made += [tokens] * (round(upto * count) - len(made))
    random.shuffle(made)
    return made


def _packed(rows: Sequence[_Row]) -> PackSizes:
    """Lay rows out: whole, or prompts once and then what each row has of its own.

    The last token of a row is never computed: nothing is read after it.
    """
    lengths = [row.prompt + row.response - 1 for row in rows]
    prompts = list({row.owner: row.prompt for row in rows}.values())
    saved = sum(row.prompt for row in rows) - sum(prompts)
    if saved * 5 < sum(lengths):
        tokens = padded_tokens(sum(lengths) + 1)
        rectangles = _rectangles([*lengths, tokens - sum(lengths)], 0)
        return _pack(tokens, sum(row.response for row in rows), rectangles, [])
    used = sum(lengths) - saved
    tokens = padded_tokens(used + 1)
    own = [row.response - 1 for row in rows]
    longest = padded_width(max(prompts))
    after = [(n, width, longest + width) for n, width, _ in _rectangles(own, 0)]
    causal = _rectangles([*prompts, tokens - used], 0)
    return _pack(tokens, len(prompts) + sum(own), causal, after)


def _rectangles(lengths: Iterable[int], unit: int) -> list[_Rectangle]:
    """The rectangles that sequences of these lengths attend to themselves in."""
    ordered = sorted(length for length in lengths if length)
    ends = [
        end
        for end in range(1, len(ordered) + 1)
        if end == len(ordered) or _rounded(ordered[end], unit) != _rounded(ordered[end - 1], unit)
    ]
    made: list[_Rectangle] = []
    begin = 0
    for end, after in zip(ends, [*ends[1:], 0], strict=True):
        longest = ordered[end - 1]
        if after and not unit and joins_next(end - begin, longest, ordered[after - 1]):
            continue
        widest = padded_width(longest, unit)
        made.append((end - begin, widest, widest))
        begin = end
    return made


def _rounded(length: int, unit: int) -> int:
    """Up to a multiple of `unit`; without one to 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if unit:
        return -(-length // unit) * unit
    power = 1 << max(length - 1, 0).bit_length()
    middle = power * 3 // 4
    return middle if length <= middle and power > 2 else power


def _pack(
    tokens: int, reads: int, causal: Sequence[_Rectangle], masked: Sequence[_Rectangle]
) -> PackSizes:
    every = [*causal, *masked]
    return PackSizes(
        tokens=tokens,
        reads=padded_tokens(reads),
        queries=sum(n * q for n, q, _ in every),
        keys=sum(n * k for n, _, k in every),
        masked=sum(math.prod(rectangle) for rectangle in masked),
        largest=max(every, key=math.prod),
    )


def aligned(number: int) -> int:
    """Up to a multiple of `ALIGN`."""
    return -(-number // ALIGN) * ALIGN
