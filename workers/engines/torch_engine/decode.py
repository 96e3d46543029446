"""Generation with a key-value cache for the families of `LeanBackbone`.

A response that ends leaves its row to one that waits. Rows enter some at a time: their texts are
computed together, that of a prompt's samples once, and the cache copied to each. Once none waits,
rows that ended leave the batch.

A sample's tokens and log-probabilities do not depend, bit for bit, on the rows that share its
batch, nor on when it entered. On the CPU this rests on four things, all tested: the number of rows
of every matrix product is a multiple of 16 (other numbers may choose another kernel); attention is
two batched products and a softmax over a length that is a multiple of 16, at least long enough that
the products never fall below the size at which torch switches kernels, and long sums are divided
alike whatever the length (`attend_cache`); a text's attention is as wide as its own length demands;
and every token has its own random number. On CUDA the same code runs, but cuBLAS may choose kernels
by the number of rows, so there only equal batches are promised to give equal bits; other batches
agree up to rounding, which can change a token whose sample lies on a boundary. There
`device_decode` has the same rows go several tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ....dataflow.runtime.call_context import call_in_flight
from ...rollout.response_sampler import ResponseSampler
from .attention import attend_cache
from .declaration import PREFILL_TOKENS, SMALL_PRODUCT
from .network import LeanNetwork
from .packing import ALIGN, pack_rows, round_up


def decode(network: LeanNetwork, sampler: ResponseSampler, max_rows: int) -> Iterator[Tensor]:
    """Sample the responses that are open; yields those that ended in a step, i64[n], ascending."""
    waiting = torch.nonzero(sampler.open)[:, 0]
    if not len(waiting):
        return
    batch = Batch(network, sampler, min(len(waiting), max_rows))
    while len(waiting) or batch.num_live:
        count = entering(waiting, max_rows - batch.num_live, max_rows, sampler.num_samples)
        batch.enter(waiting[:count])
        waiting = waiting[count:]
        sampled, live = sampler.sample(batch.logits, batch.row, batch.live)
        ended = batch.row[batch.live & ~live]
        if len(ended):
            batch.end(live)
        if len(ended) or call_in_flight():
            # Before anything is computed of the next tokens: in flight it may be none that ended,
            # and other weights may be there afterwards.
            yield ended.sort().values
        if batch.num_live:
            keep = None if len(waiting) else batch.shrink()
            batch.step(sampled if keep is None else sampled[keep])


def entering(waiting: Tensor, room: int, max_rows: int, num_samples: int) -> int:
    """Number of the responses that wait, i64[n] on the CPU, that are to enter now, in their order.

    They enter at least 16 at a time, or an eighth of the batch, so that the fixed cost of computing
    a few texts is divided; and a prompt's samples together where that can be.
    """
    if len(waiting) <= room or not len(waiting):
        return len(waiting)
    least = max(min(ALIGN, max_rows // 8), min(num_samples, max_rows // 4), 1)
    if room < least:
        return 0
    prompt = waiting[: room + 1] // num_samples
    apart = torch.nonzero(prompt[1:] != prompt[:-1])[:, 0] + 1
    return int(apart[-1]) if len(apart) else room


class Batch:
    """The rows that are computed together. M rows, K key heads, S positions, E size."""

    shrinks_to = 0.8  # Rows that ended stay in the batch until it would shrink to this fraction

    def __init__(self, network: LeanNetwork, sampler: ResponseSampler, most: int) -> None:
        self._network = network
        self._backbone = network.backbone
        self._sampler = sampler
        self._device = network.device
        # i64[M]; which response each row is of; any for those that are not live
        self.row = torch.zeros(round_up(most), dtype=torch.int64, device=self._device)
        self.live = torch.zeros(len(self.row), dtype=torch.bool, device=self._device)  # bool[M]
        self.num_live = 0  # How many
        # bool[M]; rows that keep their cache, live or not, until they are let go
        self.held = torch.zeros_like(self.live)
        self._position = torch.zeros_like(self.row)  # of the next token; 0 where none comes
        self._longest = 0  # position of a live row
        self._farthest = 0  # of any
        self.logits = self._new(0)  # [M, V], of the next token; none while it is computed
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._capacity = 0

    # --- rows that enter

    def enter(self, row: Tensor) -> Tensor:
        """Compute the texts of responses, i64[n] on the CPU, and give each a free row: i64[n]."""
        if not len(row):
            return row
        texts, text = self._sampler.texts(row)
        length = (texts >= 0).sum(1)
        free = torch.nonzero(~(self.live | self.held))[: len(row), 0]
        self.row[free] = row.to(self._device)
        self.live[free] = True
        self._position[free] = length[text].to(self._device)
        capacity = self._span(self._sampler.longest(row) - 1)
        part = (length.cumsum(0) - 1) // PREFILL_TOKENS
        for number in part.unique().tolist():
            some = part == number
            mine = torch.nonzero(some[text])[:, 0]
            index = (some.cumsum(0) - 1)[text[mine]]
            into = free[mine.to(self._device)]
            self._read(texts[some], length[some], capacity, index.to(self._device), into)
        self._count()
        return free

    def hold(self, slot: int, *, held: bool) -> None:
        """Whether a row is to keep its cache when it is not live."""
        self.held[slot] = held
        if not held and not self.live[slot]:
            self._position[slot] = 0

    def position(self, slot: int) -> int:
        return int(self._position[slot])

    def resume(self, slot: int, longest: int) -> None:
        """Have a row that is held go on, up to so many tokens; its next one is given, not sampled.

        It is one that `sampler` does not sample, as nothing has been computed of what precedes it.
        A row that is held but not live is computed with the others, and what comes of it stands at
        its next place, so there must be one more.
        """
        self._reserve(self._span(longest))
        self.live[slot] = True
        self._count()

    def _read(
        self, texts: Tensor, length: Tensor, capacity: int, text: Tensor, into: Tensor
    ) -> None:
        """Compute texts, i64[n, T] on the CPU, right padded with -1, for the rows that have them.

        Row `into[i]` goes on from text `text[i]`, i64[m] each.
        """
        backbone = self._backbone
        column = torch.arange(int(length.max()))
        last = column == length[:, None] - 1
        pack = pack_rows(texts[:, : len(column)].to(self._device), last, width_unit=ALIGN)
        num_tokens, entry = len(pack.tokens), pack.entry
        shape = (num_tokens, backbone.num_key_heads, backbone.head_dim)
        packed = [(self._new(*shape), self._new(*shape)) for _ in backbone.layers]
        logits = self._network.head(backbone.states(pack, packed))
        del pack  # its indices take memory
        start = length.cumsum(0) - length
        place = (start[:, None] + column).where(column < length[:, None], num_tokens - 1)
        place = place.to(self._device)
        self._reserve(capacity)  # no earlier: computing texts takes memory as well
        self._fill(packed, place, logits[entry[text]], text, into)

    def _fill(
        self,
        packed: Sequence[tuple[Tensor, Tensor]],
        place: Tensor,
        logits: Tensor,
        text: Tensor,
        into: Tensor,
    ) -> None:
        """Copy what was computed of texts to the rows; the host waits for nothing of the device."""
        width = place.shape[1]
        for caches, of_layer in zip(self._cache, packed, strict=True):
            for cache, of_tokens in zip(caches, of_layer, strict=True):
                cache[into, :, :width] = of_tokens[place].transpose(1, 2)[text]
                cache[into, :, width:] = 0  # it is multiplied, by 0, before it is written
        if len(into) == len(self.row):
            self.logits = logits
            return
        if not len(self.logits):
            self.logits = logits.new_zeros(len(self.row), logits.shape[1])
        self.logits[into] = logits

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._backbone.embedding.dtype, device=self._device)

    def _reserve(self, capacity: int) -> None:
        if capacity <= self._capacity:
            return
        backbone = self._backbone
        shape = (len(self.row), backbone.num_key_heads, capacity, backbone.head_dim)
        if not self._cache:
            self._cache = [
                (self._new(*shape).zero_(), self._new(*shape).zero_()) for _ in backbone.layers
            ]
        else:
            for layer, pair in enumerate(self._cache):
                wider = (self._new(*shape).zero_(), self._new(*shape).zero_())
                for new, old in zip(wider, pair, strict=True):
                    new[:, :, : self._capacity] = old
                self._cache[layer] = wider
        self._capacity = capacity

    # --- rows that leave

    def end(self, live: Tensor) -> None:
        """Rows of which no token comes any more are free, or leave with `shrink`."""
        self.live = live
        self._position = self._position.where(live | self.held, 0)
        self._count()

    def shrink(self) -> Tensor | None:
        """Have free rows leave if enough of them do; which stay, i64[M], None if all do."""
        free = ~(self.live | self.held)
        size = round_up(len(free) - int(free.sum()))
        if size > self.shrinks_to * len(self.row):
            return None
        keep = torch.argsort(free.to(torch.int8), stable=True)[:size]
        self._keep(keep)
        return keep

    def _keep(self, keep: Tensor) -> None:
        """Have these rows alone, i64[m]."""
        self.row, self.live, self.held = self.row[keep], self.live[keep], self.held[keep]
        self._position = self._position[keep]
        for layer, (key, value) in enumerate(self._cache):
            self._cache[layer] = key[keep], value[keep]

    def _count(self) -> None:
        self.num_live = int(self.live.sum())
        self._farthest = int(self._position.max())
        self._longest = int(self._position.where(self.live, 0).max())

    # --- tokens

    def _span(self, length: int) -> int:
        """Number of cache positions to attend over for rows of at most `length` tokens."""
        backbone = self._backbone
        group = backbone.num_heads // backbone.num_key_heads
        least = math.ceil(SMALL_PRODUCT / (group * backbone.head_dim))
        return round_up(max(length, least))

    def step(self, token: Tensor) -> None:
        """Append one token to every row; the logits after it are those of the next."""
        position = self._position
        self.logits = self._new(0)
        self._longest += 1
        self._farthest = max(self._farthest, self._longest)
        tables = self._backbone.rope(self._farthest + 1)
        self.logits = self._after(token, self._span(self._longest), tables)
        self._position = torch.where(self.live, position + 1, position.where(self.held, 0))

    def _after(self, token: Tensor, span: int, tables: tuple[Tensor, Tensor]) -> Tensor:
        """The logits after one more token of every row, whose keys and values join the cache."""
        backbone, position = self._backbone, self._position
        bias = torch.zeros(len(token), 1, span, device=token.device).masked_fill_(
            torch.arange(span, device=token.device) > position[:, None, None], -math.inf
        )
        cos, sin = (table.index_select(0, position) for table in tables)
        where = self._places()
        x, change = backbone.embed(token), None
        for layer, (key_cache, value_cache) in zip(backbone.layers, self._cache, strict=True):
            x, query, key, value = backbone.project(x, change, layer, cos, sin)
            self._write((key_cache, value_cache), (key, value), where)
            mixed = attend_cache(
                query, key_cache[:, :, :span], value_cache[:, :, :span], bias, backbone.scale
            )
            x, change = backbone.finish(x, mixed, layer)
        return self._network.head(backbone.last_norm(x, change))

    def _places(self) -> Tensor:
        """Where each row's next token goes in a cache [M * K * S, E]: i64[M * K]."""
        keys = self._backbone.num_key_heads
        heads = torch.arange(len(self.row) * keys, device=self._device).view(-1, keys)
        return (heads * self._capacity + self._position[:, None]).view(-1)

    def _write(
        self, caches: tuple[Tensor, Tensor], news: tuple[Tensor, Tensor], where: Tensor
    ) -> None:
        size = self._backbone.head_dim
        for cache, new in zip(caches, news, strict=True):
            cache.view(-1, size).index_put_((where,), new.reshape(-1, size))
