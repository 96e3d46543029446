"""Attention as rectangles of token indices: sequences of similar length side by side.

The rectangles of a pack are few, and little of them is padding; sizes are rounded, so that the same
ones return (see `packing.py`). On a GPU what costs most is their number: a rectangle for each row
made a step of 2,048 rows of nine tokens three times as slow as it is on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...training.transfers import sent


@dataclass(frozen=True)
class Sequences:
    """Runs of packed tokens one after another; together they are all of them.

    Attributes:
        start: i64[S]; where each begins.
        length: i64[S]; some may be empty.
        num_prompts: How many of the first are prompts that rows share; 0 if none are shared.
        prompt_start: i64[rows]; where the prompt of each row begins.
        prompt: i64[rows]; its length, 0 throughout if none are shared: a row then is one sequence.
        total: N. The last token is a spare one; padding points at it.
        width_unit: See `pack_rows`.
    """

    start: Tensor
    length: Tensor
    num_prompts: int
    prompt_start: Tensor
    prompt: Tensor
    total: int
    width_unit: int

    @property
    def before(self) -> tuple[Tensor, Tensor]:
        """i64[S] each: where the tokens begin that precede a sequence elsewhere, and how many."""
        start, count = torch.zeros_like(self.start), torch.zeros_like(self.length)
        rows = slice(self.num_prompts, self.num_prompts + len(self.prompt))
        start[rows], count[rows] = self.prompt_start, self.prompt
        return start, count

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the shared prompts, which are the first ones."""
        return int(self.length[: self.num_prompts].sum())


def shared_prompts(tokens: Tensor, prompt: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Which prompts are worth packing once: equal ones of consecutive rows.

    Args:
        tokens: i64[rows, T].
        prompt: i64[rows]; lengths of prompts.
        length: i64[rows]; what is computed of each row.

    Returns:
        i64[rows] each: the lengths, 0 throughout unless a fifth of the tokens is saved; and the
        number of the prompt.
    """
    width = int(prompt.max())
    inside = torch.arange(width) < prompt[:, None]
    text = tokens[:, :width].where(inside, -1)
    new = (text[1:] != text[:-1]).any(1) | (prompt[1:] != prompt[:-1])
    owner = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    first = torch.cat([torch.ones(1, dtype=torch.bool), new])
    saved = int(prompt.sum() - prompt[first].sum())
    if saved * 5 < int(length.sum()):
        return torch.zeros_like(prompt), torch.zeros_like(owner)
    return prompt, owner


_FEW = 8
_FEW_PAIRS = 1 << 13
"""Pairs of a query and a key that cost about as much as a rectangle more."""


@dataclass(frozen=True)
class Block:
    """Attention of some sequences over some keys, as rectangles of token indices.

    Attributes:
        query: i64[B, Q]; packed index of every query.
        key: i64[B, K]; packed index of every key. The same object as `query` if causal.
        mask: bool[B, 1, Q, K], True where a query may look; None for causal self-attention.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None

    @property
    def causal(self) -> bool:
        """True for plain self-attention, where the mask is the lower triangle."""
        return self.mask is None

    def on(self, device: torch.device) -> Block:
        """The same on a device."""
        query = sent(self.query, device)
        key = query if self.causal else sent(self.key, device)
        return Block(query, key, None if self.mask is None else sent(self.mask, device))

    def hidden(self, rows: slice, queries: slice, width: int) -> Tensor:
        """Which of the first `width` keys some queries of some rows may not look at.

        Returns:
            bool[rows or 1, 1, 1, queries, width].
        """
        if self.mask is not None:
            return ~self.mask[rows, :, None, queries, :width]
        shape = (queries.stop - queries.start, width)
        every = torch.ones(shape, dtype=torch.bool, device=self.query.device)
        return every.triu(queries.start + 1)[None, None, None]


@dataclass(frozen=True)
class HeadRows:
    """Where the heads of packed tokens stand once they are gathered for attention.

    Rows of queries are numbered `token * H + head`, those of keys `token * K + head`. After the
    gather those of a block's rows come one after another, of each all its heads.

    Attributes:
        blocks: Of each block, the rows of its queries, i64[B, K, H / K, Q], and keys, i64[B, K, T].
        slot: i64[N * H]; where each query's row stands in all blocks' queries.
        once: i64[N * K]; where each key's row stands first in all blocks' keys.
        again: i64[n]; the keys that stand there several times, as those of shared prompts do.
        others: i64[n, most - 1]; where else they stand.
    """

    blocks: tuple[tuple[Tensor, Tensor], ...]
    slot: Tensor
    once: Tensor
    again: Tensor
    others: Tensor

    def on(self, device: torch.device) -> HeadRows:
        """The same on a device."""
        blocks = tuple((sent(query, device), sent(key, device)) for query, key in self.blocks)
        rest = (self.slot, self.once, self.again, self.others)
        return HeadRows(blocks, *(sent(part, device) for part in rest))

    def added_up(self, parts: Sequence[Tensor]) -> Tensor:
        """What was found for each place of a key, by key: [all blocks' rows, E] to [N * K, E]."""
        spare = parts[0].new_zeros(1, parts[0].shape[1])  # where `once` and `others` say "nowhere"
        found = torch.cat([*parts, spare])
        total = found.index_select(0, self.once)
        if len(self.again):
            more = found.index_select(0, self.others.reshape(-1))
            total[self.again] += more.view(*self.others.shape, -1).sum(1)
        return total


def rectangles(sequences: Sequences) -> tuple[Block, ...]:
    """Rectangles whose queries cover every packed token, on the CPU."""
    s, dummy = sequences, sequences.total - 1
    start, lengths, prompts = s.start, s.length, s.num_prompts
    unit = s.width_unit

    if not prompts:
        return tuple(
            _causal(start[rows], lengths[rows], dummy, unit) for rows in _by_length(lengths, unit)
        )
    # The spare tokens are a sequence of their own, attended to like one more prompt.
    alone = torch.cat([torch.arange(prompts), torch.tensor([len(lengths) - 1])])
    blocks = [
        _causal(start[alone[rows]], lengths[alone[rows]], dummy, 0)
        for rows in _by_length(lengths[alone], 0)
    ]
    own_start, own_length = start[prompts:-1], lengths[prompts:-1]
    blocks += [
        _after_prompt(
            _span(own_start[rows], own_length[rows], dummy),
            _span(s.prompt_start[rows], s.prompt[rows], dummy),
            s.prompt[rows],
        )
        for rows in _by_length(own_length, 0)
    ]
    return tuple(blocks)


def _by_length(lengths: Tensor, unit: int) -> list[Tensor]:
    """Row indices of the non-empty sequences, in groups of similar length.

    Sizes grow by about a third from one to the next, so that at most a quarter of a rectangle's
    side is padding unless the group is small; see `joins_next`.
    """
    order = torch.argsort(lengths, stable=True)
    ordered = lengths[order]
    size = -(-ordered // unit) if unit else _rounded(ordered)
    groups: list[Tensor] = []
    begin = int((ordered == 0).sum())
    ends = (torch.nonzero(size[1:] != size[:-1])[:, 0] + 1).tolist() + [len(order)]
    for end, after in zip(ends, [*ends[1:], 0], strict=True):
        if end <= begin:
            continue
        joins = after and not unit
        if not joins or not joins_next(end - begin, int(ordered[end - 1]), int(ordered[after - 1])):
            groups.append(order[begin:end])
            begin = end
    return groups


def joins_next(count: int, longest: int, wider: int) -> bool:
    """Whether sequences of one size join those of the next larger one in their rectangle.

    They do if they are few and it pads them little: fewer than 8, and by 8,192 pairs of tokens.

    Args:
        count: How many.
        longest: Tokens of the longest of them.
        wider: Tokens of the longest of the next larger size.
    """
    return count < _FEW and count * (wider**2 - longest**2) < _FEW_PAIRS


def padded_width(width: int, unit: int = 0) -> int:
    """What the side of a rectangle is rounded up to: a multiple of `unit`, else of 16."""
    unit = unit or (16 if width > 16 else 8 if width > 8 else 1)
    return -(-width // unit) * unit


def _rounded(lengths: Tensor) -> Tensor:
    """Lengths rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: powers of two and midpoints."""
    power = torch.exp2(torch.ceil(torch.log2(lengths.clamp(min=1).double()))).long()
    middle = power * 3 // 4
    return torch.where((lengths <= middle) & (power > 2), middle, power)


def _span(start: Tensor, length: Tensor, dummy: int, unit: int = 0) -> Tensor:
    """i64[rows, width]: start, start + 1, ... and `dummy` beyond each length."""
    longest = int(length.max())
    column = torch.arange(padded_width(longest, unit))
    return (start[:, None] + column).where(column < length[:, None], torch.tensor(dummy))


def _causal(start: Tensor, length: Tensor, dummy: int, unit: int) -> Block:
    index = _span(start, length, dummy, unit)
    return Block(index, index, None)


def _after_prompt(query: Tensor, before: Tensor, prompt: Tensor) -> Block:
    in_prompt = torch.arange(before.shape[1]) < prompt[:, None]
    width = query.shape[1]
    lower = torch.ones(width, width, dtype=torch.bool).tril()
    mask = torch.cat(
        [
            in_prompt[:, None, :].expand(-1, width, -1),
            lower.expand(len(query), -1, -1),
        ],
        dim=2,
    )
    return Block(query, torch.cat([before, query], dim=1), mask[:, None])


def find_head_rows(blocks: Sequence[Block], num_tokens: int, heads: int, keys: int) -> HeadRows:
    """Where the rows of `heads` query heads and `keys` key heads of packed tokens are.

    Args:
        blocks: On the CPU; together they cover the tokens.
        num_tokens: N.
        heads: H.
        keys: K.
    """
    head = torch.arange(heads).view(keys, -1, 1)
    key_head = torch.arange(keys)[:, None]
    rows = tuple(
        (block.query[:, None, None] * heads + head, block.key[:, None] * keys + key_head)
        for block in blocks
    )
    queries = torch.cat([query.reshape(-1) for query, _ in rows])
    slot = torch.empty(num_tokens * heads, dtype=torch.int64)
    slot[queries] = torch.arange(len(queries))
    found = torch.cat([key.reshape(-1) for _, key in rows])
    return HeadRows(rows, slot, *_uses(found, num_tokens, keys))


def _uses(rows: Tensor, num_tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `HeadRows.once`, `again` and `others`; `rows` are those of all blocks' keys.

    Padded places point at the last token, of which nothing is ever wanted.
    """
    nowhere = len(rows)
    order = torch.cat([torch.argsort(rows, stable=True), rows.new_tensor([nowhere])])
    count = torch.bincount(rows, minlength=num_tokens * keys)
    start = count.cumsum(0) - count
    count[-keys:] = 0
    once = order[start.where(count > 0, nowhere)]
    again = torch.nonzero(count > 1)[:, 0]
    more = torch.arange(1, int(count.max()))
    place = start[again, None] + more
    return once, again, order[place.where(more < count[again, None], nowhere)]
