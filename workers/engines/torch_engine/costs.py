"""What this engine holds at its peak, from a call's sizes alone, for the planner.

The engine keeps all weights, gradients and Adam moments whole on every rank and computes
micro-batches of packed tokens without padding. What is modeled, and found by listing every
tensor alive at the peak of real calls on a CPU:

- Training keeps, per layer, the tensors named in `_Sizes`; the last layer's feed-forward runs only
  where a hidden state is read. The peak is at the head (large vocabularies), at the end of the
  last layer (small ones), or in the optimizer step (few tokens).
- Evaluation computes attention in three plain steps, so one layer's scores exist as a whole.
- Generation holds the cache of all rows of a wave at their greatest length. A row that ends leaves
  the batch when a fifth of the rows has ended; the old and the smaller cache then exist together.

Prompts shared by neighboring rows are packed once where that saves a fifth of the tokens. Not
modeled: architectures that run through the Hugging Face forward, and buffers inside libraries.

Shapes: N packed tokens, U positions that are read, M rows of a wave.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from ....planner.cost.memory_ledger import Parts
from ....planner.inputs.calls import Call
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ....planner.inputs.workload import Lengths

__all__ = [
    "MICRO_BATCH_TOKENS",
    "TorchMemory",
    "torch_engine_peak",
    "torch_resident_parts",
    "torch_transient_parts",
]

MICRO_BATCH_TOKENS = 4096
"""The workers' own default of `micro_batch_tokens`."""

_ALIGN = 16  # packed tokens, decoded rows and cache positions come in multiples of it
_FEW = 8  # fewer sequences than this of one size join the next larger size
_SHRINK = 0.8  # the share of rows that is left when finished ones leave the batch
_SMALL_PRODUCT = 400  # a row's attention is at least this many multiplies
_SIMULATED = 256  # rows sampled to see how micro-batches differ
_FLOAT = 4

_Rectangle = tuple[int, int, int]
"""Rows, queries and keys."""


class TorchMemory:
    """An `EngineMemory`: of a layout only the number of ranks matters.

    Micro-batches and rows decoded at once are the workers' defaults.
    """

    def resident(self, call: Call, layout: Layout) -> Parts:
        """See `EngineMemory`."""
        del layout
        return torch_resident_parts(call, trains=call.kind != "generate")

    def transient(
        self, call: Call, layout: Layout, *, borrows: bool = False, rows: int | None = None
    ) -> Parts:
        """See `EngineMemory`; `rows` are those of `max_decode_rows`."""
        del rows
        running = torch_transient_parts(call, num_ranks=layout.num_devices)
        if not borrows:
            return running
        copy = call.model.num_params(call.head) * call.model.dtype_bytes
        return running._replace(weights=running.weights + copy)


def torch_engine_peak(
    call: Call, *, num_ranks: int = 1, micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    max_decode_rows: int = 512, entropy: bool = False,
) -> Parts:  # fmt: skip
    """The most a worker holds on its device during one call: `resident` and `transient` together.

    Args:
        call: What runs; its role's own worker runs it.
        num_ranks: Data-parallel ranks that share the rows.
        micro_batch_tokens: As in the worker's spec.
        max_decode_rows: As in the worker's spec.
        entropy: Whether the loss reads entropies.
    """
    transient = torch_transient_parts(
        call, num_ranks=num_ranks, micro_batch_tokens=micro_batch_tokens,
        max_decode_rows=max_decode_rows, entropy=entropy,
    )  # fmt: skip
    return torch_resident_parts(call).plus(transient)


def torch_resident_parts(call: Call, *, trains: bool = True) -> Parts:
    """What a worker holds between calls, whole on every rank.

    Weights; from its first train call on gradients and Adam's moments too.

    Args:
        call: Any call of the role.
        trains: Whether this worker is the one that trains, not a copy that only generates.
    """
    params, size = call.model.num_params(call.head), call.model.dtype_bytes
    if not (call.trained and trains):
        return Parts(weights=params * size)
    # Weights of 16 bits have a float32 master copy.
    moments = params * _FLOAT * (2 if size == _FLOAT else 3)
    return Parts(weights=params * size, gradients=params * size, optimizer=moments)


@lru_cache(maxsize=1 << 14)
def torch_transient_parts(
    call: Call, *, num_ranks: int = 1, micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    max_decode_rows: int = 512, entropy: bool = False,
) -> Parts:  # fmt: skip
    """What a call adds while it runs; arguments as for `torch_engine_peak`."""
    rows = -(-call.num_sequences // num_ranks)
    if call.kind == "generate":
        return max(_generate(call, rows, max_decode_rows), key=sum)
    packs = {_packed(part) for part in _micro_batches(call, rows, micro_batch_tokens)}
    if call.kind == "train":
        return max((m for pack in packs for m in _train(call, pack, entropy)), key=sum)
    return max((m for pack in packs for m in _forward(call, pack)), key=sum)


# --- one micro-batch ------------------------------------------------------------------------------


class _Row(NamedTuple):
    owner: int
    """Which prompt it answers."""
    prompt: int
    """Tokens."""
    response: int
    """Tokens."""


class _Pack(NamedTuple):
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
    prompts = _spread(call.prompt, -(-count // group), random)
    rows = [
        _Row(at // group, prompts[at // group], response)
        for at, response in enumerate(_spread(call.response, count, random))
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


def _spread(lengths: Lengths, count: int, random: Random) -> list[int]:
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


def _packed(rows: Sequence[_Row]) -> _Pack:
    """Lay rows out: whole, or prompts once and then what each row has of its own.

    The last token of a row is never computed: nothing is read after it.
    """
    lengths = [row.prompt + row.response - 1 for row in rows]
    prompts = list({row.owner: row.prompt for row in rows}.values())
    saved = sum(row.prompt for row in rows) - sum(prompts)
    if saved * 5 < sum(lengths):
        spare = _ALIGN - sum(lengths) % _ALIGN
        rectangles = _rectangles([*lengths, spare], 0)
        return _pack(sum(lengths) + spare, sum(row.response for row in rows), rectangles, [])
    used = sum(lengths) - saved
    spare = _ALIGN - used % _ALIGN
    own = [row.response - 1 for row in rows]
    longest = max(prompts)
    after = [(n, width, longest + width) for n, width, _ in _rectangles(own, 0)]
    causal = _rectangles([*prompts, spare], 0)
    return _pack(used + spare, len(prompts) + sum(own), causal, after)


def _rectangles(lengths: Iterable[int], unit: int) -> list[_Rectangle]:
    """The rectangles that sequences of these lengths attend to themselves in."""
    ordered = sorted(length for length in lengths if length)
    few = 1 if unit else _FEW
    made: list[_Rectangle] = []
    begin = 0
    for end in range(1, len(ordered) + 1):
        last = end == len(ordered)
        if last or _rounded(ordered[end], unit) != _rounded(ordered[end - 1], unit):
            if end - begin < few and not last:
                continue
            widest = _rounded(ordered[end - 1], unit) if unit else ordered[end - 1]
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
) -> _Pack:
    every = [*causal, *masked]
    return _Pack(
        tokens=tokens,
        reads=_up(reads),
        queries=sum(n * q for n, q, _ in every),
        keys=sum(n * k for n, _, k in every),
        masked=sum(math.prod(rectangle) for rectangle in masked),
        largest=max(every, key=math.prod),
    )


def _up(number: int) -> int:
    return -(-number // _ALIGN) * _ALIGN


# --- bytes per token ------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Bytes per token."""

    number: int
    """Bytes of one weight or activation."""
    hidden: int
    """A hidden state."""
    heads: int
    """Queries, or attention's output."""
    keys: int
    """Keys and values together."""
    inner: int
    """One of the feed-forward's four: gate, up, the activated gate, its product with up."""
    norm: int
    """Saved by a norm: its input and the normalized input (float32), its output."""


def _sizes(shape: ModelShape) -> _Sizes:
    number = shape.dtype_bytes
    return _Sizes(
        number=number,
        hidden=shape.hidden_size * number,
        heads=shape.num_heads * shape.head_dim * number,
        keys=2 * shape.num_key_heads * shape.head_dim * number,
        inner=shape.intermediate_size * number,
        norm=shape.hidden_size * (2 * _FLOAT + number),
    )


# --- training -------------------------------------------------------------------------------------


def _train(call: Call, pack: _Pack, entropy: bool) -> list[Parts]:
    """Moments of a train call that may be its peak."""
    shape, s, p = call.model, _sizes(call.model), pack
    params = shape.num_params(call.head)
    exact = s.number == _FLOAT
    # Gradients of 16 bits are added up in float32; the last update's sum is still there.
    sums = 0 if exact else params * _FLOAT
    base = Parts(gradients=sums if call.updates == 1 else 2 * sums)
    attention = (
        p.tokens * s.norm + p.queries * (2 * s.heads + _FLOAT * shape.num_heads)
        + p.keys * s.keys + p.masked * s.number
    )  # fmt: skip
    feed_forward = s.norm + s.heads + 4 * s.inner
    layers = shape.num_layers * attention + (shape.num_layers - 1) * p.tokens * feed_forward
    saved = layers + p.reads * (feed_forward + s.norm) + p.masked
    width = shape.hidden_size
    # Projected and rotated heads of the last layer live until its states are returned.
    projected = p.tokens * (2 * s.heads + 3 * s.keys // 2)
    activations = (
        # Attention of the last layer: keys beside values, outputs in two orders.
        layers + projected + p.tokens * (s.keys + s.heads) + p.queries * s.heads,
        # The final norm, forward and backward.
        saved + projected + (0 if exact else 6) * p.reads * width,
        saved + (12 if exact else 14) * p.reads * width,
        # Backward through the feed-forward's product, in the last layer and in the one before.
        saved + p.reads * (2 * s.inner + s.hidden - s.norm),
        layers - attention + p.tokens * (2 * s.inner + s.hidden),
    )
    moments = [
        base._replace(activations=max(activations)),
        Parts(gradients=sums, optimizer=params * _FLOAT),
        base._replace(gradients=base.gradients + sums),  # a micro-batch's, converted
    ]
    if call.head == "vocabulary":
        cells = p.reads * shape.vocab_size
        forward, backward = (s.number + 12, 20) if entropy else (s.number + 8, 12)
        moments.append(base._replace(activations=saved, logits=cells * max(forward, backward)))
        head = base.gradients + shape.embedding_params * s.number
        moments.append(Parts(gradients=head, activations=saved, logits=cells * (s.number + _FLOAT)))
    return moments


# --- evaluation -----------------------------------------------------------------------------------


def _forward(call: Call, pack: _Pack) -> list[Parts]:
    """Moments of an evaluation that may be its peak."""
    sizes = _sizes(call.model)
    moments = [Parts(activations=_layer(call.model, pack))]
    if call.head == "vocabulary":
        cells = pack.reads * call.model.vocab_size
        hidden = pack.reads * sizes.hidden
        moments.append(Parts(activations=hidden, logits=cells * (sizes.number + 2 * _FLOAT)))
    return moments


def _layer(shape: ModelShape, pack: _Pack) -> int:
    """The working set of a layer without gradients: its attention or its feed-forward."""
    s, p = _sizes(shape), pack
    rows, queries, keys = p.largest
    # Beside the input: projected and rotated heads, and what the layer before made of its own.
    before = s.heads if shape.num_layers > 1 else 0
    held = p.tokens * (s.hidden + 2 * s.heads + 3 * s.keys // 2 + before)
    scores = rows * queries * keys * shape.num_heads * _FLOAT
    mix = max(3 * scores, 2 * scores + rows * (keys * s.keys // 2 + queries * s.heads))
    # Queries in slots, outputs of the other rectangles, and this one's queries once more.
    attention = 2 * p.queries * s.heads + p.tokens * s.keys + rows * keys * s.keys + mix
    feed_forward = p.tokens * (2 * s.hidden + 4 * s.inner)
    return held + max(attention, feed_forward)


# --- generation -----------------------------------------------------------------------------------


def _generate(call: Call, rows: int, max_rows: int) -> list[Parts]:
    """Moments of a generation that may be its peak."""
    shape, s = call.model, _sizes(call.model)
    samples = call.samples_per_prompt
    prompts = max(1, min(-(-rows // samples), max_rows // samples))
    live = _up(prompts * samples)
    group = shape.num_heads // shape.num_key_heads
    least = math.ceil(_SMALL_PRODUCT / (group * shape.head_dim))
    positions = _up(max(call.tokens_longest - 1, least))
    cache = live * positions * shape.num_layers * s.keys
    cells = live * shape.vocab_size

    lengths = _spread(call.prompt, prompts, Random(0))
    spare = _ALIGN - sum(lengths) % _ALIGN
    pack = _pack(sum(lengths) + spare, prompts, _rectangles([*lengths, spare], _ALIGN), [])
    packed = pack.tokens * shape.num_layers * s.keys
    head = pack.reads * shape.vocab_size * s.number
    # One layer's keys in the order of the prompts, then of the rows.
    filling = (live + prompts) * call.prompt.longest * s.keys // 2
    attention = live * positions * shape.num_heads * 3 * _FLOAT
    if s.number != _FLOAT:  # matrix products of 16 bits copy what is not contiguous
        attention += live * positions * s.keys // 2
    step = live * (2 * s.hidden + 3 * s.heads + 2 * s.keys + 4 * s.inner)
    # The logits that follow the prompt live as long as the cache.
    logits = 2 * cells * s.number
    moments = [
        Parts(kv_cache=packed, activations=_layer(shape, pack)),
        Parts(kv_cache=packed + cache, activations=filling, logits=head + cells * s.number),
        Parts(kv_cache=cache, activations=attention + step, logits=logits),
        # Log-probabilities are float32, probabilities and their running sum float64.
        Parts(kv_cache=cache, logits=logits + 20 * cells),
    ]
    if len(call.response.tokens) > 1:
        left = int(_SHRINK * live) // _ALIGN * _ALIGN
        moments.append(Parts(kv_cache=cache + cache * left // live, logits=logits))
    return moments
