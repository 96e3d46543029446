"""Attention by FlashAttention's kernel for sequences of any length, on CUDA devices in 16 bits.

Queries stand in the order of the pack. Keys are gathered once per layer, so that those of a row's
prompt precede its own; a pack without shared prompts needs no gathering. The causal mask of fewer
queries than keys is aligned at the bottom right (Dao 2023, "FlashAttention-2"; its interface since
version 2.1): a row's first own token sees the whole prompt and itself, which is what is wanted.
No scores are kept, in evaluation as in training: memory grows with tokens, not with their square.

What the kernel is given is rounded up coarsely (`Places`): a step of ragged rows has few shapes.

Shapes: N packed tokens, C >= N what they are rounded up to, T gathered keys, rounded up, S
sequences, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...training.host_memory import sent

_LEAST_TOKENS, _LEAST_SEQUENCES, _LEAST_LONGEST = 2048, 32, 1024
"""The smallest of each that the kernel is told of. A block of it that finds no token ends at once,
so too many cost next to nothing."""
_HEAD_SIZE_UNIT, _MOST_HEAD_SIZE, _MOST_ON_SMALL_CHIPS = 8, 256, 192
"""Head sizes that the kernel has with its gradient; chips with less shared memory than those of
data centers have fewer."""
_LARGE_CHIPS = {(8, 0), (9, 0), (10, 0)}


@dataclass(frozen=True)
class Sequences:
    """Runs of packed tokens one after another; together they are all of them."""

    start: Tensor  # i64[S]; where each begins
    length: Tensor  # i64[S]; some may be empty
    num_prompts: int  # How many of the first are prompts that rows share; 0 if none are shared
    prompt_start: Tensor  # i64[rows]; where the prompt of each row begins
    # i64[rows]; its length, 0 throughout if none are shared: a row then is one sequence
    prompt: Tensor
    total: int  # N. The last token is a spare one; padding points at it.
    width_unit: int  # See `pack_rows`

    @property
    def before(self) -> tuple[Tensor, Tensor]:
        """i64[S] each: where the tokens begin that precede a sequence elsewhere, and how many."""
        start, count = torch.zeros_like(self.start), torch.zeros_like(self.length)
        rows = slice(self.num_prompts, self.num_prompts + len(self.prompt))
        start[rows], count[rows] = self.prompt_start, self.prompt
        return start, count

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.length[: self.num_prompts].sum())


def has_kernel(query: Tensor) -> bool:
    """Whether `attend_sequences` runs on such queries, [N, H, E]; float32 it never does."""
    if query.dtype not in (torch.bfloat16, torch.float16) or query.device.type == "cpu":
        return False
    size = query.shape[-1]
    return size % _HEAD_SIZE_UNIT == 0 and size <= most_head_size(query.device)


@cache
def most_head_size(device: torch.device) -> int:
    """The largest head that the kernel takes on a device; 0 if it does not run there."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return 0
    chip = torch.cuda.get_device_capability(device)
    if chip < (8, 0):  # before Ampere
        return 0
    return _MOST_HEAD_SIZE if chip in _LARGE_CHIPS else _MOST_ON_SMALL_CHIPS


@dataclass(frozen=True)
class Places:
    """Places where the kernel finds sequences, and where their keys' gradients belong."""

    # i32[S + 1]; where each begins among the queries, and the end. Empty ones follow the real
    # ones.
    query_start: Tensor
    key_start: Tensor  # i32[S + 1]; the same among the keys
    key: Tensor | None  # i64[T]; packed index of each key; None if keys stand as they are packed
    # i64[P, most]; where the keys of each prompt token stand: in the prompt's own sequence and in
    # those of its rows, then a place whose gradient is zero
    copies: Tensor
    rest: Tensor  # i64[N - P]; where the only key of every other token stands
    num_queries: int  # C
    longest_query: int  # At least the queries of any sequence
    longest_key: int  # At least its keys

    def on(self, device: torch.device) -> Places:
        return replace(
            self,
            query_start=sent(self.query_start, device),
            key_start=sent(self.key_start, device),
            key=None if self.key is None else sent(self.key, device),
            copies=sent(self.copies, device),
            rest=sent(self.rest, device),
        )

    def queries(self, x: Tensor) -> Tensor:
        """[C, ...] of [N, ...]; what is added belongs to no sequence. Nothing if N is larger."""
        if len(x) >= self.num_queries:
            return x
        padded = x.new_empty(self.num_queries, *x.shape[1:])
        padded[: len(x)] = x
        return padded

    def keys(self, x: Tensor) -> Tensor:
        """[T, K, E], in the order of sequences, of [N, K, E]."""
        return self.queries(x) if self.key is None else x.index_select(0, self.key)

    def added_up(self, found: Tensor, num_tokens: int) -> Tensor:
        """Add up what was found for each place of a key, by key: [T, K, E] to [N, K, E]."""
        if self.key is None:
            return found[:num_tokens]
        shape = (*self.copies.shape, *found.shape[1:])
        of_prompts = found.index_select(0, self.copies.reshape(-1)).view(shape).sum(1)
        return torch.cat([of_prompts, found.index_select(0, self.rest)])


def find_places(sequences: Sequences) -> Places:
    s = sequences
    before_start, before = s.before
    num_keys = before + s.length
    key_start = num_keys.cumsum(0) - num_keys
    longest_query, longest_key = int(s.length.max()), int(num_keys.max())
    capacity = _rounded(s.total)
    empty = torch.zeros(0, dtype=torch.int64)
    key, copies, rest = None, empty.view(0, 1), empty
    if s.num_prompts:
        of = torch.repeat_interleave(torch.arange(len(num_keys)), num_keys)
        place = torch.arange(len(of)) - key_start[of]
        at = before[of]
        # A row's keys are its prompt's, which stand once for all rows of it, and then its own.
        key = torch.where(place < at, before_start[of] + place, s.start[of] + place - at)
        copies, rest = _uses(key, s.num_prompt_tokens, s.total)
        num_held = capacity  # or twice, four times, ... as much
        while num_held < len(key):
            num_held *= 2
        key = torch.cat([key, torch.full((num_held - len(key),), s.total - 1)])
    return Places(
        _starts(s.start, s.total),
        _starts(key_start, int(num_keys.sum())),
        key,
        copies,
        rest,
        capacity,
        _power_of_two(longest_query, _LEAST_LONGEST),
        _power_of_two(longest_key, _LEAST_LONGEST),
    )


def places_of_rows(rows: int, num_queries: int, num_keys: int, device: torch.device) -> Places:
    """Places of rows of so many keys, one after another, of which the last have queries."""
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    ends = starts * num_queries, starts * num_keys
    return Places(*ends, None, empty.view(0, 1), empty, rows * num_queries, num_queries, num_keys)


def _uses(key: Tensor, num_prompt_tokens: int, total: int) -> tuple[Tensor, Tensor]:
    """See `Places.copies` and `rest`."""
    nowhere = len(key) - 1  # of a spare token, which only itself looks at, and nothing reads
    order = torch.argsort(key, stable=True)
    count = torch.bincount(key, minlength=total)
    start = count.cumsum(0) - count
    some = slice(0, num_prompt_tokens)
    more = torch.arange(int(count[some].max()))
    place = (start[some, None] + more).where(more < count[some, None], len(key) - 1)
    copies = order[place].where(more < count[some, None], nowhere)
    return copies, order[start[num_prompt_tokens:]]


def _starts(start: Tensor, end: int) -> Tensor:
    """i32[S + 1] of the real ones' i64[s]."""
    empty = _power_of_two(len(start), _LEAST_SEQUENCES) - len(start)
    return torch.cat([start, torch.full((empty + 1,), end)]).to(torch.int32)


def _rounded(tokens: int) -> int:
    """Up to a quarter of the next power of two, or 2,048."""
    unit = max(_power_of_two(tokens, 1) // 4, _LEAST_TOKENS)
    return -(-tokens // unit) * unit


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


def attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, places: Places, scale: float
) -> Tensor:
    """Attention of every packed token over its row.

    Shapes: `query` [N, H, E], for which `has_kernel` is true; `key` and `value` [N, K, E], K
    dividing H. Returns [N, H * E].
    """
    mixed: Tensor = _AttendSequences.apply(query, key, value, places, scale)  # type: ignore[assignment]
    return mixed


class _AttendSequences(torch.autograd.Function):
    """Keeps queries, keys and values as they are packed, and gathers keys again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: Places, scale: float
    ) -> Tensor:
        gathered = (places.queries(query), places.keys(key), places.keys(value))
        mixed, *kept = flash_forward(*gathered, places, scale)
        ctx.save_for_backward(query, key, value, mixed, *kept)
        ctx.places, ctx.scale = places, scale
        return mixed[: len(query)].flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, mixed, *kept = ctx.saved_tensors
        places: Places = ctx.places
        gathered = (places.queries(query), places.keys(key), places.keys(value))
        upstream = places.queries(grads[0].reshape(query.shape))
        dq, dk, dv = flash_backward(upstream, *gathered, mixed, kept, places, ctx.scale)
        of_key, of_value = (places.added_up(found, len(key)) for found in (dk, dv))
        return dq[: len(query)], of_key, of_value, None, None


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, places: Places, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel, through torch's own operator, whose first arguments are those of torch 2.5 on.

    `torch.nn.attention.varlen` calls it too, with arguments that change from version to version.

    Shapes: `query` [C, H, E]; `key` and `value` [T, K, E]. Returns [C, H, E], anything where no
    sequence is; then what the backward pass needs: sums of exponentials f32[H, C], and two tensors
    of random numbers that it does not use.
    """
    ends = (places.query_start, places.key_start, places.longest_query, places.longest_key)
    forward: Any = torch.ops.aten._flash_attention_forward  # pyright: ignore[reportPrivateUsage]
    mixed, sums, state, unused, _ = forward(query, key, value, *ends, 0.0, True, False, scale=scale)
    return mixed, sums, state, unused


@dataclass(frozen=True)
class UsedPositions:
    """Positions of the rows of a cache, [M, K, S, E], that a query each may look at."""

    count: Tensor  # i32[M]; at least 1
    most: int  # At least the largest; the kernel divides a row by it
    query_start: Tensor  # i32[M + 1]
    key_start: Tensor  # i32[M + 1]; in tokens [n, K, E], which overlap

    @staticmethod
    def until(position: Tensor, most: int, keys: int, capacity: int) -> UsedPositions:
        """Those up to one of each row, i64[M]."""
        start = torch.arange(len(position) + 1, device=position.device, dtype=torch.int32)
        return UsedPositions((position + 1).int(), most, start, start * (keys * capacity))


def attend_used(
    query: Tensor, cache: tuple[Tensor, Tensor], used: UsedPositions, scale: float
) -> Tensor:
    """One query of each row over the positions of its cache that are in use.

    Shapes: `query` [M, H, E], for which `has_kernel` is true; `cache` keys and values [M, K, S, E],
    contiguous. Returns [M, H * E].
    """
    rows, keys, positions, size = cache[0].shape
    # Position k of row m is token m * K * S + k of the first head, and other heads stand S * E on.
    shape = (rows * keys * positions - (keys - 1) * positions, keys, size)
    key, value = (part.as_strided(shape, (size, positions * size, 1)) for part in cache)
    return used_forward(query, key, value, used, scale).flatten(1)


def used_forward(
    query: Tensor, key: Tensor, value: Tensor, used: UsedPositions, scale: float
) -> Tensor:
    """The kernel, for `attend_used`: [M, H, E]."""
    forward: Any = torch.ops.aten._flash_attention_forward  # pyright: ignore[reportPrivateUsage]
    ends = (used.query_start, used.key_start, 1, used.most)
    rest = (0.0, False, False)
    return forward(query, key, value, *ends, *rest, scale=scale, seqused_k=used.count)[0]


def flash_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    kept: list[Tensor],
    places: Places,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the kernel's query, key and value; the same bits each time if torch is to."""
    sums, state, unused = kept
    ends = (places.query_start, places.key_start, places.longest_query, places.longest_key)
    backward: Any = torch.ops.aten._flash_attention_backward  # pyright: ignore[reportPrivateUsage]
    found: tuple[Tensor, Tensor, Tensor] = backward(
        upstream, query, key, value, mixed, sums, *ends, 0.0, True, state, unused, scale=scale
    )
    return found
