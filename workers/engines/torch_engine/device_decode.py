"""Generation on a device that the host should not wait for, with the rows and caches of `decode`.

A token of every row is one step of fixed shape: the model's forward pass over a fixed number of
cache positions, or in 16 bits on CUDA over those that each row uses, sampling, and noting what was
sampled in a window. Everything that a step reads and writes lies in tensors that stay where they
are, so on CUDA it is captured as a graph once for each number of rows and positions, or bound of
them, and replayed. The host looks at every 16th token, at the window, in one copy: then it records
the tokens, rows that ended are given, rows that wait enter, and the batch shrinks. A row that ends
in between computes on until then, at position 0 of its own cache, and nothing of it is recorded.

The host looks at every token where it must: where responses may end with a string, and where newer
weights may come between two tokens. Newer weights are written where the old ones lie, so graphs
stay valid; other rows, another cache or weights at another place need new graphs.

On the CPU, where tests run it, every sample is that of `decode` bit for bit.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....dataflow.errors import WorkerError
from ....dataflow.runtime.call_context import call_in_flight
from ...rollout.response_sampler import ResponseSampler, TurnSampler
from ...training.host_memory import MEMORY_TO_SPARE, sent
from .backbone import LeanBackbone
from .decode import Batch, entering
from .network import LeanNetwork
from .packing import ALIGN, round_up
from .varlen import UsedPositions, attend_used, has_kernel

_RESERVED = 0.1
"""Share of a device's memory that is left for reading texts and to other processes."""
_BYTES_PER_WORD = 32
"""Bytes of a row for each token of the vocabulary: logits, float32 and float64 of the sample."""
_BYTES_PER_SCORE = 12
"""Bytes of a row for each position and head: the scores of one layer's attention."""


def rows_that_fit(free_bytes: int, *, total_bytes: int, bytes_per_row: int, most: int) -> int:
    """Return the rows whose cache fits in free memory: all, or a multiple of 16.

    A tenth of the device stays free. Of 1.5 billion weights in bfloat16 (28 layers of 2 key heads
    of 128) a row of 1,024 + 8,192 tokens takes 252 MiB of cache; 512 of them would be 126 GiB.
    """
    if free_bytes < ALIGN * bytes_per_row:
        raise WorkerError(
            f"generation needs {_gib(ALIGN * bytes_per_row)} GiB for a key-value cache of "
            f"{ALIGN} responses, the fewest that are sampled at once, and the device has "
            f"{_gib(free_bytes)} GiB free\n    lower sampling.max_new_tokens or drop long prompts, "
            "or have what else is on the device sleep or move"
        )
    fitting = int(free_bytes - _RESERVED * total_bytes) // bytes_per_row
    return min(most, max(fitting // ALIGN, 1) * ALIGN)


def rows_in_memory(backbone: LeanBackbone, device: torch.device, longest: int, most: int) -> int:
    free, total = torch.cuda.mem_get_info(device)
    # What torch has taken from the device and uses for nothing is free as well.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return rows_that_fit(
        free, total_bytes=total, bytes_per_row=bytes_per_row(backbone, longest), most=most
    )


def bytes_per_row(backbone: LeanBackbone, longest: int) -> int:
    """Return the bytes of a row of a batch: its cache, and what computing and sampling takes."""
    running = round_up(longest) * _BYTES_PER_SCORE * backbone.num_heads
    return _cache_bytes(backbone, longest) + running + _BYTES_PER_WORD * len(backbone.embedding)


def _cache_bytes(backbone: LeanBackbone, longest: int) -> int:
    numbers = 2 * len(backbone.layers) * backbone.num_key_heads * backbone.head_dim
    return round_up(longest) * numbers * backbone.embedding.element_size()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device for captures, as cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


def prepare_capture(device: torch.device, room: int) -> None:
    """Have on the current stream what a capture must not make, and that much memory to be had."""
    # cuBLAS takes its memory for a stream and a thread at its first product there.
    some = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    torch.addmm(some[0], some, some @ some)
    torch.cuda.synchronize(device)
    # Memory that torch has and does not use cannot become a graph's.
    if torch.cuda.mem_get_info(device)[0] < room:
        torch.cuda.empty_cache()


class StepGraphs:
    """Runs a step: the first time for a number of positions as it is, from then on as a graph.

    All graphs share one pool of memory, for no two of them run at once and nothing is left in it
    from one to the next.

    It does not hold on to the step: what that writes into would live until Python looks for cycles.

    Args:
        device: Where the step runs.
        room: Bytes that a step takes at most for what it does not leave.
    """

    def __init__(self, device: torch.device, room: int = 0) -> None:
        self._device, self._room = device, room
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._weights_at: object = None
        self._stream = capture_stream(device)
        self.num_captured = 0  # Graphs captured so far, dropped ones as well

    def run(self, step: Callable[[int], None], span: int, weights_at: object) -> None:
        """Do the step once for some positions; graphs of weights at another address are void."""
        if weights_at != self._weights_at:
            self.clear()
            self._weights_at = weights_at
        graph = self._graphs.get(span)
        if graph is not None:
            graph.replay()
            return
        with torch.cuda.device(self._device):
            # Libraries and compilers set themselves up in their first call, which a graph must not
            # record. What it takes of memory is free for others afterwards: their stream is this.
            step(span)
            self._graphs[span] = self._captured(step, span)

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _captured(self, step: Callable[[int], None], span: int) -> torch.cuda.CUDAGraph:
        if self._pool is None:  # a pool ends with its last graph, and is not used again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what it frees could make the device wait, which a capture refuses
        try:
            # `torch.cuda.graph` would empty torch's memory first, which others would miss. Other
            # threads may go on using the device meanwhile.
            with torch.cuda.stream(self._stream):
                prepare_capture(self._device, self._room)
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step(span)
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self.num_captured += 1
        return graph


TOKENS_PER_LOOK = 16
_LEAST_SPAN = 64
_LEAST_BOUND, _BOUNDS = 1024, 3
_KEPT_SHARE = 32
"""A batch is kept from call to call if it takes at most one in so many of a device's bytes: of what
training leaves free, a third at most."""
_KEPT_BYTES_PER_WORD = 8
"""Bytes of a row and token of the vocabulary that graphs have between calls."""


class KeptBatch:
    """A batch with its graphs that one generator's calls leave to the next, while it is small.

    Whether it is kept depends on sizes alone, and what is sampled does not depend on it.
    """

    def __init__(self) -> None:
        self._batch: DeviceBatch | None = None
        MEMORY_TO_SPARE.add(self)

    def take(self, sampler: ResponseSampler, rows: int, positions: int) -> DeviceBatch | None:
        """The batch if it has so many rows and positions, ready for other responses; else none."""
        batch, self._batch = self._batch, None
        return batch if batch is not None and batch.begins(sampler, rows, positions) else None

    def put(self, batch: DeviceBatch) -> None:
        if batch.num_bytes <= _most_kept(batch.row.device):
            self._batch = batch

    def give_up(self) -> None:
        """Free its memory: something sleeps, so that others can use the device."""
        self._batch = None


@cache
def _most_kept(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory // _KEPT_SHARE


def decode_on_device(
    network: LeanNetwork, sampler: ResponseSampler, max_rows: int, kept: KeptBatch | None = None
) -> Iterator[Tensor]:
    """Sample the responses that are open; see `decode.decode`."""
    waiting = torch.nonzero(sampler.open)[:, 0]
    if not len(waiting):
        return
    kept = KeptBatch() if kept is None else kept
    # Calls of about the same size have the same.
    positions = span_bucket(sampler.longest(waiting))
    batch = kept.take(sampler, min(len(waiting), max_rows), positions)
    # Processes that divide the model have it together, or none has it.
    all_have = network.agreed(int(batch is not None))
    if batch is None or not all_have:
        if network.device.type == "cuda":
            max_rows = network.agreed(
                rows_in_memory(network.backbone, network.device, positions, max_rows)
            )
        batch = DeviceBatch(network, sampler, min(len(waiting), max_rows), positions)
    while len(waiting) or batch.num_live:
        count = entering(waiting, max_rows - batch.num_live, max_rows, sampler.num_samples)
        if count:
            ended = batch.begin(waiting[:count])
            waiting = waiting[count:]
            if len(ended) or call_in_flight():
                yield ended
        if batch.num_live:
            ended = batch.advance()
            if len(ended) or call_in_flight():
                yield ended  # before anything is computed of the next tokens
        if not len(waiting):
            batch.shrink()
    kept.put(batch)


def span_bucket(length: int, most: int | None = None) -> int:
    """Cache positions to attend over for rows of `length`: few sizes, at most 1/4 too large."""
    unit = max(_LEAST_SPAN, (1 << (length - 1).bit_length()) // 8)
    span = -(-length // unit) * unit
    return span if most is None else min(span, most)


def bound_of(length: int, most: int) -> int:
    """A bound for rows of `length` cache positions, of three powers of two that end at `most`."""
    least = max(_LEAST_BOUND, (1 << (most - 1).bit_length()) >> (_BOUNDS - 1))
    return min(max(least, 1 << (length - 1).bit_length()), most)


class DeviceBatch(Batch):
    """A `Batch` whose rows go several tokens at a time. M rows, W tokens of a window.

    After a look the host knows what the device has: `_known` and `_response` are `live` and `row`.
    """

    shrinks_to = 0.5  # of other rows other graphs are captured
    flash = True
    """Whether attention goes through the kernel of `varlen` where it runs."""

    def __init__(
        self, network: LeanNetwork, sampler: ResponseSampler, most: int, longest: int
    ) -> None:
        super().__init__(network, sampler, most)
        sampler.record_later()
        # Room for the longest from the beginning: a graph needs the cache where it is.
        self._positions = self._span(longest - 1)
        self._tables = self._backbone.rope(self._positions + 1)
        self._token = torch.zeros_like(self.row)
        self._next = torch.zeros(1, dtype=torch.int64, device=self._device)  # place in the window
        # i64[W * 3 * M], of which some rows' window is the beginning
        self._windows = self.row.new_zeros(TOKENS_PER_LOOK * 3 * len(self.row))
        self._known = torch.zeros(len(self.row), dtype=torch.bool)
        self._response = torch.zeros(len(self.row), dtype=torch.int64)
        self._whole = (self.row, self.live, self.held, self._position, self._token)
        self._whole_cache: list[tuple[Tensor, Tensor]] = []
        # Number of rows -> captured steps; empty on a CPU, where a step runs uncaptured.
        self.graphs: dict[int, StepGraphs] = {}
        words = _KEPT_BYTES_PER_WORD * len(self._backbone.embedding)
        self.num_bytes = len(self.row) * (_cache_bytes(self._backbone, longest) + words)
        heads, size = self._backbone.num_heads, self._backbone.head_dim
        self._has_kernel = DeviceBatch.flash and has_kernel(self._new(0, heads, size))

    def begins(self, sampler: ResponseSampler, most: int, longest: int) -> bool:
        """Whether its graphs serve other responses; then it has none of those that it had."""
        given = (round_up(most), self._span(longest - 1))
        tokens = self._sampler.tokens
        if given != (len(self._whole[0]), self._positions) or not tokens.alike(sampler.tokens):
            return False
        sampler.record_later()
        tokens.take(sampler.tokens)
        sampler.tokens, self._sampler = tokens, sampler
        for own in self._whole:
            own.zero_()
        self.row, self.live, self.held, self._position, self._token = self._whole
        self._cache = [*self._whole_cache]
        self._known = torch.zeros(len(self.row), dtype=torch.bool)
        return True

    # --- tokens

    def begin(self, row: Tensor) -> Tensor:
        """Have responses, i64[n] on the CPU, enter, sample a token of each; those that ended."""
        return self.first_tokens(self.enter(row))

    def first_tokens(self, slots: Tensor) -> Tensor:
        """Sample a token of rows that have entered, i64[n]; the responses that ended."""
        entered = torch.zeros_like(self.live)
        entered[slots] = True
        self._next.zero_()
        self._take(self.logits, entered)
        self.logits = self._new(0)
        self._response = self.row.to("cpu", copy=True)
        return self._looked(1)

    def advance(self) -> Tensor:
        """Sample some more tokens of every row, and look; the responses that ended, ascending."""
        # A stop string, or newer weights, must count before the next token.
        ahead = 1 if self._sampler.reads_text or call_in_flight() else TOKENS_PER_LOOK
        count = min(ahead, self._sampler.most_left(self._response[self._known]))
        self.run(count)
        return self._looked(count)

    def run(self, count: int) -> None:
        """Sample so many tokens, at most 16, of every row that does not end before."""
        longest = self._sampler.longest_now(self._response[self._known]) - 1 + count
        size = bound_of if self._has_kernel else span_bucket
        span = size(longest, self._positions)
        # Frozen weights may move as well, to another device and back.
        weights_at = (self._network.flat.place, self._backbone.embedding.data_ptr())
        self._next.zero_()
        self._backbone.renew_copies()
        graphs = self._graphs()
        for _ in range(count):
            if graphs is None:
                self.sample_next(span)
            else:
                graphs.run(self.sample_next, span, weights_at)

    def _graphs(self) -> StepGraphs | None:
        rows = len(self.row)
        if self._device.type == "cuda" and rows not in self.graphs:
            room = rows * bytes_per_row(self._backbone, 0)
            self.graphs[rows] = StepGraphs(self._device, room)
        return self.graphs.get(rows)

    def sample_next(self, span: int) -> None:
        """Append the last token of every row to its cache, and sample the next; without a look."""
        logits = self._after(self._token, span, self._tables)
        self._position.add_(self.live)
        self._take(logits, self.live)

    def _after(self, token: Tensor, span: int, tables: tuple[Tensor, Tensor]) -> Tensor:
        if not self._has_kernel:
            return super()._after(token, span, tables)
        backbone, position = self._backbone, self._position
        used = UsedPositions.until(position, span, backbone.num_key_heads, self._capacity)
        cos, sin = (table.index_select(0, position) for table in tables)
        where = self._places().view(len(token), -1)
        x, change = backbone.embed(token), None
        for layer, caches in zip(backbone.layers, self._cache, strict=True):
            x, query = backbone.project_into(x, change, layer, cos, sin, caches, where)
            mixed = attend_used(query, caches, used, backbone.scale)
            x, change = backbone.finish(x, mixed, layer)
        return self._network.head(backbone.last_norm(x, change))

    def _take(self, logits: Tensor, live: Tensor) -> None:
        """Sample a token of some of the rows, and note it: bool[M]."""
        tokens = self._sampler.tokens
        sampled = tokens.sample(logits, self.row, waits=False)
        tokens.note(sampled, self.row, live)
        # Of one type, so that one copy brings all three to the host.
        note = [sampled.token, sampled.logprob.view(torch.int32).long(), live.long()]
        self._window().index_copy_(0, self._next, torch.stack(note)[None])
        self._next.add_(1)
        self._token.copy_(torch.where(live, sampled.token, self._token))
        self.live.copy_(tokens.goes_on(sampled, self.row, live) | (self.live & ~live))
        self._position.masked_fill_(self._free(), 0)

    def _looked(self, count: int) -> Tensor:
        """Record the tokens of the window; which responses have ended: i64[n], ascending."""
        token, bits, live = self._window()[:count].cpu().unbind(1)  # the one wait for the device
        live, logprob = live.bool(), bits.int().view(torch.float32)
        goes_on = self._sampler.record(self._response, live, token, logprob)
        any_live = live.any(0)  # a row may begin to speak in between
        self._known = goes_on | (self._known & ~any_live)
        self.num_live = int(self._known.sum())
        if self._sampler.reads_text:  # only the host knows of strings that have ended a row
            self.live.copy_(self._known)
            self._position.masked_fill_(self._free(), 0)
        return self._response[any_live & ~goes_on].sort().values

    # --- rows

    def _free(self) -> Tensor:
        """Rows that keep nothing in their cache, bool[M]."""
        return ~self.live

    def _count(self) -> None:
        """Nothing: the host counts what it knows."""

    def _reserve(self, capacity: int) -> None:
        super()._reserve(max(capacity, self._positions))
        self._whole_cache = self._whole_cache or [*self._cache]

    def _window(self) -> Tensor:
        """i64[W, 3, M]: tokens, the bits of their log-probabilities, and which rows were live."""
        shape = (TOKENS_PER_LOOK, 3, len(self.row))
        return self._windows[: math.prod(shape)].view(shape)

    def shrink(self) -> Tensor | None:
        # Other rows need other graphs.
        if round_up(self.num_live) > self.shrinks_to * len(self.row):
            return None
        keep = super().shrink()
        if keep is not None:
            keep_here = keep.cpu()
            self._known, self._response = self._known[keep_here], self._response[keep_here]
        return keep

    def _keep(self, keep: Tensor) -> None:
        # To the front of where they are: graphs of so many rows, perhaps of another call, have them
        # there.
        def moved(own: Tensor) -> Tensor:
            return own[: len(keep)].copy_(own[keep])

        own = (self.row, self.live, self.held, self._position, self._token)
        self.row, self.live, self.held, self._position, self._token = map(moved, own)
        for layer, (key, value) in enumerate(self._cache):
            self._cache[layer] = moved(key), moved(value)


class TurnBatch(DeviceBatch):
    """A `DeviceBatch` of conversations: rows that are held keep their cache, and may read.

    A row that reads is shown its next token in place of one that is sampled.
    """

    def __init__(self, network: LeanNetwork, sampler: TurnSampler, most: int, longest: int) -> None:
        super().__init__(network, sampler, most, longest)
        self._turns = sampler
        # i64[W, M]; tokens that rows are shown, -1 where they speak
        shape = (TOKENS_PER_LOOK, len(self.row))
        self._shown = torch.full(shape, -1, dtype=torch.int64, device=self._device)

    def first_tokens(self, slots: Tensor) -> Tensor:
        self._shown.fill_(-1)
        return super().first_tokens(slots)

    def run(self, count: int) -> None:
        shown = self._turns.shown(self._response.where(self._known, -1), TOKENS_PER_LOOK, count)
        self._shown.copy_(sent(shown, self._device))
        super().run(count)

    def hold(self, slot: int, *, held: bool) -> None:
        self.held[slot] = held
        if not held and not self._known[slot]:
            self._position[slot] = 0

    def resume(self, slot: int, longest: int) -> None:
        self.live[slot] = self._known[slot] = True
        self._token[slot] = self._turns.next_shown(int(self._response[slot]))
        self.num_live = int(self._known.sum())

    def _take(self, logits: Tensor, live: Tensor) -> None:
        shown = self._shown.index_select(0, self._next)[0]
        reads = live & (shown >= 0)
        super()._take(logits, live & ~reads)
        self._token.copy_(torch.where(reads, shown, self._token))

    def _free(self) -> Tensor:
        return ~(self.live | self.held)

    def _keep(self, keep: Tensor) -> None:
        super()._keep(keep)
        # Nothing is to be read in it before the next look.
        self._shown = self._shown[:, : len(keep)].contiguous()
