"""Memory that a call needs on each device, from shapes alone.

Two sums per device: `resident_parts`, which a call group always holds, and `transient_parts`, which
a call adds while it runs. Both are upper bounds where parts can differ between devices: the worst
pipeline stage counts, and rows count at their greatest length. Call groups that share devices add
their resident parts; their calls take turns.

Sources. Activations: Korthikanti et al. 2022, "Reducing activation recomputation in large
transformer models", sections 4 and 5, without dropout masks, with a gated feed-forward and grouped
queries. Sharded states: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training
trillion parameter models", section 5. Micro-batches in flight: Narayanan et al. 2021, "Efficient
large-scale language model training on GPU clusters using Megatron-LM", section 2.2 (1F1B).

Attention is taken to be fused: no scores are kept. Not modeled: buffers inside
libraries and fragmentation (`DeviceSpec.reserved_bytes` is for them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..formatting import aligned, bytes_text, part_text
from ..inputs.calls import Call
from ..inputs.layout import Layout
from ..inputs.model_shape import Head, ModelShape

# weights move between layouts through two buckets of at most this size, one filled, one sent
BUCKET_BYTES = 256 * 2**20

PREFILL_TOKENS = 8192  # prompt tokens that a generator computes at once

_FLOAT = 4


# --- states ---------------------------------------------------------------------------------------


class _Params(NamedTuple):
    dense: int  # all but experts
    experts: int  # weights of a mixture's experts, which `ep` ranks share
    largest_layer: int  # what ZeRO gathers at once: a layer, or the embedding


def _params(shape: ModelShape, head: Head, layout: Layout) -> _Params:
    return _stage_params(shape, head, layout.tp, layout.pp, layout.ep)


@lru_cache(maxsize=4096)
def _stage_params(shape: ModelShape, head: Head, tp: int, pp: int, ep: int) -> _Params:
    hidden = shape.hidden_size
    layers = -(-shape.num_layers // pp)
    heads = -(-shape.num_heads // tp)
    # With more tensor-parallel ranks than key heads each rank holds one, repeated.
    qkv = (heads + 2 * _key_heads(shape, tp)) * shape.head_dim
    layer = hidden * (qkv + heads * shape.head_dim + 2) + (qkv if shape.qkv_bias else 0)
    layer += 2 * shape.head_dim if shape.qk_norm else 0
    experts = 0
    feed_forward = 3 * hidden * -(-shape.intermediate_size // tp)
    if shape.num_experts:
        layer += hidden * shape.num_experts
        if shape.shared_expert_size:
            layer += 3 * hidden * -(-shape.shared_expert_size // tp) + hidden  # and its gate
        experts = -(-shape.num_experts // ep) * feed_forward
    else:
        layer += feed_forward
    embedding = hidden * -(-shape.vocab_size // tp)
    if pp == 1:
        ends = embedding + hidden
        if head == "scalar":
            ends += hidden
        elif not shape.tied_embeddings:
            ends += embedding
    else:  # a tied embedding is held by both ends of the pipeline
        ends = max(embedding, hidden + (hidden if head == "scalar" else embedding))
    return _Params(layers * layer + ends, layers * experts, max(layer + experts, embedding))


def _key_heads(shape: ModelShape, tp: int) -> int:
    return -(-shape.num_key_heads // tp)


def _states(
    params: _Params, layout: Layout, shape: ModelShape, *, trained: bool
) -> tuple[int, int, int]:
    number = shape.dtype_bytes
    zero = layout.zero if trained else 0
    dense, experts = params.dense, params.experts
    shared = -(-dense // layout.dp)
    if experts:
        shared += -(-experts * layout.ep // layout.dp)
    whole = dense + experts
    weights = (shared if zero == 3 else whole) * number
    if not trained:
        return weights, 0, 0
    if shape.adapter_params:
        # In float32. They are shared out with ZeRO-3 alone, and never cut by tensor parallelism.
        adapters = shape.adapter_params * _FLOAT
        if zero == 3:
            adapters = -(-adapters // layout.dp)
        return weights + adapters, adapters, 2 * adapters
    gradients = (shared if zero >= 2 else whole) * _FLOAT
    # Adam's two moments, and master weights if the weights have 16 bits; all in float32.
    optimizer = (shared if zero >= 1 else whole) * _FLOAT * (2 if number == _FLOAT else 3)
    return weights, gradients, optimizer


def weight_bytes(shape: ModelShape, head: Head, layout: Layout) -> int:
    """Weights of one device of the worst stage, no ZeRO."""
    params = _params(shape, head, layout)
    return (params.dense + params.experts) * shape.dtype_bytes


def resident_parts(call: Call, layout: Layout) -> Parts:
    # The call groups of a frozen role and of a generation hold weights; that of a trained role
    # holds gradients (float32, as they are added up over micro-batches) and optimizer state too. A
    # generation that borrows the weights of the call group that trains them holds nothing: do not
    # ask then. Whether they wait in host memory is not looked at.
    params = _params(call.model, call.head, layout)
    trained = call.trained and call.kind != "generate"
    return Parts(*_states(params, layout, call.model, trained=trained))


# --- calls ----------------------------------------------------------------------------------------


def _whole_logits(call: Call, layout: Layout, tokens: int) -> int:
    if call.head == "scalar":
        return tokens * _FLOAT
    return tokens * -(-call.model.vocab_size // layout.tp) * (call.model.dtype_bytes + 2 * _FLOAT)


@dataclass(frozen=True)
class Computes:
    """Deviations of an engine from the literature's memory counts."""

    saved_bytes: int = 0  # what a layer saves for its backward pass beyond that, for each token
    # call, layout and tokens computed at once -> bytes of their logits and of what is made of them
    logits: Callable[[Call, Layout, int], int] = _whole_logits


def transient_parts(
    call: Call,
    layout: Layout,
    *,
    borrows: bool = False,
    rows: int | None = None,
    computes: Computes = Computes(),
) -> Parts:
    """Bytes per device while a call runs, beside what is resident, by part.

    Args:
        call: The call.
        layout: How it is divided.
        borrows: Whether its weights come for the call alone, and so are not resident.
        rows: Rows that a device generates at once; None for all that the layout gives it.
        computes: Sizes that depend on the engine.
    """
    params = _params(call.model, call.head, layout)
    if call.kind == "generate":
        weights = (params.dense + params.experts) * call.model.dtype_bytes
        # Its own weights are resident, unless they are fetched for this call.
        copy = Parts(weights=weights if borrows else 0)
        rows = rows_at_once(call, layout) if rows is None else rows
        running = copy.plus(_generating(call, layout, rows))
        sent = call.model.adapter_params * _FLOAT or weights
        buckets = 2 * min(BUCKET_BYTES, sent) if call.trained else 0
        # Weights move before the cache is allocated.
        moving = copy._replace(transfer=buckets)
        return running if running.total >= moving.total else moving
    if call.kind == "forward":
        tokens = _micro_batch(call, layout)[0]
        layer = tokens * _per_token(call.model, layout).working
        working = layer, computes.logits(call, layout, tokens)
    else:
        working = _train(call, layout, computes)
    weights, gradients = _gathered(call, layout, params)
    return Parts(weights, gradients, 0, *working)


def _gathered(call: Call, layout: Layout, params: _Params) -> tuple[int, int]:
    weights = gradients = 0
    if call.trained and layout.zero == 3 and layout.dp > 1:
        # The layer at hand and the next one.
        weights = 2 * params.largest_layer * call.model.dtype_bytes
    if call.kind == "train" and layout.zero >= 2 and layout.dp > 1:
        adapters = -(-call.model.adapter_params // call.model.num_layers)
        # Until it is reduced and scattered.
        gradients = (adapters or params.largest_layer) * _FLOAT
    return weights, gradients


def _micro_batch(call: Call, layout: Layout) -> tuple[int, int]:
    rows = -(-call.num_sequences // layout.dp)
    if call.kind == "train":
        rows = -(-rows * call.passes // call.updates)
    size = min(layout.micro_batch, rows)
    return -(-size * call.tokens_longest // layout.cp), -(-rows // size)


def _train(call: Call, layout: Layout, computes: Computes) -> tuple[int, int]:
    shape = call.model
    tokens, count = _micro_batch(call, layout)
    layers = -(-shape.num_layers // layout.pp)
    token = _per_token(shape, layout)
    layer = tokens * (token.saved + computes.saved_bytes)
    kept = layer
    again = 0
    if layout.checkpointing:
        kept, again = tokens * token.hidden, layer
    ahead = min(layout.pp, count) * layers * kept
    logits = computes.logits(call, layout, tokens)
    # The logits are gone when the last layer is computed again.
    last = (layers * kept + again, 0) if again > logits else (layers * kept, logits)
    return (ahead + again, 0) if layout.pp > 1 and ahead + again > sum(last) else last


class _PerToken(NamedTuple):
    hidden: int  # its hidden state between tensor-parallel regions
    # what a layer saves for its backward pass: inputs and outputs of both norms; queries, keys,
    # values and attention's output with a float32 sum per head; gate, up, the activated gate and
    # the product (per chosen expert, with the expert's own input and output)
    saved: int
    working: int  # working set without gradients: input, norm, and the layer's widest block


def _per_token(shape: ModelShape, layout: Layout) -> _PerToken:
    return _token_bytes(shape, layout.tp, layout.sequence_parallel)


@lru_cache(maxsize=4096)
def _token_bytes(shape: ModelShape, tp: int, sequence_parallel: bool) -> _PerToken:
    number = shape.dtype_bytes
    whole = shape.hidden_size * number
    hidden = -(-whole // tp) if sequence_parallel else whole
    heads = -(-shape.num_heads // tp)
    mixing = (2 * heads + 2 * _key_heads(shape, tp)) * shape.head_dim * number
    width = -(-shape.intermediate_size // tp) * number
    inner = 4 * width
    if shape.num_experts:
        # Under sequence parallelism each rank has all tokens, gathered for the layer.
        inner = shape.experts_per_token * (inner + 2 * whole) + shape.num_experts * _FLOAT
        inner += whole - hidden
    chosen = shape.experts_per_token if shape.num_experts else 1
    shared = -(-shape.shared_expert_size // tp) * number
    if shared:
        inner += 4 * shared + whole
    return _PerToken(
        hidden,
        4 * hidden + mixing + heads * _FLOAT + inner,
        2 * hidden + max(mixing, 3 * (chosen * width + shared)),
    )


# --- generation -----------------------------------------------------------------------------------


def _generating(call: Call, layout: Layout, rows: int) -> Parts:
    shape, longest = call.model, call.prompt.longest
    tokens = min(rows * longest, max(PREFILL_TOKENS, longest))
    vocab = -(-shape.vocab_size // layout.tp)
    return Parts(
        kv_cache=kv_bytes(call, layout, rows),
        activations=-(-tokens // layout.cp) * _per_token(shape, layout).working,
        logits=rows * vocab * (shape.dtype_bytes + 2 * _FLOAT),
    )


def rows_at_once(call: Call, layout: Layout) -> int:
    """Rows of one rank of a generation, if all run together."""
    return -(-call.rows_at_once // layout.dp)


def kv_bytes(call: Call, layout: Layout, rows: int) -> int:
    """Key-value cache of a device that generates that many rows together.

    Taken at the decode step where most tokens are held: a row that ends frees its cache at once,
    and samples of one prompt hold its keys each for themselves.
    """
    shape = call.model
    layers = -(-shape.num_layers // layout.pp)
    per_token = 2 * layers * _key_heads(shape, layout.tp) * shape.head_dim * shape.dtype_bytes
    return math.ceil(rows * _held_tokens(call) * per_token / layout.cp)


@lru_cache(maxsize=1024)
def _held_tokens(call: Call) -> float:
    begin = call.stretches[0].rows
    return max(s.rows / begin * (call.prompt.mean + s.before + s.end) for s in call.stretches)


class Parts(NamedTuple):
    """Bytes on one device by what they are for; `sum` is the total."""

    weights: int = 0  # weights, gathered or resharded copies included
    gradients: int = 0  # gradients and the buffers they are added up in
    optimizer: int = 0  # adam's moments, float32 master weights, temporaries of a step
    activations: int = 0  # what the backward pass needs, and the working set of the layer at hand
    logits: int = 0  # logits, log-probabilities and their gradients
    kv_cache: int = 0  # keys and values of the rows being generated
    transfer: int = 0  # buckets that weights move through

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, other: Parts) -> Parts:
        return Parts(*map(int.__add__, self, other))

    def less(self, other: Parts) -> Parts:
        return Parts(*map(int.__sub__, self, other))

    @property
    def largest(self) -> str:
        return max(zip(self, self._fields, strict=True), key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class GroupLedger:
    name: str  # the group
    num_devices: int  # how many devices hold this much each
    resident: Mapping[str, Parts]  # what is always held: call group -> parts
    # what is held while a call runs, in the order of time: call -> parts
    calls: Mapping[str, Parts]

    @property
    def held(self) -> Parts:
        total = Parts()
        for parts in self.resident.values():
            total = total.plus(parts)
        return total

    @property
    def peak(self) -> tuple[str, Parts]:
        """The call that needs most and all that is held then; ("", ...) if no call adds anything.

        Of equal calls the first.
        """
        name, worst = "", Parts()
        for call, parts in self.calls.items():
            if parts.total > worst.total:
                name, worst = call, parts
        return name, self.held.plus(worst)

    def table(self) -> str:
        rows = [(f"always: {call_group}", parts) for call_group, parts in self.resident.items()]
        rows += [(f"while: {call}", parts) for call, parts in self.calls.items()]
        rows.append(("peak", self.peak[1]))
        used = [name for name in Parts._fields if any(getattr(parts, name) for _, parts in rows)]
        lines = [["group", "", *map(part_text, used), "total"]]
        for at, (moment, parts) in enumerate(rows):
            cells = [bytes_text(size) if (size := getattr(parts, n)) else "-" for n in used]
            first = "" if at else f"{self.name} x{self.num_devices}"
            lines.append([first, moment, *cells, bytes_text(parts.total)])
        return "\n".join(aligned(lines, right=range(2, len(used) + 3)))

    def refusal(self, capacity_bytes: int, change: str) -> str:
        """Say what lacks of a capacity that the peak exceeds, and what would make it fit."""
        call, parts = self.peak
        moment = f"during '{call}'" if call else "at rest"
        lacking = parts.total - capacity_bytes
        return (
            f"group '{self.name}' does not fit: {moment} each of its {self.num_devices} devices "
            f"needs {bytes_text(parts.total)}, but roles can use {bytes_text(capacity_bytes)}; "
            f"{bytes_text(lacking)} ({lacking} bytes) are missing. "
            f"The largest part is {part_text(parts.largest)}, "
            f"{bytes_text(getattr(parts, parts.largest))}\n{self.table()}"
            f"\nthe cheapest change that makes it fit: {change}"
        )
