"""The forward pass of Llama, Mistral, Qwen2, Qwen3 and SmolLM3 over packed tokens, all ours.

`LeanBackbone` reads the Hugging Face module's own weights (through `FlatParameters`, which makes
the fused query-key-value and gate-up weights views of the same memory) and serves training,
evaluation and the generator's prompt pass. At small sizes most of the Hugging Face forward is
Python, padding and unfused kernels; here padding is never multiplied, a shared prompt is computed
once, and the last layer's feed-forward runs only where a hidden state is read.

Shapes: N packed tokens, D hidden size, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...models.lora import AdapterDropout
from ...training.flat_parameters import FlatParameters
from ...training.weight_gradients import embedded, linear_map
from .adapters import AdapterCopies, Adapters, adapters_of
from .attention import attend_packed
from .fused import (
    gated,
    gated_linear,
    rms_norm,
    rotate,
    rotate_heads,
    rotate_into,
    sum_later,
    sum_norm,
    sum_norm_linear,
)
from .packing import Pack


def summed(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of each process's part, in place; no gradient passes.

    On a CPU a number's sum does not depend on where in the tensor it stands, as it would with the
    ring of gloo's reduction: a row's result must not depend on the rows beside it.
    """
    if parts.device.type != "cpu" or group.size() == 2:
        dist.all_reduce(parts, group=group)
        return parts
    every = [torch.empty_like(parts) for _ in range(group.size())]
    dist.all_gather(every, parts, group=group)
    torch.add(every[0], every[1], out=parts)
    for part in every[2:]:
        parts += part
    return parts


_FAMILIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SmolLM3Model"}
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


def is_lean(backbone: nn.Module) -> bool:
    """True if `LeanBackbone` computes exactly what this backbone's own forward does."""
    config: Any = getattr(backbone, "config", None)
    if type(backbone).__name__ not in _FAMILIES or config is None:
        return False
    if getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None):
        return False  # Mistral's window, which it applies in every layer
    layer_types: Sequence[str] = getattr(config, "layer_types", None) or []
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if config.hidden_act != "silu":
        return False
    return rope in _STATIC_ROPE and all(kind == "full_attention" for kind in layer_types)


def fused_names(backbone: nn.Module, prefix: str) -> list[tuple[str, ...]]:
    """Names of the parameters `LeanBackbone` wants side by side; `prefix` is the backbone's own."""
    names = {name for name, _ in backbone.named_parameters()}
    groups: list[tuple[str, ...]] = []
    modules = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))
    layers: Any = backbone.layers
    for index in range(len(layers)):
        for block, parts in modules:
            for kind in ("weight", "bias"):
                group = tuple(f"layers.{index}.{block}.{part}.{kind}" for part in parts)
                if names.issuperset(group):
                    groups.append(tuple(prefix + name for name in group))
    return groups


@dataclass(frozen=True)
class Linears:
    """Linear maps of one input, computed as one."""

    weight: Tensor
    bias: Tensor | None
    adapters: Adapters | None

    def of_norm(
        self, x: Tensor, change: Tensor | None, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`x + change`, and the maps of its norm."""
        if self.adapters is None:
            return sum_norm_linear(x, change, norm, eps, self.weight, self.bias)
        x, normed = sum_norm(x, change, norm, eps)
        if self.adapters.joined is not None:
            return x, self.adapters.joined_linear(normed, self.weight, self.bias)
        return x, F.linear(normed, self.weight, self.bias) + self.adapters.added(normed)

    def added_to(
        self, x: Tensor, inputs: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor | None]:
        """Two tensors whose sum is `x` and the maps of the inputs; no second one on a CPU.

        Each process of a group has some of the inputs, and no adapters.
        """
        if group is not None:
            change = summed(F.linear(inputs, self.weight), group)
            more = None if self.bias is None else self.bias.expand_as(change)
        elif self.adapters is not None and self.adapters.joined is not None:
            change, more = self.adapters.joined_linear(inputs, self.weight, self.bias), None
        else:
            change = linear_map(inputs, self.weight, self.bias)
            more = None if self.adapters is None else self.adapters.added(inputs)
        return sum_later(x, change) if more is None else sum_later(x + change, more)


@dataclass(frozen=True)
class LayerWeights:
    """Leaf tensors of one decoder layer."""

    input_norm: Tensor
    qkv: Linears
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linears
    mlp_norm: Tensor
    gate_up: Linears
    down: Linears
    rotates: bool  # Whether queries and keys say where they stand: not in all layers of SmolLM3

    def turns(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return (cos, sin) if self.rotates else (torch.ones_like(cos), torch.zeros_like(sin))


class LeanBackbone:
    """Functional forward over a backbone's weights."""

    def __init__(self, backbone: nn.Module, flat: FlatParameters, prefix: str) -> None:
        # Whether training keeps only each layer's input, and computes the rest again
        self.checkpointing = False
        self._backbone: Any = backbone
        config: Any = backbone.config
        attention: Any = self._backbone.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_key_heads: int = config.num_key_value_heads
        self.scale: float = attention.scaling
        self.eps: float = self._backbone.norm.variance_epsilon
        self.embedding: Tensor = self._backbone.embed_tokens.weight
        self.final_norm: Tensor = self._backbone.norm.weight
        self.layers = [
            _layer_weights(flat, f"{prefix}layers.{i}.", layer)
            for i, layer in enumerate(self._backbone.layers)
        ]
        self._rope: tuple[Tensor, Tensor] | None = None
        self._copies: AdapterCopies | None = None  # of adapters
        self.dropout = AdapterDropout.of(backbone)
        # Processes that divide the matrices, of which this one has its part (`tensor_parallel.py`)
        self.group: dist.ProcessGroup | None = None

    def copy_adapters(self, flat: FlatParameters) -> None:
        """Have a device read copies of 16 bits of the adapters, which lie in `flat`."""
        maps = [
            one
            for layer in self.layers
            for one in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        adapters = [one.adapters for one in maps if one.adapters is not None]
        if self.embedding.dtype != torch.float32 and not self.dropout.share:
            self._copies = AdapterCopies(flat, adapters, self.embedding.dtype)

    def renew_copies(self) -> None:
        """Have copies of adapters follow them; called before they are read."""
        if self._copies is not None:
            self._copies.renew()

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding's rows, [N, D]; of other processes' words they add theirs."""
        if self.group is None:
            return embedded(tokens, self.embedding)
        own = tokens - self.group.rank() * len(self.embedding)
        is_own = (own >= 0) & (own < len(self.embedding))
        rows = F.embedding(own.where(is_own, 0), self.embedding)
        return summed(rows.masked_fill_(~is_own[..., None], 0), self.group)

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine tables of at least `length` positions, each [positions, 1, E/2]."""
        if self._rope is None or len(self._rope[0]) < length:
            size = 1 << max(length - 1, 63).bit_length()
            position = torch.arange(size, device=self.embedding.device)[None]
            with torch.no_grad():
                cos, sin = self._backbone.rotary_emb(self.embedding[:1], position)
            half = self.head_dim // 2
            self._rope = (cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous())
        return self._rope

    def states(self, pack: Pack, caches: Sequence[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Hidden states after the final norm at `pack.read`, [U, D].

        `caches` are a pair of [N, K, E] tensors per layer, which receive keys and values.
        """
        self.renew_copies()
        cos, sin = (table[pack.position] for table in self.rope(pack.longest))
        x: Tensor = self.embed(pack.tokens)
        change: Tensor | None = None
        last = len(self.layers) - 1
        again = self.checkpointing and caches is None and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            read = pack.read if index == last else None
            cache = None if caches is None else caches[index]
            inputs = (x, change, layer, cos, sin, pack, read, cache)
            if again:
                options: Any = {"preserve_rng_state": False, "determinism_check": "none"}
                found: Any = checkpoint(self._whole_layer, *inputs, use_reentrant=False, **options)
                x = found
            else:
                x, change = self._layer(*inputs)
        return self.last_norm(x, change)

    def last_norm(self, x: Tensor, change: Tensor | None) -> Tensor:
        return sum_norm(x, change, self.final_norm, self.eps)[1]

    def _whole_layer(self, *inputs: Any) -> Tensor:
        """A layer's output as one tensor, as long as it is kept."""
        x, change = self._layer(*inputs)
        return x if change is None else x + change

    def _layer(
        self,
        x: Tensor,
        change: Tensor | None,
        layer: LayerWeights,
        cos: Tensor,
        sin: Tensor,
        pack: Pack,
        read: Tensor | None,
        cache: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """A layer's output, [N, D], or at `read` alone; `cache` takes its keys and values.

        Input and output are sums of two tensors, or one (`sum_later`).
        """
        self.dropout.keys = pack.keys
        x, query, key, value = self.project(x, change, layer, cos, sin)
        del change
        if cache is not None:
            cache[0].copy_(key)
            cache[1].copy_(value)
        mixed = attend_packed(query, key, value, pack, self.scale)
        if read is not None:
            mixed, x = mixed[read], x[read]
            self.dropout.keys = None if pack.keys is None else pack.keys[read]
        return self.finish(x, mixed, layer)

    def project(
        self, x: Tensor, change: Tensor | None, layer: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`x + change`, rotated queries [N, H, E] and keys [N, K, E], and values [N, K, E]."""
        heads, keys = self.num_heads, self.num_key_heads
        cos, sin = layer.turns(cos, sin)
        x, qkv = layer.qkv.of_norm(x, change, layer.input_norm, self.eps)
        qkv = qkv.view(len(x), -1, self.head_dim)
        if layer.query_norm is None or layer.key_norm is None:
            return x, *rotate_heads(qkv, cos, sin, heads, keys)
        # split, not slices: its gradient is one concatenation instead of a sum of padded copies.
        query, key, value = qkv.split([heads, keys, keys], dim=1)
        query = rms_norm(query, layer.query_norm, self.eps)
        key = rms_norm(key, layer.key_norm, self.eps)
        return x, rotate(query, cos, sin), rotate(key, cos, sin), value

    def project_into(
        self,
        x: Tensor,
        change: Tensor | None,
        layer: LayerWeights,
        cos: Tensor,
        sin: Tensor,
        caches: tuple[Tensor, Tensor],
        where: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`x + change` and queries of `project`, whose keys and values `rotate_into` caches."""
        heads, keys = self.num_heads, self.num_key_heads
        x, qkv = layer.qkv.of_norm(x, change, layer.input_norm, self.eps)
        qkv = qkv.view(len(x), -1, self.head_dim)
        query, key, value = qkv.split([heads, keys, keys], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, self.eps)
            key = rms_norm(key, layer.key_norm, self.eps)
        return x, rotate_into((query, key, value), *layer.turns(cos, sin), caches, where)

    def finish(self, x: Tensor, mixed: Tensor, layer: LayerWeights) -> tuple[Tensor, Tensor | None]:
        """Output projection, residual and feed-forward; `mixed` is [N, H * E]. See `_layer`."""
        x, change = layer.out.added_to(x, mixed, self.group)
        x, gate_up = layer.gate_up.of_norm(x, change, layer.mlp_norm, self.eps)
        down = layer.down
        if self.group is None and down.adapters is None:
            return sum_later(x, gated_linear(gate_up, down.weight, down.bias))
        return down.added_to(x, gated(gate_up), self.group)


def _layer_weights(flat: FlatParameters, prefix: str, layer: Any) -> LayerWeights:
    def one(name: str) -> Tensor | None:
        full = prefix + name
        return flat.parameter(full) if full in flat.names else None

    def linears(block: str, *parts: str) -> Linears:
        def side_by_side(kind: str) -> Tensor | None:
            names = tuple(f"{prefix}{block}.{part}.{kind}" for part in parts)
            if names[0] not in flat.names:
                return None
            return flat.fused_weight(names) if len(names) > 1 else flat.parameter(*names)

        weight, modules = side_by_side("weight"), getattr(layer, block)
        assert weight is not None
        found = adapters_of([getattr(modules, part) for part in parts])
        return Linears(weight, side_by_side("bias"), found)

    return LayerWeights(
        input_norm=flat.parameter(f"{prefix}input_layernorm.weight"),
        qkv=linears("self_attn", "q_proj", "k_proj", "v_proj"),
        query_norm=one("self_attn.q_norm.weight"),
        key_norm=one("self_attn.k_norm.weight"),
        out=linears("self_attn", "o_proj"),
        mlp_norm=flat.parameter(f"{prefix}post_attention_layernorm.weight"),
        gate_up=linears("mlp", "gate_proj", "up_proj"),
        down=linears("mlp", "down_proj"),
        rotates=bool(getattr(layer.self_attn, "use_rope", True)),
    )
