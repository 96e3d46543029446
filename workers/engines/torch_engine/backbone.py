"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 over packed tokens, all of it ours.

`LeanBackbone` reads the Hugging Face module's own weights (through `FlatParameters`, which makes
the fused query-key-value and gate-up weights views of the same memory) and serves training,
evaluation and the generator's prompt pass. At small sizes most of the Hugging Face forward is
Python, padding and unfused kernels; here padding is never multiplied, a shared prompt is computed
once, and the last layer's feed-forward runs only where a hidden state is read.

Shapes: N packed tokens, D hidden size, H query heads, K key heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...training.flat_parameters import FlatParameters
from .adapters import Adapters, adapters_of, added
from .attention import attend_packed
from .packing import Pack


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)`, [N, D] (Zhang and Sennrich 2019, equation 4)."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[assignment]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        normed, scale = _normed(x, ctx.eps)
        return *_before_norm(grads[0], normed, scale, weight, ctx.needs_input_grad[1]), None


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps)` in float32, and what `x` was multiplied by."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale, scale


def _before_norm(
    upstream: Tensor, normed: Tensor, scale: Tensor, weight: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a norm's input and, if needed, weight; `normed` is overwritten."""
    dtype = upstream.dtype
    upstream = upstream.float()
    to_weight = (upstream * normed).sum(0).to(weight.dtype) if needs_weight else None
    upstream = upstream * weight
    along = (upstream * normed).sum(-1, keepdim=True).div_(normed.shape[-1])
    return upstream.sub_(normed.mul_(along)).mul_(scale).to(dtype), to_weight


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear(rms_norm(x, norm, eps), weight, bias)`, which keeps `x` alone."""
    out: Tensor = _NormLinear.apply(x, norm, eps, weight, bias)  # type: ignore[assignment]
    return out


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, norm, weight)
        ctx.eps = eps
        return F.linear(F.rms_norm(x, (x.shape[-1],), norm, eps), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight = ctx.saved_tensors
        needs_norm, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (1, 3, 4))
        normed, scale = _normed(x, ctx.eps)
        to_weight = grads[0].t() @ (normed * norm).to(x.dtype) if needs_weight else None
        to_bias = grads[0].sum(0) if needs_bias else None
        to_x, to_norm = _before_norm(grads[0] @ weight, normed, scale, norm, needs_norm)
        return to_x, to_norm, None, to_weight, to_bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split order.

    Args:
        x: [N, heads, E].
        cos: [N, 1, E / 2].
        sin: Likewise.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[assignment]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty_like(x)
    left, right = x.chunk(2, dim=-1)
    to_left, to_right = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=to_left).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=to_right).addcmul_(left, sin, value=sign)
    return out


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [N, 2 * I], the gate first (Shazeer 2020, "GLU variants", SwiGLU)."""
    out: Tensor = _Gated.apply(gate_up)  # type: ignore[assignment]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _product(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _before_product(grads[0], gate_up)


def _product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _before_product(upstream: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    change = torch.empty_like(gate_up)
    to_gate, to_up = change.chunk(2, dim=-1)
    torch.mul(upstream, F.silu(gate), out=to_up)
    backward: Any = torch.ops.aten.silu_backward.grad_input
    backward(upstream * up, gate, grad_input=to_gate)
    return change


def gated_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear(gated(gate_up), weight, bias)`, which keeps `gate_up` alone."""
    out: Tensor = _GatedLinear.apply(gate_up, weight, bias)  # type: ignore[assignment]
    return out


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return F.linear(_product(gate_up), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        to_weight = grads[0].t() @ _product(gate_up) if ctx.needs_input_grad[1] else None
        to_bias = grads[0].sum(0) if ctx.needs_input_grad[2] else None
        return _before_product(grads[0] @ weight, gate_up), to_weight, to_bias


_FAMILIES = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
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
class LayerWeights:
    """Leaf tensors of one decoder layer."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    qkv_adapters: Adapters | None
    out_adapters: Adapters | None
    gate_up_adapters: Adapters | None
    down_adapters: Adapters | None


class LeanBackbone:
    """Functional forward over a backbone's weights.

    Args:
        backbone: A backbone for which `is_lean` is true.
        flat: Holds its weights, laid out with `fused_names(backbone, prefix)` side by side.
        prefix: What the backbone's parameters are called in `flat`: "model.".

    Attributes:
        checkpointing: Whether training keeps only each layer's input, and computes the rest again.
    """

    def __init__(self, backbone: nn.Module, flat: FlatParameters, prefix: str) -> None:
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

        Args:
            pack: What to compute; positions must be within the model's reach.
            caches: If given, a pair of [N, K, E] tensors per layer which receive keys and values.
        """
        cos, sin = (table[pack.position] for table in self.rope(pack.longest))
        x = F.embedding(pack.tokens, self.embedding)
        last = len(self.layers) - 1
        again = self.checkpointing and caches is None and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            read = pack.read if index == last else None
            cache = None if caches is None else caches[index]
            if again:
                x = _computed_again(self._layer, x, layer, cos, sin, pack, read, cache)
            else:
                x = self._layer(x, layer, cos, sin, pack, read, cache)
        return rms_norm(x, self.final_norm, self.eps)

    def _layer(
        self,
        x: Tensor,
        layer: LayerWeights,
        cos: Tensor,
        sin: Tensor,
        pack: Pack,
        read: Tensor | None,
        cache: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """A layer's output, [N, D], or at `read` alone; `cache` takes its keys and values."""
        query, key, value = self.project(x, layer, cos, sin)
        if cache is not None:
            cache[0].copy_(key)
            cache[1].copy_(value)
        mixed = attend_packed(query, key, value, pack, self.scale)
        if read is not None:
            mixed, x = mixed[read], x[read]
        return self.finish(x, mixed, layer)

    def project(
        self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, E] and keys [N, K, E], and values [N, K, E]."""
        heads, keys = self.num_heads, self.num_key_heads
        qkv = self._normed(x, layer.input_norm, layer.qkv, layer.qkv_bias, layer.qkv_adapters)
        qkv = qkv.view(len(x), -1, self.head_dim)
        if layer.query_norm is None or layer.key_norm is None:
            both, value = qkv.split([heads + keys, keys], dim=1)
            query, key = rotate(both, cos, sin).split([heads, keys], dim=1)
            return query, key, value
        # split, not slices: its gradient is one concatenation instead of a sum of padded copies.
        query, key, value = qkv.split([heads, keys, keys], dim=1)
        query = rms_norm(query, layer.query_norm, self.eps)
        key = rms_norm(key, layer.key_norm, self.eps)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def finish(self, x: Tensor, mixed: Tensor, layer: LayerWeights) -> Tensor:
        """Output projection, residual and feed-forward; `mixed` is [N, H * E]."""
        x = x + F.linear(mixed, layer.out, layer.out_bias)
        if layer.out_adapters is not None:
            x = x + added(mixed, layer.out_adapters)
        gate_up = self._normed(
            x, layer.mlp_norm, layer.gate_up, layer.gate_up_bias, layer.gate_up_adapters
        )
        if layer.down_adapters is None:
            return x + gated_linear(gate_up, layer.down, layer.down_bias)
        product = gated(gate_up)
        return (
            x + F.linear(product, layer.down, layer.down_bias) + added(product, layer.down_adapters)
        )

    def _normed(
        self,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapters: Adapters | None,
    ) -> Tensor:
        """Linear map of the norm of `x`."""
        if adapters is None:
            return norm_linear(x, norm, self.eps, weight, bias)
        normed = rms_norm(x, norm, self.eps)
        return F.linear(normed, weight, bias) + added(normed, adapters)


def _computed_again(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """A layer of which only the input is kept for the backward pass, which computes it again."""
    out: Any = checkpoint(
        layer, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
    )
    return out


def _layer_weights(flat: FlatParameters, prefix: str, layer: Any) -> LayerWeights:
    def one(name: str) -> Tensor | None:
        full = prefix + name
        return flat.parameter(full) if full in flat.names else None

    def needed(name: str) -> Tensor:
        return flat.parameter(prefix + name)

    def fused(block: str, parts: Sequence[str], kind: str) -> Tensor | None:
        names = tuple(f"{prefix}{block}.{part}.{kind}" for part in parts)
        return flat.fused_weight(names) if names[0] in flat.names else None

    qkv = fused("self_attn", ("q_proj", "k_proj", "v_proj"), "weight")
    gate_up = fused("mlp", ("gate_proj", "up_proj"), "weight")
    assert qkv is not None
    assert gate_up is not None
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=needed("input_layernorm.weight"),
        qkv=qkv,
        qkv_bias=fused("self_attn", ("q_proj", "k_proj", "v_proj"), "bias"),
        query_norm=one("self_attn.q_norm.weight"),
        key_norm=one("self_attn.k_norm.weight"),
        out=needed("self_attn.o_proj.weight"),
        out_bias=one("self_attn.o_proj.bias"),
        mlp_norm=needed("post_attention_layernorm.weight"),
        gate_up=gate_up,
        gate_up_bias=fused("mlp", ("gate_proj", "up_proj"), "bias"),
        down=needed("mlp.down_proj.weight"),
        down_bias=one("mlp.down_proj.bias"),
        qkv_adapters=adapters_of([attention.q_proj, attention.k_proj, attention.v_proj]),
        out_adapters=adapters_of([attention.o_proj]),
        gate_up_adapters=adapters_of([mlp.gate_proj, mlp.up_proj]),
        down_adapters=adapters_of([mlp.down_proj]),
    )
