"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 over packed tokens, all of it ours.

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

from ...training.flat_parameters import FlatParameters
from .attention import attend_packed
from .packing import Pack


@dataclass(frozen=True)
class LowRank:
    """An adapter of one linear map: `scale * B A x`."""

    down: Tensor  # A, f32[rank, in]
    up: Tensor  # B, f32[out, rank]
    scale: float  # Alpha over the rank

    def __call__(self, x: Tensor) -> Tensor:
        """[N, out] of [N, in], in the precision of `x`."""
        narrow = F.linear(x, self.down.to(x.dtype))
        return F.linear(narrow, (self.up * self.scale).to(x.dtype))


Adapters = tuple[LowRank | int, ...]
"""Adapters of linear maps that are computed as one, or the width of a map without one."""


def adapters_of(linears: Sequence[Any]) -> Adapters | None:
    """Adapters of linear maps that are computed as one; None if none of them has any."""
    found: list[LowRank | int] = []
    for linear in linears:
        if not hasattr(linear, "lora_A"):
            found.append(linear.out_features)
            continue
        (name,) = linear.lora_A
        up = linear.lora_B[name].weight
        found.append(LowRank(linear.lora_A[name].weight, up, linear.scaling[name]))
    return tuple(found) if any(isinstance(one, LowRank) for one in found) else None


def added(x: Tensor, adapters: Adapters) -> Tensor:
    """Outputs that adapters of maps computed as one add to theirs, [N, all outs]."""
    parts = [a(x) if isinstance(a, LowRank) else x.new_zeros(len(x), a) for a in adapters]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


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
    """Rotary embedding of [N, heads, E], by tables [N, 1, E / 2], in Hugging Face's half-split."""
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
class Linears:
    """Linear maps of one input, computed as one."""

    weight: Tensor
    bias: Tensor | None
    adapters: Adapters | None

    def of_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        if self.adapters is None:
            return norm_linear(x, norm, eps, self.weight, self.bias)
        normed = rms_norm(x, norm, eps)
        return F.linear(normed, self.weight, self.bias) + added(normed, self.adapters)

    def added_to(self, x: Tensor, inputs: Tensor) -> Tensor:
        x = x + F.linear(inputs, self.weight, self.bias)
        return x if self.adapters is None else x + added(inputs, self.adapters)

    def summed_to(self, x: Tensor, inputs: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`added_to` where each process of a group has some of the inputs, and no adapters."""
        x = x + summed(F.linear(inputs, self.weight), group)
        return x if self.bias is None else x + self.bias


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
        # Processes that divide the matrices, of which this one has its part (`tensor_parallel.py`)
        self.group: dist.ProcessGroup | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding's rows, [N, D]; of other processes' words they add theirs."""
        if self.group is None:
            return F.embedding(tokens, self.embedding)
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
        cos, sin = (table[pack.position] for table in self.rope(pack.longest))
        x = self.embed(pack.tokens)
        last = len(self.layers) - 1
        again = self.checkpointing and caches is None and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            read = pack.read if index == last else None
            cache = None if caches is None else caches[index]
            inputs = (x, layer, cos, sin, pack, read, cache)
            if again:
                options: Any = {"preserve_rng_state": False, "determinism_check": "none"}
                found: Any = checkpoint(self._layer, *inputs, use_reentrant=False, **options)
                x = found
            else:
                x = self._layer(*inputs)
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
        qkv = layer.qkv.of_norm(x, layer.input_norm, self.eps).view(len(x), -1, self.head_dim)
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
        if self.group is not None:
            x = layer.out.summed_to(x, mixed, self.group)
            gate_up = layer.gate_up.of_norm(x, layer.mlp_norm, self.eps)
            return layer.down.summed_to(x, gated(gate_up), self.group)
        x = layer.out.added_to(x, mixed)
        gate_up = layer.gate_up.of_norm(x, layer.mlp_norm, self.eps)
        if layer.down.adapters is None:
            return x + gated_linear(gate_up, layer.down.weight, layer.down.bias)
        return layer.down.added_to(x, gated(gate_up))


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
    )
