"""Packing: sequences end to end without padding.

Everything but attention works on one flat run of tokens, so no padded position is ever
multiplied. Attention finds its neighbors in one of two ways: rectangles of indices
(`rectangles.py`), or where each sequence begins (`varlen.py`).
Rows that begin with the same prompt may share it: it is packed once, and the keys of each row
are its prompt's followed by its own.

At least one spare token follows the real ones. Spare tokens form a sequence of their own that
nothing reads; padded slots point at the last of them.

Numbers of tokens and sizes of rectangles are rounded up, so that the same ones return: on a CPU
oneDNN compiles a kernel for every size of a matrix product and keeps it. Without rounding that was
50 MB more with every step of a model with 30 layers.

A pack is made on the host, of what the host knows, and sent to the device of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...training.transfers import on_host, sent
from .rectangles import Block, HeadRows, Sequences, find_head_rows, rectangles, shared_prompts
from .varlen import Places, find_places


@dataclass(frozen=True)
class Pack:
    """Packed sequences.

    Attributes:
        tokens: i64[N].
        position: i64[N]; each token's place in its row.
        longest: More than any of these places.
        read: i64[U]; packed indices whose hidden states are wanted, each once, ascending, then
            spare ones up to what `padded_tokens` says.
        entry: i64[n]; for each True of the `reads` given (row by row), an index into `read`.
        sequences: What is packed, on the host.
    """

    tokens: Tensor
    position: Tensor
    longest: int
    read: Tensor
    entry: Tensor
    sequences: Sequences

    @cached_property
    def _on_host(self) -> tuple[Block, ...]:
        return rectangles(self.sequences)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Rectangles whose queries cover every packed token."""
        return tuple(block.on(self.tokens.device) for block in self._on_host)

    @cached_property
    def places(self) -> Places:
        """Where a kernel for sequences of any length finds them."""
        return find_places(self.sequences).on(self.tokens.device)

    def head_rows(self, heads: int, keys: int) -> HeadRows:
        """Where the rows of `heads` query heads and `keys` key heads are."""
        if (heads, keys) not in self._head_rows:
            found = find_head_rows(self._on_host, len(self.tokens), heads, keys)
            self._head_rows[heads, keys] = found.on(self.tokens.device)
        return self._head_rows[heads, keys]

    @cached_property
    def _head_rows(self) -> dict[tuple[int, int], HeadRows]:
        return {}


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
    tokens, reads = on_host(tokens), on_host(reads)
    place = torch.arange(1, tokens.shape[1] + 1)
    length = (reads * place).amax(1) if tokens.numel() else torch.zeros(len(tokens)).long()
    zero = torch.zeros_like(length)
    prompt, owner = zero, torch.zeros_like(length)
    if shared is not None and len(tokens):
        prompt, owner = shared_prompts(tokens, torch.minimum(on_host(shared), length), length)
    first = torch.zeros(len(tokens), dtype=torch.bool)
    if bool(prompt.any()):
        first[0] = True
        first[1:] = owner[1:] != owner[:-1]
    builder = _Builder(tokens, prompt, length, owner, first, width_unit)
    return builder.build(reads, device)


def padded_tokens(count: int) -> int:
    """What a number of tokens is rounded up to.

    A multiple of 16 (see decode.py for what that buys), and of a sixteenth of the next lower power
    of two, up to 64.
    """
    unit = 16 if count <= 256 else 32 if count <= 512 else 64
    return -(-count // unit) * unit


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

    def build(self, reads: Tensor, device: torch.device) -> Pack:
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
        index = torch.where(
            column < self.prompt[:, None],
            prompt_start[:, None] + column,
            own_start[:, None] + column - self.prompt[:, None],
        )
        read, entry = torch.unique(index[reads], return_inverse=True)
        fill = torch.full((padded_tokens(len(read)) - len(read),), total - 1, dtype=torch.int64)
        read = torch.cat([read, fill])
        sequences = Sequences(
            start, lengths, num_prompts, prompt_start, self.prompt, total, self.width_unit
        )
        flat, position, read, entry = (sent(x, device) for x in (flat, position, read, entry))
        longest = int(self.length.max()) if len(self.length) else 0
        return Pack(flat, position, max(longest, 1), read, entry, sequences)
