"""The logical parameters of a model: what its weights are called and how large each is.

Names and shapes are those of a Hugging Face module, whatever an engine stores. Beside each stands
how parallelism may cut it, so that `sharding.py` needs no list of names. All experts of a layer are
one parameter, as in the module; in a checkpoint's files each has matrices of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from .model_shape import Head, ModelShape

# which pipeline stages hold it: its layer's, the first, the last, or the first and the last
Place = Literal["layer", "first", "last", "ends"]


@dataclass(frozen=True, slots=True)
class LogicalParam:
    """One weight."""

    name: str  # the module's name for it
    shape: tuple[int, ...]  # as in the module: a projection is [outputs, inputs]
    # the dimension that tensor parallelism cuts; None if every rank has all of it
    cut_dim: int | None = None
    num_units: int = 1  # equal parts along `cut_dim` that are never cut: heads, or single rows
    place: Place = "layer"  # which pipeline stages hold it
    layer: int = 0  # its layer, if `place` is "layer"
    by_expert: bool = False  # whether its first dimension is a mixture's experts
    # equal blocks along `cut_dim` of `num_units` each that are cut alike, so that a rank has a part
    # of each: gate and up projections in one matrix
    num_blocks: int = 1

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def logical_params(model: ModelShape, head: Head = "vocabulary") -> tuple[LogicalParam, ...]:
    """All parameters of a model, embedding first, head last.

    Their sizes add up to `model.num_params(head)`.
    A tied head is the embedding and is not listed; the embedding is then at both ends of the
    pipeline.
    """
    hidden, vocab = model.hidden_size, model.vocab_size
    shares = head == "vocabulary" and model.tied_embeddings
    table = (vocab, hidden)
    params = [
        LogicalParam("model.embed_tokens.weight", table, 0, vocab, "ends" if shares else "first")
    ]
    for layer in range(model.num_layers):
        params += _layer(model, layer)
    params.append(LogicalParam("model.norm.weight", (hidden,), place="last"))
    if head == "scalar":
        params.append(LogicalParam("score.weight", (1, hidden), place="last"))
    elif not shares:
        params.append(LogicalParam("lm_head.weight", table, 0, vocab, "last"))
    return tuple(params)


def adapter_params(model: ModelShape, rank: int, targets: Sequence[str] = ()) -> int:
    """Weights of low-rank adapters: A [rank, in] and B [out, rank] of each linear map.

    Not counted: a mixture's experts and router, which are no linear maps in transformers.
    """
    maps = [
        p
        for p in logical_params(model)
        if p.place == "layer" and len(p.shape) == 2 and not p.name.endswith(".mlp.gate.weight")
    ]
    return sum(rank * sum(p.shape) for p in maps if _is_target(p.name, targets))


def _is_target(name: str, targets: Sequence[str]) -> bool:
    full = f".{name.removesuffix('.weight')}"
    return not targets or any(full.endswith(f".{target}") for target in targets)


def _layer(model: ModelShape, layer: int) -> Iterator[LogicalParam]:
    prefix, hidden = f"model.layers.{layer}", model.hidden_size
    yield LogicalParam(f"{prefix}.input_layernorm.weight", (hidden,), layer=layer)
    heads = {"q": model.num_heads, "k": model.num_key_heads, "v": model.num_key_heads}
    for letter, num_heads in heads.items():
        name, width = f"{prefix}.self_attn.{letter}_proj", num_heads * model.head_dim
        yield LogicalParam(f"{name}.weight", (width, hidden), 0, num_heads, layer=layer)
        if model.qkv_bias:
            yield LogicalParam(f"{name}.bias", (width,), 0, num_heads, layer=layer)
    for letter in "qk" if model.qk_norm else "":
        name = f"{prefix}.self_attn.{letter}_norm.weight"
        yield LogicalParam(name, (model.head_dim,), layer=layer)
    shape = (hidden, model.num_heads * model.head_dim)
    yield LogicalParam(f"{prefix}.self_attn.o_proj.weight", shape, 1, model.num_heads, layer=layer)
    yield LogicalParam(f"{prefix}.post_attention_layernorm.weight", (hidden,), layer=layer)
    if not model.num_experts:
        yield from _feed_forward(f"{prefix}.mlp", hidden, model.intermediate_size, layer)
        return
    yield from _mixture(model, f"{prefix}.mlp", layer)


def _mixture(model: ModelShape, prefix: str, layer: int) -> Iterator[LogicalParam]:
    number, hidden, inner = model.num_experts, model.hidden_size, model.intermediate_size
    yield LogicalParam(f"{prefix}.gate.weight", (number, hidden), layer=layer)
    fused, experts = (number, 2 * inner, hidden), f"{prefix}.experts"
    yield LogicalParam(
        f"{experts}.gate_up_proj", fused, 1, inner, layer=layer, by_expert=True, num_blocks=2
    )
    shape = (number, hidden, inner)
    yield LogicalParam(f"{experts}.down_proj", shape, 2, inner, layer=layer, by_expert=True)
    if model.shared_expert_size:
        shared = f"{prefix}.shared_expert"
        yield from _feed_forward(shared, hidden, model.shared_expert_size, layer)
        yield LogicalParam(f"{shared}_gate.weight", (1, hidden), layer=layer)


def _feed_forward(prefix: str, hidden: int, inner: int, layer: int) -> Iterator[LogicalParam]:
    for name, shape, dim in (
        ("gate_proj", (inner, hidden), 0),
        ("up_proj", (inner, hidden), 0),
        ("down_proj", (hidden, inner), 1),
    ):
        yield LogicalParam(f"{prefix}.{name}.weight", shape, dim, inner, layer=layer)
