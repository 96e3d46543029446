"""The logical parameters of a model: what its weights are called and how large each is.

Names and shapes are those of a Hugging Face checkpoint, whatever an engine stores. Beside each
stands how parallelism may cut it, so that `sharding.py` needs no list of names. Mixtures are named
as in Qwen's checkpoints, one matrix per expert and projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from .model_shape import Head, ModelShape

__all__ = ["LogicalParam", "Place", "adapter_params", "logical_params"]

Place = Literal["layer", "first", "last", "ends"]
"""Which pipeline stages hold it: its layer's, the first, the last, or the first and the last."""


@dataclass(frozen=True, slots=True)
class LogicalParam:
    """One weight.

    Attributes:
        name: The checkpoint's name for it.
        shape: As in the checkpoint: a projection is [outputs, inputs].
        cut_dim: The dimension that tensor parallelism cuts; None if every rank has all of it.
        num_units: Equal parts along `cut_dim` that are never cut: heads, or single rows.
        place: Which pipeline stages hold it.
        layer: Its layer, if `place` is "layer".
        expert: Its expert; None outside a mixture's experts.
    """

    name: str
    shape: tuple[int, ...]
    cut_dim: int | None = None
    num_units: int = 1
    place: Place = "layer"
    layer: int = 0
    expert: int | None = None

    @property
    def num_elements(self) -> int:
        """Weights in it."""
        return prod(self.shape)


def logical_params(model: ModelShape, head: Head = "vocabulary") -> tuple[LogicalParam, ...]:
    """All parameters of a model, embedding first, head last.

    Their sizes add up to `model.num_params(head)`.
    A tied head is the embedding and is not listed; the embedding is then at both ends of the
    pipeline.

    Args:
        model: The sizes.
        head: What the model ends in.
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

    Not counted: what peft adds to a mixture's experts, which are no linear maps in transformers.

    Args:
        model: What they are beside.
        rank: Theirs.
        targets: Ends of the names of the maps that have one; empty for all in the layers.
    """
    maps = [
        p
        for p in logical_params(model)
        if p.place == "layer"
        and len(p.shape) == 2
        and p.expert is None
        and not p.name.endswith(".mlp.gate.weight")
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
        yield from _feed_forward(model, f"{prefix}.mlp", layer, None)
        return
    yield LogicalParam(f"{prefix}.mlp.gate.weight", (model.num_experts, hidden), layer=layer)
    for expert in range(model.num_experts):
        yield from _feed_forward(model, f"{prefix}.mlp.experts.{expert}", layer, expert)


def _feed_forward(
    model: ModelShape, prefix: str, layer: int, expert: int | None
) -> Iterator[LogicalParam]:
    hidden, inner = model.hidden_size, model.intermediate_size
    for name, shape, dim in (
        ("gate_proj", (inner, hidden), 0),
        ("up_proj", (inner, hidden), 0),
        ("down_proj", (hidden, inner), 1),
    ):
        full = f"{prefix}.{name}.weight"
        yield LogicalParam(full, shape, dim, inner, layer=layer, expert=expert)
