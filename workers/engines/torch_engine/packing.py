"""Packing: sequences end to end without padding.

Everything but attention works on one flat run of tokens, so no padded position is ever
multiplied. Attention finds its neighbors in one of two ways: rectangles of indices, sequences of
similar length side by side, or where each sequence begins (`varlen.py`). Rows that begin with the
same prompt may share it: it is packed once, and the keys of each row are its prompt's followed by
its own.

The rectangles of a pack are few, and little of them is padding. On a GPU what costs most is their
number: a rectangle for each row made a step of 2,048 rows of nine tokens three times as slow as it
is on two CPU cores.

At least one spare token follows the real ones. Spare tokens form a sequence of their own that
nothing reads; padded slots point at the last of them.

Numbers of tokens and sizes of rectangles are rounded up, so that the same ones return: on a CPU
oneDNN compiles a kernel for every size of a matrix product and keeps it. Without rounding that was
50 MB more with every step of a model with 30 layers.

A pack is made on the host, of what the host knows, and sent to the device of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, zip_longest

import torch
from torch import Tensor

from ....planner.cost.engine_model import least_shared
from ...training.host_memory import on_host, sent
from ...training.microbatch import repeats
from .varlen import Places, Sequences, find_places


def shared_prompts(
    tokens: Tensor, prompt: Tensor, length: Tensor, least: float
) -> tuple[Tensor, Tensor]:
    """Prompts that are worth packing once: equal ones of consecutive rows.

    Shapes: `tokens` i64[rows, T]; `prompt` i64[rows], lengths; `length` i64[rows], of what is
    computed of each row. Returns i64[rows] each: the lengths, 0 throughout unless the share `least`
    of the tokens is saved; and the number of the prompt.
    """
    again = repeats(tokens, prompt)
    if int(prompt[again].sum()) < least * int(length.sum()):
        return torch.zeros_like(prompt), torch.zeros_like(prompt)
    return prompt, (~again).cumsum(0) - 1


ALIGN = 16
"""Decoded rows and positions of their caches come in multiples of it; see `decode`."""

_FEW = 8
_FEW_PAIRS = 1 << 13
"""Pairs of a query and a key that cost about as much as a rectangle more."""


@dataclass(frozen=True)
class Block:
    """Attention of some sequences over some keys, as rectangles of token indices."""

    query: Tensor  # i64[B, Q]; packed index of every query
    key: Tensor  # i64[B, K]; packed index of every key. The same object as `query` if causal.
    # bool[B, 1, Q, K], True where a query may look; None for causal self-attention
    mask: Tensor | None

    def on(self, device: torch.device) -> Block:
        query = sent(self.query, device)
        if self.mask is None:
            return Block(query, query, None)
        return Block(query, sent(self.key, device), sent(self.mask, device))

    def hidden(self, rows: slice, queries: slice, width: int) -> Tensor:
        """The first `width` keys that queries may not look at, bool[b or 1, 1, 1, Q, width]."""
        if self.mask is not None:
            return ~self.mask[rows, :, None, queries, :width]
        shape = (queries.stop - queries.start, width)
        every = torch.ones(shape, dtype=torch.bool, device=self.query.device)
        return every.triu(queries.start + 1)[None, None, None]


@dataclass(frozen=True)
class HeadRows:
    """Places of the heads of packed tokens once they are gathered for attention.

    Rows of queries are numbered `token * H + head`, those of keys `token * K + head`. After the
    gather those of a block's rows come one after another, of each all its heads.
    """

    # Of each block, the rows of its queries, i64[B, K, H / K, Q], and keys, i64[B, K, T]
    blocks: tuple[tuple[Tensor, Tensor], ...]
    slot: Tensor  # i64[N * H]; where each query's row stands in all blocks' queries
    once: Tensor  # i64[N * K]; where each key's row stands first in all blocks' keys
    again: Tensor  # i64[n]; the keys that stand there several times, as those of shared prompts do
    others: Tensor  # i64[n, most - 1]; where else they stand

    def on(self, device: torch.device) -> HeadRows:
        blocks = tuple((sent(query, device), sent(key, device)) for query, key in self.blocks)
        rest = (self.slot, self.once, self.again, self.others)
        return HeadRows(blocks, *(sent(part, device) for part in rest))

    def added_up(self, parts: Sequence[Tensor]) -> Tensor:
        """Add up the parts at each place of a key: [all blocks' rows, E] to [N * K, E], by key."""
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
    unit, alone = s.width_unit, torch.arange(len(lengths))
    if prompts:  # the spare tokens are attended to like one more prompt
        unit, alone = 0, torch.cat([alone[:prompts], alone[-1:]])
    blocks: list[Block] = []
    for rows in by_length(lengths[alone].tolist(), unit):
        index = _span(start[alone[rows]], lengths[alone[rows]], dummy, unit)
        blocks.append(Block(index, index, None))
    if not prompts:
        return tuple(blocks)
    own_start, own_length = start[prompts:-1], lengths[prompts:-1]
    for rows in by_length(own_length.tolist(), 0):
        query = _span(own_start[rows], own_length[rows], dummy)
        before = _span(s.prompt_start[rows], s.prompt[rows], dummy)
        in_prompt = torch.arange(before.shape[1]) < s.prompt[rows][:, None]
        num_rows, width = query.shape
        lower = torch.ones(width, width, dtype=torch.bool).tril().expand(num_rows, -1, -1)
        mask = torch.cat([in_prompt[:, None, :].expand(-1, width, -1), lower], dim=2)
        blocks.append(Block(query, torch.cat([before, query], dim=1), mask[:, None]))
    return tuple(blocks)


def by_length(lengths: Sequence[int], unit: int) -> list[list[int]]:
    """Indices of the non-empty sequences, in groups of similar length, ascending by length.

    Sizes grow by about a third from one to the next, so that at most a quarter of a rectangle's
    side is padding unless the group is small.
    """
    order = sorted((at for at, length in enumerate(lengths) if length), key=lengths.__getitem__)
    sizes = [[*some] for _, some in groupby(order, key=lambda at: _rounded(lengths[at], unit))]
    groups: list[list[int]] = []
    group: list[int] = []
    for some, wider in zip_longest(sizes, sizes[1:]):
        group += some
        if wider and not unit and len(group) < _FEW:
            padding = len(group) * (lengths[wider[-1]] ** 2 - lengths[group[-1]] ** 2)
            if padding < _FEW_PAIRS:  # they join the next larger ones in their rectangle
                continue
        groups.append(group)
        group = []
    return groups


def padded_width(width: int, unit: int = 0) -> int:
    """Round up the side of a rectangle to a multiple of `unit`, else of 16."""
    return round_up(width, unit or (16 if width > 16 else 8 if width > 8 else 1))


def round_up(number: int, unit: int = ALIGN) -> int:
    """The next multiple of a unit."""
    return -(-number // unit) * unit


def _rounded(length: int, unit: int) -> int:
    """Up to a multiple of `unit`; without one to 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if unit:
        return round_up(length, unit)
    power = 1 << (length - 1).bit_length()
    middle = power * 3 // 4
    return middle if length <= middle and power > 2 else power


def _span(start: Tensor, length: Tensor, dummy: int, unit: int = 0) -> Tensor:
    """i64[rows, width]: start, start + 1, ... and `dummy` beyond each length."""
    longest = int(length.max())
    column = torch.arange(padded_width(longest, unit))
    return (start[:, None] + column).where(column < length[:, None], torch.tensor(dummy))


def find_head_rows(blocks: Sequence[Block], num_tokens: int, heads: int, keys: int) -> HeadRows:
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
    """See `HeadRows.once`, `again` and `others`; `rows` are those of all blocks' keys."""
    nowhere = len(rows)
    order = torch.cat([torch.argsort(rows, stable=True), rows.new_tensor([nowhere])])
    count = torch.bincount(rows, minlength=num_tokens * keys)
    start = count.cumsum(0) - count
    count[-keys:] = 0  # padded places point at the last token, of which nothing is ever wanted
    once = order[start.where(count > 0, nowhere)]
    again = torch.nonzero(count > 1)[:, 0]
    more = torch.arange(1, int(count.max()))
    place = start[again, None] + more
    return once, again, order[place.where(more < count[again, None], nowhere)]


@dataclass(frozen=True)
class Pack:
    """Packed sequences."""

    tokens: Tensor  # i64[N]
    position: Tensor  # i64[N]; each token's place in its row
    longest: int  # More than any of these places
    # i64[U]; packed indices whose hidden states are wanted, each once, ascending, then spare ones
    # up to what `padded_tokens` says
    read: Tensor
    entry: Tensor  # i64[n]; for each True of the `reads` given (row by row), an index into `read`
    sequences: Sequences  # What is packed, on the host
    keys: Tensor | None = None  # i64[N], of dropout (`AdapterDropout`)

    @cached_property
    def _on_host(self) -> tuple[Block, ...]:
        return rectangles(self.sequences)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block.on(self.tokens.device) for block in self._on_host)

    @cached_property
    def places(self) -> Places:
        return find_places(self.sequences).on(self.tokens.device)

    def head_rows(self, heads: int, keys: int) -> HeadRows:
        if (heads, keys) not in self._head_rows:
            found = find_head_rows(self._on_host, len(self.tokens), heads, keys)
            self._head_rows[heads, keys] = found.on(self.tokens.device)
        return self._head_rows[heads, keys]

    @cached_property
    def _head_rows(self) -> dict[tuple[int, int], HeadRows]:
        return {}


def pack_rows(
    tokens: Tensor,
    reads: Tensor,
    shared: Tensor | None = None,
    *,
    width_unit: int = 0,
    keys: Tensor | None = None,
) -> Pack:
    """Pack the tokens that are needed to compute hidden states at `reads`.

    Shapes: `tokens` i64[rows, T], right padded with -1; `reads` bool[rows, T]; `shared` i64[rows],
    length of each row's prompt. Equal prompts of consecutive rows are then packed once where that
    saves enough (`least_shared`). With a `width_unit` a row's rectangle is as wide as its
    length rounded up to a multiple of it, whatever other rows there are. `keys`, as `tokens`, are
    packed with them.
    """
    device = tokens.device
    tokens, reads = on_host(tokens), on_host(reads)
    column = torch.arange(tokens.shape[1])
    length = (reads * (column + 1)).amax(1) if tokens.numel() else torch.zeros(len(tokens)).long()
    # Row r's tokens `[prompt[r], length[r])` are its own; its prompt is number `owner[r]`, laid out
    # once, for the row where `first` is True. Without sharing `prompt` is 0 everywhere.
    prompt, owner = torch.zeros_like(length), torch.zeros_like(length)
    if shared is not None and len(tokens):
        least = least_shared(on_cpu=device.type == "cpu")
        own = torch.minimum(on_host(shared), length)
        prompt, owner = shared_prompts(tokens, own, length, least)
    first = torch.zeros(len(tokens), dtype=torch.bool)
    if bool(prompt.any()):
        first[0] = True
        first[1:] = owner[1:] != owner[:-1]

    # Laid out are prompts, own parts, and spare tokens; all of this on the CPU.
    lengths = torch.cat([prompt[first], length - prompt])
    used, num_prompts = int(lengths.sum()), int(first.sum())
    total = padded_tokens(used + 1)
    lengths = torch.cat([lengths, torch.tensor([total - used])])
    start = lengths.cumsum(0) - lengths
    in_prompt = (column < prompt[:, None]) & first[:, None]
    in_own = (column >= prompt[:, None]) & (column < length[:, None])
    spare = torch.zeros(total - used, dtype=torch.int64)

    def packed(table: Tensor) -> Tensor:
        return torch.cat([table[in_prompt], table[in_own], spare])

    flat, position = packed(tokens), packed(column.expand(tokens.shape))
    packed_keys = None if keys is None else sent(packed(on_host(keys)), device)

    own_start = start[num_prompts:-1]
    prompt_start = start[owner] if num_prompts else own_start
    index = torch.where(
        column < prompt[:, None],
        prompt_start[:, None] + column,
        own_start[:, None] + column - prompt[:, None],
    )
    read, entry = torch.unique(index[reads], return_inverse=True)
    fill = torch.full((padded_tokens(len(read)) - len(read),), total - 1, dtype=torch.int64)
    read = torch.cat([read, fill])
    sequences = Sequences(start, lengths, num_prompts, prompt_start, prompt, total, width_unit)
    flat, position, read, entry = (sent(x, device) for x in (flat, position, read, entry))
    longest = int(length.max()) if len(length) else 0
    return Pack(flat, position, max(longest, 1), read, entry, sequences, packed_keys)


def padded_tokens(count: int) -> int:
    """Round up to 16 (see `decode`), and to a sixteenth of the next lower power of 2, up to 64."""
    return round_up(count, 16 if count <= 256 else 32 if count <= 512 else 64)
