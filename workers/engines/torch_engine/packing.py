"""Packing: sequences end to end without padding, and where attention finds its neighbors.

Everything but attention works on one flat run of tokens, so no padded position is ever
multiplied. Attention gathers queries and keys into small rectangles (`Block`) of similar length.
Rows that begin with the same prompt may share it: it is packed once, and the keys of each row
are its prompt's followed by its own.

At least one spare token follows the real ones. Spare tokens form a sequence of their own that
nothing reads; padded slots of the rectangles point at the last of them.

Numbers of tokens and sizes of rectangles are rounded up, so that the same ones return: on a CPU
oneDNN compiles a kernel for every size of a matrix product and keeps it. Without rounding that was
50 MB more with every step of a model with 30 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Block", "HeadRows", "Pack", "joins_next", "pack_rows", "padded_tokens", "padded_width"]

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

    def added_up(self, parts: Sequence[Tensor]) -> Tensor:
        """What was found for each place of a key, by key: [all blocks' rows, E] to [N * K, E]."""
        spare = parts[0].new_zeros(1, parts[0].shape[1])  # where `once` and `others` say "nowhere"
        found = torch.cat([*parts, spare])
        total = found.index_select(0, self.once)
        if len(self.again):
            more = found.index_select(0, self.others.reshape(-1))
            total[self.again] += more.view(*self.others.shape, -1).sum(1)
        return total


@dataclass(frozen=True)
class Pack:
    """Packed sequences.

    Attributes:
        tokens: i64[N].
        position: i64[N]; each token's place in its row.
        blocks: Their queries cover every packed token exactly once.
        slot: i64[N]; where in the concatenated queries of all blocks each token stands.
        read: i64[U]; packed indices whose hidden states are wanted, each once, ascending, then
            spare ones up to what `padded_tokens` says.
        entry: i64[n]; for each True of the `reads` given (row by row), an index into `read`.
    """

    tokens: Tensor
    position: Tensor
    blocks: tuple[Block, ...]
    slot: Tensor
    read: Tensor
    entry: Tensor

    @cached_property
    def query(self) -> Tensor:
        """Packed index of every query slot of all blocks, i64[slots]."""
        return torch.cat([block.query.reshape(-1) for block in self.blocks])

    def head_rows(self, heads: int, keys: int) -> HeadRows:
        """Where the rows of `heads` query heads and `keys` key heads are."""
        if (heads, keys) not in self._head_rows:
            self._head_rows[heads, keys] = self._find_head_rows(heads, keys)
        return self._head_rows[heads, keys]

    @cached_property
    def _head_rows(self) -> dict[tuple[int, int], HeadRows]:
        return {}

    def _find_head_rows(self, heads: int, keys: int) -> HeadRows:
        device = self.tokens.device
        head = torch.arange(heads, device=device).view(keys, -1, 1)
        key_head = torch.arange(keys, device=device)[:, None]
        blocks = tuple(
            (block.query[:, None, None] * heads + head, block.key[:, None] * keys + key_head)
            for block in self.blocks
        )
        queries = torch.cat([query.reshape(-1) for query, _ in blocks])
        slot = torch.empty(len(self.tokens) * heads, dtype=torch.int64, device=device)
        slot[queries] = torch.arange(len(queries), device=device)
        return HeadRows(
            blocks, slot, *self._uses(torch.cat([k.reshape(-1) for _, k in blocks]), keys)
        )

    def _uses(self, rows: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadRows.once`, `again` and `others`; `rows` are those of all blocks' keys.

        Padded places point at the last token, of which nothing is ever wanted.
        """
        nowhere = len(rows)
        order = torch.cat([torch.argsort(rows, stable=True), rows.new_tensor([nowhere])])
        count = torch.bincount(rows, minlength=len(self.tokens) * keys)
        start = count.cumsum(0) - count
        count[-keys:] = 0
        once = order[start.where(count > 0, nowhere)]
        again = torch.nonzero(count > 1)[:, 0]
        more = torch.arange(1, int(count.max()), device=rows.device)
        place = start[again, None] + more
        return once, again, order[place.where(more < count[again, None], nowhere)]


def pack_rows(
    tokens: Tensor, reads: Tensor, shared: Tensor | None = None, *, width_unit: int = 0
) -> Pack:
    """Pack the tokens that are needed to compute hidden states at `reads`.

    Args:
        tokens: i64[rows, T], right padded with -1.
        reads: bool[rows, T]; True where a hidden state is wanted.
        shared: i64[rows]; length of each row's prompt. Equal prompts of consecutive rows are
            then packed once where that saves at least a fifth of the tokens.
        width_unit: If given, a row's rectangle is as wide as the row's length rounded up to a
            multiple of it, whatever other rows there are.

    Returns:
        The pack, on the device of `tokens`.
    """
    device = tokens.device
    tokens, reads = tokens.cpu(), reads.cpu()
    place = torch.arange(1, tokens.shape[1] + 1)
    length = (reads * place).amax(1) if tokens.numel() else torch.zeros(len(tokens)).long()
    zero = torch.zeros_like(length)
    prompt, owner = zero, torch.zeros_like(length)
    if shared is not None and len(tokens):
        prompt, owner = _shared_prompts(tokens, torch.minimum(shared.cpu(), length), length)
    first = torch.zeros(len(tokens), dtype=torch.bool)
    if bool(prompt.any()):
        first[0] = True
        first[1:] = owner[1:] != owner[:-1]
    builder = _Builder(tokens, prompt, length, owner, first, width_unit)
    pack = builder.build(reads)
    return pack if device.type == "cpu" else _moved(pack, device)


def padded_tokens(count: int) -> int:
    """What a number of tokens is rounded up to.

    A multiple of 16 (see decode.py for what that buys), and of a sixteenth of the next lower power
    of two, up to 64.
    """
    unit = 16 if count <= 256 else 32 if count <= 512 else 64
    return -(-count // unit) * unit


def padded_width(width: int, unit: int = 0) -> int:
    """What the side of a rectangle is rounded up to: a multiple of `unit`, else of 16."""
    unit = unit or (16 if width > 16 else 8 if width > 8 else 1)
    return -(-width // unit) * unit


def _shared_prompts(tokens: Tensor, prompt: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt length per row (0 throughout if sharing saves nothing) and index of the prompt."""
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


@dataclass(frozen=True)
class _Builder:
    """Lays out [prompts | own parts | spare tokens]; all tensors on the CPU.

    Row r's tokens `[prompt[r], length[r])` are its own; its prompt is number `owner[r]`, laid out
    once for the row where `first` is True. Without sharing `prompt` is 0 everywhere.
    """

    tokens: Tensor
    prompt: Tensor
    length: Tensor
    owner: Tensor
    first: Tensor
    width_unit: int

    def build(self, reads: Tensor) -> Pack:
        own_length = self.length - self.prompt
        prompt_length = self.prompt[self.first]
        lengths = torch.cat([prompt_length, own_length])
        used = int(lengths.sum())
        total = padded_tokens(used + 1)
        lengths = torch.cat([lengths, torch.tensor([total - used])])
        start = lengths.cumsum(0) - lengths
        num_prompts = len(prompt_length)

        column = torch.arange(self.tokens.shape[1])
        in_prompt = (column < self.prompt[:, None]) & self.first[:, None]
        in_own = (column >= self.prompt[:, None]) & (column < self.length[:, None])
        spare = torch.zeros(total - used, dtype=torch.int64)
        flat = torch.cat([self.tokens[in_prompt], self.tokens[in_own], spare])
        places = column.expand(self.tokens.shape)
        position = torch.cat([places[in_prompt], places[in_own], spare])

        own_start = start[num_prompts : num_prompts + len(own_length)]
        prompt_start = start[self.owner] if num_prompts else own_start
        blocks = self._blocks(start, lengths, num_prompts, own_start, prompt_start, total - 1)
        query = torch.cat([block.query.reshape(-1) for block in blocks])
        slot = torch.empty(total, dtype=torch.int64)
        # Only the last spare token has several slots (the padded ones); any of them will do, for
        # nothing reads it and its gradient is zero.
        slot[query] = torch.arange(len(query))
        index = torch.where(
            column < self.prompt[:, None],
            prompt_start[:, None] + column,
            own_start[:, None] + column - self.prompt[:, None],
        )
        read, entry = torch.unique(index[reads], return_inverse=True)
        fill = torch.full((padded_tokens(len(read)) - len(read),), total - 1, dtype=torch.int64)
        read = torch.cat([read, fill])
        return Pack(flat, position, tuple(blocks), slot, read, entry)

    def _blocks(
        self,
        start: Tensor,
        lengths: Tensor,
        num_prompts: int,
        own_start: Tensor,
        prompt_start: Tensor,
        dummy: int,
    ) -> list[Block]:
        if not num_prompts:
            return [
                _causal(start[rows], lengths[rows], dummy, self.width_unit)
                for rows in _by_length(lengths, self.width_unit)
            ]
        # The spare tokens are a sequence of their own, attended to like one more prompt.
        alone = torch.cat([torch.arange(num_prompts), torch.tensor([len(lengths) - 1])])
        blocks = [
            _causal(start[alone[rows]], lengths[alone[rows]], dummy, 0)
            for rows in _by_length(lengths[alone], 0)
        ]
        own_length = self.length - self.prompt
        blocks += [
            _after_prompt(
                own_start[rows],
                own_length[rows],
                prompt_start[rows],
                self.prompt[rows],
                dummy,
            )
            for rows in _by_length(own_length, 0)
        ]
        return blocks


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


def _rounded(lengths: Tensor) -> Tensor:
    """Lengths rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: powers of two and midpoints."""
    power = torch.exp2(torch.ceil(torch.log2(lengths.clamp(min=1).double()))).long()
    middle = power * 3 // 4
    return torch.where((lengths <= middle) & (power > 2), middle, power)


def _span(start: Tensor, length: Tensor, dummy: int, unit: int = 0) -> Tensor:
    """i64[rows, width]: start, start + 1, ... and `dummy` beyond each length."""
    column = torch.arange(padded_width(int(length.max()), unit))
    return (start[:, None] + column).where(column < length[:, None], torch.tensor(dummy))


def _causal(start: Tensor, length: Tensor, dummy: int, unit: int) -> Block:
    index = _span(start, length, dummy, unit)
    return Block(index, index, None)


def _after_prompt(
    start: Tensor, length: Tensor, prompt_start: Tensor, prompt: Tensor, dummy: int
) -> Block:
    query = _span(start, length, dummy)
    before = _span(prompt_start, prompt, dummy)
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


def _moved(pack: Pack, device: torch.device) -> Pack:
    blocks: list[Block] = []
    for block in pack.blocks:
        query = block.query.to(device)
        key = query if block.key is block.query else block.key.to(device)
        blocks.append(Block(query, key, None if block.mask is None else block.mask.to(device)))
    return Pack(
        pack.tokens.to(device),
        pack.position.to(device),
        tuple(blocks),
        pack.slot.to(device),
        pack.read.to(device),
        pack.entry.to(device),
    )
