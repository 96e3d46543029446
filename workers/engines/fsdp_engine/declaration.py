"""The FSDP engine as configuration, placement and planner know it.

What a layout's data-parallel ranks are here depends on its ZeRO stage. With stages 2 and 3 they
divide the weights by rows and share out the rows of a call: together they are one rank of a worker
group, of `tp x dp` processes, `dp` of which are shards (see `mesh.py`). With stage 2 what one has
gathered of a layer it keeps until the call ends: gathering once takes the place of gathering in
each micro-batch's forward and backward pass. With stage 0 each of them is a rank that holds
everything.

Processes that share every row (context parallelism) divide the weights with any stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ....planner.cost.engine_model import EngineMemory, EngineModel
from ....planner.cost.memory import Computes, Parts, transient_parts, weight_bytes
from ....planner.inputs.calls import Call, CallKind
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ...training.token_logprob import keeps_logits
from ..engine import EngineKind, usual_options

DIVIDED_FAMILIES = ("llama", "qwen2", "qwen3")
"""The `model_type`s whose matrix products and rows it divides; it divides the weights of any."""

_NAME = "fsdp"
_FLOAT = 4
_AT_ONCE, _IN_FLOAT32 = 1 << 28, 1 << 27
"""Logits of a whole vocabulary that exist at once on a GPU, in the weights' precision and in
float32; on a CPU fewer."""
_SLICES = 1 << 26
"""Those of a divided vocabulary that exist at once in float32."""
_FAMILIES = ", ".join(DIVIDED_FAMILIES)


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if kind == "generate":
        return "FSDP does not generate here"
    if layout.pp > 1:
        return "FSDP has no pipeline stages"
    if layout.zero == 1:
        return "FSDP shares a model's gradients and weights (zero=2 or 3) or nothing"
    if layout.ep > 1:
        return "FSDP does not divide a mixture's experts"
    if layout.sequence_parallel:
        return "FSDP does not cut activations between tensor-parallel regions"
    if shape is not None and 0 < shape.num_experts < _shards(layout):
        return f"FSDP divides {shape.num_experts} experts among at most as many processes"
    if shape is not None and layout.cp > 1 and not _divides(shape):
        return f"FSDP has context parallelism for {_FAMILIES}, not for '{shape.family}'"
    if shape is not None and layout.tp > 1:
        if shape.adapter_params:
            return "FSDP does not divide the matrix products of adapters"
        if not _divides(shape):
            return f"FSDP has tensor parallelism for {_FAMILIES}, not for '{shape.family}'"
        if shape.num_key_heads % layout.tp:
            return f"FSDP cannot divide {shape.num_key_heads} key heads by tp={layout.tp}"
    return None


def _divides(shape: ModelShape) -> bool:
    return not shape.num_experts and (not shape.family or shape.family in DIVIDED_FAMILIES)


def _shards(layout: Layout) -> int:
    return layout.cp * (layout.dp if layout.zero >= 2 else 1)


def _options(layout: Layout) -> Mapping[str, Any]:
    keeps = {"reshard_after_forward": False} if layout.zero == 2 else {}
    divided = {"shards": _shards(layout), "context_parallel": layout.cp}
    return {**usual_options(layout), **divided, **keeps}


class FsdpMemory(EngineMemory):
    """Frozen models are divided by rows as trained ones are.

    Layers are transformers' own, whose norms keep a float32 copy of what comes in. FSDP2 gathers
    two layers at a time; the embedding and the head belong to none and stay whole, with their
    gradients, until the backward pass is over.
    """

    def resident(self, call: Call, layout: Layout) -> Parts:
        # What stage 2 gathers is not held between calls.
        shared = _by_rows(layout)
        held = super().resident(call, shared)
        if call.trained or shared.zero < 2:
            return held
        return held._replace(weights=-(-held.weights // shared.dp))

    def transient(
        self,
        call: Call,
        layout: Layout,
        *,
        on_cpu: bool = True,
        borrows: bool = False,
        rows: int | None = None,
    ) -> Parts:
        # A frozen layer is gathered while it is computed, as others are.
        if call.kind == "generate":
            return super().transient(call, layout, on_cpu=on_cpu, borrows=borrows, rows=rows)
        norms = 2 * _FLOAT * (call.model.hidden_size + 1)
        computes = Computes(saved_bytes=norms, logits=partial(_logits, on_cpu=on_cpu))
        adds = transient_parts(call, layout, computes=computes)
        if layout.cp > 1:
            adds = adds._replace(activations=adds.activations + _others_keys(call, layout))
        shared = _by_rows(layout)
        if shared.zero < 2 or shared.dp == 1:
            return adds._replace(weights=0, gradients=0)
        layer, ends, head = _numbers(call, layout)
        weights = (ends + 2 * layer) * call.model.dtype_bytes
        if layout.zero == 2:
            weights = weight_bytes(call.model, call.head, layout)
        if call.kind != "train":
            return adds._replace(weights=weights, gradients=0)
        number = call.model.dtype_bytes
        if call.model.adapter_params:  # they alone have gradients, in float32
            layer, head, number = -(-call.model.adapter_params // call.model.num_layers), 0, _FLOAT
            ends = 0
        # A gradient is converted to float32 before it is added up over processes.
        during = layer * (number + _FLOAT) + head * number
        last = Parts(weights=weights, gradients=ends * (number + _FLOAT))
        first = adds._replace(weights=weights, gradients=during)
        return max(first, last, key=sum)


def _numbers(call: Call, layout: Layout) -> tuple[int, int, int]:
    """Weights of a layer, of what is in no layer, and of the head, once they are gathered."""
    model = call.model
    one, two = (
        weight_bytes(model.model_copy(update={"num_layers": n}), call.head, layout) for n in (1, 2)
    )
    layer = (two - one) // model.dtype_bytes
    head = -(-model.embedding_params // layout.tp) if call.head == "vocabulary" else 0
    return layer, one // model.dtype_bytes - layer, head


def _logits(call: Call, layout: Layout, tokens: int, *, on_cpu: bool) -> int:
    """Bytes of logits that exist at once, and of slices of them in float32."""
    if call.head == "scalar":
        return tokens * _FLOAT
    words, number = -(-call.model.vocab_size // layout.tp), call.model.dtype_bytes
    if layout.tp > 1:  # all of a divided vocabulary, and their gradient
        return words * (2 * tokens * number + 3 * min(tokens, max(1, _SLICES // words)) * _FLOAT)
    at_once, slices = (min(tokens, max(1, most // words)) for most in (_AT_ONCE, _IN_FLOAT32))
    if on_cpu:
        return words * (at_once * number + 3 * slices * _FLOAT)
    keeps = call.kind == "train" and keeps_logits(tokens * words, number, on_cpu=False)
    return words * (tokens if keeps else at_once) * number


def _by_rows(layout: Layout) -> Layout:
    """A layout of stage 3 with what all processes together hold that divide weights by rows."""
    if layout.cp > 1:
        return layout.model_copy(update={"zero": 3, "dp": _shards(layout), "cp": 1})
    return layout.model_copy(update={"zero": 3}) if layout.zero == 2 else layout


def _others_keys(call: Call, layout: Layout) -> int:
    """Bytes of keys and values of the tokens of a row that other processes compute."""
    model = call.model
    heads = -(-model.num_key_heads // layout.tp)
    # Training keeps those of every layer for the backward pass, unless that computes them again.
    layers = model.num_layers if call.kind == "train" and not layout.checkpointing else 1
    tokens = layout.micro_batch * call.tokens_longest
    others = tokens - tokens // layout.cp
    return layers * others * 2 * heads * model.head_dim * model.dtype_bytes


FSDP = EngineKind(
    planned=EngineModel(
        name=_NAME,
        why_not=_why_not,
        memory=FsdpMemory(),
        # Not 0 as well: roles of one group that divide alike need no processes of their own.
        zero_stages=(2, 3),
        shards_frozen=True,
        sequence_parallel=False,
        reads_responses=True,
        views=True,
    ),
    roles={
        "policy": "penstock.workers.engines.fsdp_engine.specs:FsdpPolicySpec",
        "value": "penstock.workers.engines.fsdp_engine.specs:FsdpValueSpec",
        "reward_model": "penstock.workers.engines.fsdp_engine.specs:FsdpRewardSpec",
    },
    division=lambda layout: (layout.tp * _shards(layout), layout.pp),
    options=_options,
)
