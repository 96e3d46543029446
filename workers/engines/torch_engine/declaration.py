"""The torch engine as configuration, placement and planner know it, with what it holds at its peak.

The engine keeps all weights, gradients and Adam moments whole on every rank and computes
micro-batches of packed tokens without padding. What is modeled, and found by listing every
tensor alive at the peak of real calls on a CPU:

- Training keeps, per layer, the tensors named in `_Sizes`, or with checkpointing the layer's input
  alone; the last layer's feed-forward runs only where a hidden state is read. The peak is at the
  head (large vocabularies), in the backward pass of one of the last two layers (small ones), or at
  the embedding's gradient (few tokens). Gradients are float32, whatever the weights are.
- Attention is computed in pieces, and so are logits, of which only slices exist in float32.
- Generation holds the cache of all rows decoded at once at their greatest length. Where rows wait,
  their texts are computed beside it. Once none does, rows that ended leave when a fifth has; one
  layer's old and smaller cache then exist together.

Not modeled: of architectures that run through the Hugging Face forward anything but a mixture's
experts, buffers inside libraries, and attention on devices other than CPUs, which is a library's
there. On CUDA devices logits are kept as far as `keeps_logits` says, or more of them exist at once,
none in float32; and a weight's gradient is added to its buffer where it is made.

Shapes: N packed tokens, U positions that are read, M rows decoded at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

from ....planner.cost.engine_model import (
    DEVICE_SHARE,
    EngineMemory,
    EngineModel,
    least_shared,
    tokens_on_device,
)
from ....planner.cost.memory import Parts, weight_bytes
from ....planner.inputs.calls import Call, CallKind, Lengths
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import Head, ModelShape
from ...training.flat_parameters import ADDED_AT_ONCE
from ...training.microbatch import bounded
from ...training.token_logprob import keeps_logits, most_logits
from ..engine import MICRO_BATCH_TOKENS, EngineKind, why_not_as_usual
from .attention import MOST_SCORES
from .packing import ALIGN, by_length, padded_tokens, padded_width, round_up

DIVIDED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""The `model_type`s whose matrices processes divide that generate or evaluate."""

_SIMULATED = 256  # rows sampled to see how micro-batches differ

_Rectangle = tuple[int, int, int]
"""Rows, queries and keys."""


class _Row(NamedTuple):
    owner: int  # Which prompt it answers
    prompt: int  # Tokens
    response: int  # Tokens


_ADAPTER_COPIES = 6
"""Bytes on a GPU for each weight of adapters: in 16 bits, and joined, with zeros between them."""


class PackSizes(NamedTuple):
    """A micro-batch as the engine lays it out."""

    tokens: int  # N
    reads: int  # U, rounded up
    queries: int  # Query slots of all rectangles
    keys: int  # Key slots of all rectangles
    masked: int  # Query-key pairs of rectangles that need an explicit mask
    largest: tuple[int, int, int]  # Rows, queries and keys of the largest rectangle


def expected_packs(
    call: Call, num_ranks: int, micro_batch_tokens: int, *, on_cpu: bool
) -> set[PackSizes]:
    """The different packs of a call's micro-batches on a rank."""
    rows = -(-call.num_sequences // num_ranks)
    cut = _micro_batches(call, rows, micro_batch_tokens)
    return {_packed(part, on_cpu=on_cpu) for part in cut}


def _micro_batches(call: Call, num_rows: int, max_tokens: int) -> list[list[_Row]]:
    """Micro-batches as they come up over many minibatches, of lengths spread as the call says."""
    kept = call.passes / call.updates if call.kind == "train" else 1.0
    group = call.samples_per_prompt
    most = max(1, math.ceil(num_rows * kept))
    distinct = call.prompt.mean / group + call.response.mean
    enough = max(_SIMULATED, 4 * min(most, int(max_tokens / distinct)))
    enough -= enough % most if most < enough else 0  # whole minibatches
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
    for first in range(0, len(chosen), most):
        part = [rows[at] for at in chosen[first : first + most]]
        sizes = [row.prompt + row.response for row in part]
        again = [0, *(b.prompt if a.owner == b.owner else 0 for a, b in pairwise(part))]
        cut = bounded(range(1, len(part) + 1), sizes, again, max_tokens)
        made += [part[begin:end] for begin, end in cut]
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


def _packed(rows: Sequence[_Row], *, on_cpu: bool) -> PackSizes:
    """Lay rows out: whole, or prompts once and then what each row has of its own."""
    # The last token of a row is never computed: nothing is read after it.
    lengths = [row.prompt + row.response - 1 for row in rows]
    prompts = list({row.owner: row.prompt for row in rows}.values())
    saved = sum(row.prompt for row in rows) - sum(prompts)
    if saved < least_shared(on_cpu=on_cpu) * sum(lengths):
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


def _rectangles(lengths: Sequence[int], unit: int) -> list[_Rectangle]:
    """The rectangles that sequences of these lengths attend to themselves in."""
    made: list[_Rectangle] = []
    for rows in by_length(lengths, unit):
        width = padded_width(lengths[rows[-1]], unit)
        made.append((len(rows), width, width))
    return made


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


_ON_DEVICE = (16_384, 8192)
"""Tokens of a micro-batch on a GPU, if they fit."""
_ROW = 1024  # tokens of the rows by which that is found out where no others are known
_DECODE_ROWS = 512  # the generator's own default of `max_decode_rows`
_LEAST_TOKENS, _LEAST_ROWS = 256, 8  # what is suggested where memory is short
_SHRINK = 0.8  # the share of rows that is left when finished ones leave the batch
PREFILL_TOKENS = 1 << 14  # prompts are computed in parts of about so many tokens
# A row's attention is at least this many multiplies: torch has another kernel for fewer.
SMALL_PRODUCT = 400
_FLOAT = 4
_INDEX = 8


class TorchMemory(EngineMemory):
    """Memory of a layout, of which the number of ranks, checkpointing and tp matter.

    Micro-batches and rows decoded at once are the workers' defaults.
    """

    def resident(self, call: Call, layout: Layout) -> Parts:
        parts = torch_resident_parts(call, trains=call.kind != "generate")
        if layout.tp == 1:
            return parts
        return parts._replace(weights=weight_bytes(call.model, call.head, layout))

    def transient(
        self,
        call: Call,
        layout: Layout,
        *,
        on_cpu: bool = True,
        borrows: bool = False,
        rows: int | None = None,
    ) -> Parts:
        # `rows` are those of `max_decode_rows`.
        running = torch_transient_parts(
            _part(call, layout.tp) if layout.tp > 1 else call,
            num_ranks=layout.dp,
            checkpointing=layout.checkpointing,
            on_cpu=on_cpu,
        )
        if not borrows:
            return running
        copy = weight_bytes(call.model, call.head, layout)
        return running._replace(weights=running.weights + copy)

    def packed(self, call: Call, layout: Layout, micro_batch_tokens: int) -> Parts:
        return torch_transient_parts(
            _part(call, layout.tp) if layout.tp > 1 else call,
            num_ranks=layout.dp,
            micro_batch_tokens=micro_batch_tokens,
            checkpointing=layout.checkpointing,
            on_cpu=False,
        )


@lru_cache(maxsize=1 << 10)
def _part(call: Call, tensor: int) -> Call:
    """The call as one of the processes computes it that divide the matrices."""
    model = call.model
    sizes = ("num_heads", "num_key_heads", "intermediate_size", "vocab_size")
    cut = {name: -(-getattr(model, name) // tensor) for name in sizes}
    return replace(call, model=model.model_copy(update=cut))


class TorchSaving:
    """A `MemorySaving`."""

    def transient(self, call: Call, num_ranks: int, options: Mapping[str, Any]) -> Parts:
        return torch_transient_parts(
            call,
            num_ranks=num_ranks,
            micro_batch_tokens=options.get("micro_batch_tokens") or MICRO_BATCH_TOKENS,
            max_decode_rows=options.get("max_decode_rows", _DECODE_ROWS),
            checkpointing=options.get("activation_checkpointing", False),
        )

    def for_training(self, options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        # Activations computed again, then ever smaller micro-batches.
        again = {"activation_checkpointing": True}
        tokens = int(options.get("micro_batch_tokens") or MICRO_BATCH_TOKENS)
        yield again
        while tokens >= 2 * _LEAST_TOKENS:
            tokens //= 2
            yield {**again, "micro_batch_tokens": tokens}

    def for_generating(self, options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        # Ever fewer rows at once.
        rows = int(options.get("max_decode_rows", _DECODE_ROWS))
        while rows >= 2 * _LEAST_ROWS:
            rows //= 2
            yield {"max_decode_rows": rows}


def torch_resident_parts(call: Call, *, trains: bool = True) -> Parts:
    """Bytes of what every rank has whole between calls, once it has trained if it does."""
    params, size = call.model.num_params(call.head), call.model.dtype_bytes
    adapters = call.model.adapter_params * _FLOAT
    if not (call.trained and trains):
        return Parts(weights=params * size + adapters)
    if adapters:
        return Parts(params * size + adapters, gradients=adapters, optimizer=2 * adapters)
    # Weights of 16 bits have a float32 master copy.
    moments = params * _FLOAT * (2 if size == _FLOAT else 3)
    return Parts(weights=params * size, gradients=params * _FLOAT, optimizer=moments)


@lru_cache(maxsize=1 << 14)
def torch_transient_parts(
    call: Call, *, num_ranks: int = 1, micro_batch_tokens: int = MICRO_BATCH_TOKENS,
    max_decode_rows: int = _DECODE_ROWS, checkpointing: bool = False, on_cpu: bool = True,
) -> Parts:  # fmt: skip
    """Bytes that a call adds while it runs: the largest of its moments."""
    copies = Parts(0 if on_cpu else _ADAPTER_COPIES * call.model.adapter_params)
    if call.kind == "generate":
        rows = -(-call.num_sequences // num_ranks)
        return max(_generate(call, rows, max_decode_rows), key=sum).plus(copies)
    moments: list[Parts] = []
    for pack in expected_packs(call, num_ranks, micro_batch_tokens, on_cpu=on_cpu):
        if call.kind == "train":
            moments += _train(call, pack, checkpointing, on_cpu)
        else:
            moments += _forward(call, pack, on_cpu)
    return max(moments, key=sum).plus(copies)


# --- bytes per token ------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Bytes per token."""

    number: int  # Bytes of one weight or activation
    hidden: int  # A hidden state
    heads: int  # Queries, or attention's output
    keys: int  # Keys, or values
    inner: int  # Gate, up, or their product; of all experts that compute the token
    routed: int  # A hidden state for each of these experts, if the model is a mixture
    # Whether adapters are trained, whose inputs are kept: a normed state, and the product
    adapted: bool

    @property
    def attention(self) -> int:
        """A layer's input, projected heads, rotated ones, and what attention makes of them."""
        return self.hidden * (2 if self.adapted else 1) + 3 * (self.heads + self.keys)

    @property
    def feed_forward(self) -> int:
        """Its input, gate and up."""
        kept = self.hidden + 2 * self.inner
        if self.routed:
            # transformers' `grouped_mm_experts_forward` keeps the activated gate and the product
            # too, and what goes into and comes out of each expert.
            kept += 2 * self.inner + 2 * self.routed
        return kept + self.hidden + self.inner if self.adapted else kept


def _sizes(shape: ModelShape) -> _Sizes:
    number, chosen = shape.dtype_bytes, shape.experts_per_token
    inner = max(chosen, 1) * shape.intermediate_size + shape.shared_expert_size
    return _Sizes(
        number=number,
        hidden=shape.hidden_size * number,
        heads=shape.num_heads * shape.head_dim * number,
        keys=shape.num_key_heads * shape.head_dim * number,
        inner=inner * number,
        routed=chosen * shape.hidden_size * number,
        adapted=shape.adapter_params > 0,
    )


def _indices(shape: ModelShape, pack: PackSizes) -> int:
    """Bytes of where the heads of tokens stand, and of what each token's rotation is."""
    heads = shape.num_heads * (pack.queries + pack.tokens)
    keys = shape.num_key_heads * (pack.keys + pack.tokens)
    return _INDEX * (heads + keys) + pack.masked + pack.tokens * shape.head_dim * shape.dtype_bytes


def _scores(shape: ModelShape, pack: PackSizes) -> int:
    """A piece of attention's scores, and twice what is made of it."""
    rows, queries, keys = pack.largest
    each = shape.num_heads * queries * keys
    return 3 * _FLOAT * min(rows * each, max(MOST_SCORES, shape.num_heads * keys * ALIGN))


def _head(
    shape: ModelShape, pack: PackSizes, *, on_cpu: bool, trains: bool = False
) -> tuple[int, int]:
    """Bytes of the logits that exist at once, and of a slice of them in float32."""
    every = pack.reads * shape.vocab_size
    if trains and keeps_logits(every, shape.dtype_bytes, on_cpu=on_cpu):
        return every * shape.dtype_bytes, 0
    at_once, in_float32 = (
        min(pack.reads, max(1, most // shape.vocab_size)) * shape.vocab_size
        for most in most_logits(on_cpu=on_cpu)
    )
    return at_once * shape.dtype_bytes, in_float32 * _FLOAT if on_cpu else 0


# --- training -------------------------------------------------------------------------------------


def _train(call: Call, pack: PackSizes, checkpointing: bool, on_cpu: bool) -> list[Parts]:
    shape, s, p = call.model, _sizes(call.model), pack
    embedding = _gradient(shape, shape.embedding_params, on_cpu)
    # The gradient of a head that is also the embedding waits for that of the embedding.
    tied = embedding if call.head == "vocabulary" and shape.tied_embeddings else 0
    whole = s.attention + s.feed_forward
    kept = p.tokens * (s.hidden if checkpointing else whole)
    below = _indices(shape, p) + (shape.num_layers - 1) * kept
    last = p.tokens * s.attention + p.reads * (s.heads + s.feed_forward)
    moments = [
        Parts(
            gradients=tied, activations=below + last + _feed_forward_back(shape, p.reads, on_cpu)
        ),
        Parts(
            gradients=tied, activations=below + p.tokens * s.attention + _attention_back(shape, p)
        ),
        Parts(gradients=max(tied + embedding, _handed_over(embedding, s.number))),
    ]
    if shape.num_layers > 1:
        before = below - kept + p.tokens * whole + _feed_forward_back(shape, p.tokens, on_cpu)
        moments.append(Parts(gradients=tied, activations=before))
    if call.head == "vocabulary":
        states = 3 * p.reads * s.hidden  # before and after the norm, and the latter's gradient
        saved = below + (p.tokens * s.hidden if checkpointing else last) + states
        logits, sliced = _head(shape, p, on_cpu=on_cpu, trains=True)
        slices = 2 if s.number == _FLOAT else 3
        total, ending = embedding, tied or _handed_over(embedding, s.number)
        if s.number != _FLOAT and logits < p.reads * shape.vocab_size * s.number:
            # Pieces of the head's gradient are added up in float32, and then converted.
            total = embedding // s.number * _FLOAT
            ending = max(ending, total + embedding)
        moments += [
            Parts(gradients=total, activations=saved, logits=logits + slices * sliced),
            Parts(gradients=ending, activations=saved),
        ]
    return moments


def _gradient(shape: ModelShape, params: int, on_cpu: bool) -> int:
    """Bytes of the gradient of so many weights before it is added to the buffer."""
    is_lean = shape.family in ("", *DIVIDED_FAMILIES) and not shape.num_experts
    # Below adapters no weight has one, and on a CUDA device the product adds it.
    return 0 if shape.adapter_params or (is_lean and not on_cpu) else params * shape.dtype_bytes


def _feed_forward_back(shape: ModelShape, tokens: int, on_cpu: bool) -> int:
    """Bytes that the backward pass through a layer's feed-forward adds to what was kept of it."""
    s = _sizes(shape)
    # All experts of a layer are one parameter, and have one gradient.
    params = max(shape.num_experts, 1) * shape.hidden_size * shape.intermediate_size
    weight = _gradient(shape, params, on_cpu)
    ending = _handed_over(2 * weight, s.number)  # in the place of gate and up
    return tokens * s.hidden + max(tokens * (4 * s.inner + s.routed) + weight, ending)


def _handed_over(gradient: int, number: int) -> int:
    """A weight's gradient while it is added to the buffer, converted to float32 if it has to be."""
    params = gradient // number
    return gradient if number == _FLOAT else gradient + min(params, ADDED_AT_ONCE) * _FLOAT


def _attention_back(shape: ModelShape, pack: PackSizes) -> int:
    s, p = _sizes(shape), pack
    rows, queries, keys = p.largest
    held = p.tokens * (s.hidden + 2 * s.heads + 2 * s.keys)
    gathered = 2 * rows * (queries * s.heads + keys * s.keys)
    changes = p.queries * s.heads + 2 * p.keys * s.keys
    ending = p.tokens * s.heads + max(p.queries * s.heads, (2 * p.tokens + p.keys) * s.keys)
    return held + gathered + changes + max(ending, _scores(shape, p))


# --- evaluation -----------------------------------------------------------------------------------


def _forward(call: Call, pack: PackSizes, on_cpu: bool) -> list[Parts]:
    moments = [Parts(activations=_layer(call.model, pack))]
    if call.head == "vocabulary":
        logits, sliced = _head(call.model, pack, on_cpu=on_cpu)
        sizes = _sizes(call.model)
        slices = 1 if sizes.number == _FLOAT else 2
        hidden = 2 * pack.reads * sizes.hidden
        moments.append(Parts(activations=hidden, logits=logits + slices * sliced))
    return moments


def _layer(shape: ModelShape, pack: PackSizes) -> int:
    """The working set of a layer without gradients: its attention or its feed-forward."""
    s, p = _sizes(shape)._replace(adapted=False), pack
    rows, queries, keys = p.largest
    held = _indices(shape, p) + p.tokens * (s.attention - s.heads)
    gathered = rows * (queries * s.heads + 2 * keys * s.keys)
    outputs = p.tokens * (s.heads + 2 * s.keys) + p.queries * s.heads
    ending = p.queries * s.heads + p.tokens * s.heads
    attention = outputs + gathered + max(ending, rows * queries * s.heads + _scores(shape, p))
    tokens = p.tokens if shape.num_layers > 1 else p.reads
    feed_forward = tokens * (2 * (s.hidden + s.routed) + 3 * s.inner)
    return held + max(attention, p.tokens * s.heads + feed_forward)


# --- generation -----------------------------------------------------------------------------------


def _generate(call: Call, rows: int, max_rows: int) -> list[Parts]:
    shape, s = call.model, _sizes(call.model)
    samples = call.samples_per_prompt
    at_once = min(rows, max_rows)
    prompts = max(1, -(-at_once // samples))
    live = round_up(at_once)
    group = shape.num_heads // shape.num_key_heads
    least = math.ceil(SMALL_PRODUCT / (group * shape.head_dim))
    positions = round_up(max(call.tokens_longest - 1, least))
    cache = live * positions * shape.num_layers * 2 * s.keys
    cells = live * shape.vocab_size

    lengths = spread(call.prompt, prompts, Random(0))
    parts = -(-sum(lengths) // PREFILL_TOKENS)
    part = lengths[: -(-prompts // parts)]
    tokens = padded_tokens(sum(part) + 1)
    pack = _pack(tokens, len(part), _rectangles([*part, tokens - sum(part)], ALIGN), [])
    packed = pack.tokens * shape.num_layers * 2 * s.keys
    head = pack.reads * shape.vocab_size * s.number
    # One layer's keys in the order of the prompts, then of the rows.
    filling = (live + prompts) * call.prompt.longest * s.keys
    attention = live * positions * shape.num_heads * 3 * _FLOAT
    if s.number != _FLOAT:  # matrix products of 16 bits copy what is not contiguous
        attention += live * positions * s.keys
    step = live * (2 * (s.hidden + s.routed) + 3 * s.heads + 4 * s.keys + 4 * s.inner)
    logits = cells * s.number
    moments = [
        Parts(kv_cache=packed, activations=_layer(shape, pack)),
        Parts(kv_cache=packed + cache, activations=filling, logits=head + cells * s.number),
        Parts(kv_cache=cache, activations=attention + step, logits=logits),
        # Log-probabilities are float32, probabilities and their running sum float64.
        Parts(kv_cache=cache, logits=logits + 20 * cells),
    ]
    if parts > 1 or rows > max_rows:  # texts are computed while a cache is there
        moments.append(
            Parts(kv_cache=packed + cache, activations=_layer(shape, pack), logits=logits)
        )
    if len(call.response.tokens) > 1:  # rows that leave: one layer's cache is copied at a time
        left = int(_SHRINK * live) // ALIGN * ALIGN
        copied = cache * left // live // shape.num_layers
        moments.append(Parts(kv_cache=cache + copied, logits=logits))
    return moments


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    shares = layout.zero > 0 and kind != "generate"
    alone = layout.num_devices == layout.dp * layout.tp and layout.ep == 1
    if not alone or shares or (layout.tp > 1 and kind == "train"):
        return "the torch engine runs data-parallel only"
    if shape is not None and layout.tp > 1:
        if shape.adapter_params:
            return "the torch engine does not divide the matrix products of adapters"
        if shape.num_experts or shape.family not in ("", *DIVIDED_FAMILIES):
            families = ", ".join(DIVIDED_FAMILIES)
            return f"the torch engine divides models of {families}, not of '{shape.family}'"
        if shape.num_key_heads % layout.tp:
            return f"the torch engine cannot divide {shape.num_key_heads} key heads by {layout.tp}"
    return why_not_as_usual("torch", layout, kind)


def _packs_on_device(shape: ModelShape) -> tuple[int, ...]:
    # Others go through transformers, whose layers and logits hold more.
    packs = shape.family in DIVIDED_FAMILIES and not shape.num_experts
    return _ON_DEVICE if packs else ()


def tokens_alone(
    shape: ModelShape, head: Head, *, trained: bool, checkpointing: bool, device_bytes: int
) -> int:
    """Tokens of the micro-batches of a model that has a GPU of that size for itself."""
    call = Call(
        name="",
        role="",
        kind="train" if trained else "forward",
        model=shape,
        head=head,
        trained=trained,
        num_sequences=max(_ON_DEVICE) // _ROW,
        prompt=Lengths.constant(1),
        response=Lengths.constant(_ROW - 1),
    )
    room = int(DEVICE_SHARE * device_bytes) - torch_resident_parts(call).total
    layout = Layout(checkpointing=checkpointing)
    return tokens_on_device(TORCH.planned, [(call, layout)], room) or MICRO_BATCH_TOKENS


def _computes(model: Any) -> str:
    from .backbone import is_lean

    return "by Penstock" if is_lean(model.base_model) else "through transformers"


TORCH = EngineKind(
    planned=EngineModel(
        name="torch",
        why_not=_why_not,
        memory=TorchMemory(),
        zero_stages=(0,),
        sequence_parallel=False,
        packs_tokens=MICRO_BATCH_TOKENS,
        packs_on_device=_packs_on_device,
        shares_prompts=True,
        reads_responses=True,
        draws_minibatches=True,
        head_products=(4, 3),
        generates_in_place=True,
        views=True,
        divides_conversations=True,
    ),
    roles={
        "policy": "penstock.workers.engines.torch_engine.specs:TorchPolicySpec",
        "value": "penstock.workers.engines.torch_engine.specs:TorchValueSpec",
        "reward_model": "penstock.workers.engines.torch_engine.specs:TorchRewardModelSpec",
        "process_reward": "penstock.workers.rewards.process_reward:TorchProcessRewardSpec",
    },
    rollout="penstock.workers.engines.torch_engine.specs:TorchGeneratorSpec",
    generates=True,
    saving=TorchSaving(),
    computes=_computes,
)
