"""Replacements of inner functions of the torch engine that `gpu_candidates.py` puts in their place.

Each computes what the function that it replaces computes, to rounding, and reads or writes less
memory. Nothing here is used by the engine.

Shapes: N packed tokens, D hidden size, E head size, I feed-forward size, U states, V words.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

token_logprobs: Any = importlib.import_module("penstock.workers.training.token_logprob")
fused: Any = importlib.import_module("penstock.workers.engines.torch_engine.backbone")
attention: Any = importlib.import_module("penstock.workers.engines.torch_engine.attention")
ATEN: Any = torch.ops.aten

# --- compiling


class Compiled:
    """A function that torch compiles once for each width, for any number of rows.

    Args:
        function: Of tensors alone: a number would be compiled into it.
        rows: Which of its arguments have N, or U, as their first dimension.

    Attributes:
        plainly: Whether functions are called as they are, and nothing is compiled.
    """

    plainly = False

    def __init__(self, function: Callable[..., Any], rows: Sequence[int]) -> None:
        self._function, self._rows = function, rows
        self._compiled: Any = None

    def __call__(self, *inputs: Tensor) -> Any:
        """Call the function on the inputs, without a gradient."""
        inputs = tuple(one.detach() if one.requires_grad else one for one in inputs)
        if Compiled.plainly:
            return self._function(*inputs)
        with torch.no_grad():  # in every call: torch compiles again for another mode
            return self._of(inputs)

    def _of(self, inputs: tuple[Tensor, ...]) -> Any:
        if self._compiled is None:
            self._compiled = torch.compile(
                self._function, fullgraph=True, dynamic=False, options=_options()
            )
        dynamo: Any = importlib.import_module("torch._dynamo")
        for place in self._rows:
            dynamo.maybe_mark_dynamic(inputs[place], 0)
        return self._compiled(*inputs)


def _options() -> dict[str, Any] | None:
    """Inductor's option that two processes choose the same kernels, where torch has it."""
    config: Any = importlib.import_module("torch._inductor.config")
    return {"deterministic": True} if hasattr(config, "deterministic") else None


@cache
def number(value: float, device: torch.device) -> Tensor:
    """A number as a float32 scalar on a device, made without waiting for it."""
    return torch.full((), value, dtype=torch.float32, device=device)


# --- gradients of weights (S5b)


class WeightGradients:
    """Where gradients of weights are added up in float32 by the product itself, once `added` says.

    Attributes:
        added: Address of a weight -> the float32 tensor that its gradient is added to.
    """

    added: dict[int, Tensor] = {}  # noqa: RUF012 - a candidate puts another in its place

    @classmethod
    def of(cls, weight: Tensor, upstream: Tensor, x: Tensor, *, asked: bool) -> Tensor | None:
        """Return `upstream^T x` if autograd asks for it, or add it to the weight's total."""
        total = cls.added.get(weight.data_ptr())
        if total is not None:
            add_product(total, upstream.t(), x)
            return None
        return upstream.t() @ x if asked else None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two 16-bit matrices to a float32 one without rounding it in between.

    The first of `ADDERS` that this torch has for such dtypes does it; those that it refuses go.
    """
    while len(ADDERS) > 1:
        name, add = next(iter(ADDERS.items()))
        try:
            add(total, left, right)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            REFUSED[name] = str(error)[:300]
            del ADDERS[name]
        else:
            return
    (add,) = ADDERS.values()
    add(total, left, right)


def _add_plainly(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.device.type == "cpu":  # which has no product with a wider result
        total.add_(left.float() @ right.float())
    else:
        total.add_(torch.mm(left, right, out_dtype=torch.float32))


ADDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "addmm.dtype_out": lambda total, left, right: ATEN.addmm.dtype_out(
        total, left, right, torch.float32, out=total
    ),
    "baddbmm.dtype_out": lambda total, left, right: ATEN.baddbmm.dtype_out(
        total[None], left[None], right[None], torch.float32, out=total[None]
    ),
    "mm with a float32 result, and a sum": _add_plainly,
}
REFUSED: dict[str, str] = {}
"""Torch's messages for those `ADDERS` that it refused."""


class _Linear(Function):
    """`F.linear` whose weight's gradient goes where `WeightGradients` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_bias = grads[0].sum(0) if ctx.needs_input_grad[2] else None
        asked = ctx.needs_input_grad[1]
        to_weight = WeightGradients.of(weight, grads[0], x, asked=asked)
        return grads[0] @ weight, to_weight, to_bias


# --- norms (S2)


def norm_backward(
    upstream: Tensor, x: Tensor, scale: Tensor, weight: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a norm's input and, if needed, weight, by torch's kernel on CUDA."""
    if x.device.type != "cpu":
        needed = [True, needs_weight]
        backward = ATEN._fused_rms_norm_backward
        return backward(upstream, x, [x.shape[-1]], scale, weight, needed)
    normed = x.float() * scale
    to_weight = (upstream.float() * normed).sum(0).to(weight.dtype) if needs_weight else None
    upstream = upstream.float() * weight
    along = (upstream * normed).mean(-1, keepdim=True)
    return ((upstream - normed * along) * scale).to(x.dtype), to_weight


class RMSNorm(Function):
    """In place of `fused._RMSNorm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the norm, and keep what each row was multiplied by."""
        out, scale = ATEN._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Return the gradients of input and weight."""
        x, weight, scale = ctx.saved_tensors
        return *norm_backward(grads[0], x, scale, weight, ctx.needs_input_grad[1]), None


class NormLinear(Function):
    """In place of `fused._NormLinear`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the product, and keep the norm's input."""
        normed, scale = ATEN._fused_rms_norm(x, [x.shape[-1]], norm, eps)
        ctx.save_for_backward(x, norm, weight, scale)
        ctx.eps = eps
        return F.linear(normed, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, norm, weight and bias."""
        x, norm, weight, scale = ctx.saved_tensors
        needs_norm, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (1, 3, 4))
        normed = F.rms_norm(x, (x.shape[-1],), norm, ctx.eps)
        to_weight = WeightGradients.of(weight, grads[0], normed, asked=needs_weight)
        del normed
        to_bias = grads[0].sum(0) if needs_bias else None
        to_x, to_norm = norm_backward(grads[0] @ weight, x, scale, norm, needs_norm)
        return to_x, to_norm, None, to_weight, to_bias


# --- log-probabilities (S3), with logits kept for the backward pass (S6)


def _log_sums(logits: Tensor, temperature: Tensor) -> Tensor:
    return (logits.float() / temperature).logsumexp(-1)


def _log_change(logits: Tensor, total: Tensor, scale: Tensor, temperature: Tensor) -> Tensor:
    chance = (logits.float() / temperature - total.unsqueeze(-1)).exp()
    return (chance * (scale / temperature).unsqueeze(-1)).to(logits.dtype)


log_sums = Compiled(_log_sums, (0,))
log_change = Compiled(_log_change, (0, 1, 2))


class TokenLogprob(Function):
    """In place of `token_logprob._TokenLogprob`, without entropies.

    Attributes:
        keeps_logits: Whether they stay from the forward to the backward pass.
    """

    keeps_logits = False

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        entry: Tensor,
        temperature: float,
        needs_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the targets, reading each logit once."""
        if needs_entropy:
            raise NotImplementedError("this candidate computes no entropies")
        by_state = torch.argsort(entry, stable=True)
        order = token_logprobs.sent(by_state, states.device)
        lines = token_logprobs._Lines(entry[by_state], target[order])
        total = torch.empty(len(states), dtype=torch.float32, device=states.device)
        logprob = torch.empty(len(target), dtype=torch.float32, device=states.device)
        ctx.kept = []
        for rows in _chunks(states, weight):
            logits = F.linear(states[rows], weight, bias)
            total[rows] = log_sums(logits, number(temperature, states.device))
            asked, line, word = lines.of(rows)
            found = logits[line, word].float().div_(temperature)
            logprob[order[asked]] = found - total[rows][line]
            if TokenLogprob.keeps_logits and ctx.needs_input_grad[0]:
                ctx.kept.append(logits)
            del logits
        ctx.save_for_backward(states, weight, bias, total)
        ctx.lines, ctx.order, ctx.temperature = lines, order, temperature
        return logprob, total.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of states, weight and bias, writing each logit's once."""
        states, weight, bias, total = ctx.saved_tensors
        upstream, kept = grads[0][ctx.order], ctx.kept
        to_states = torch.empty_like(states)
        to_weight = WeightGradients.added.get(weight.data_ptr())
        own = to_weight is None
        chunks = list(_chunks(states, weight))
        if to_weight is None:
            exact = weight.dtype if len(chunks) == 1 else torch.float32
            to_weight = torch.zeros_like(weight, dtype=exact)
        to_bias = total.new_zeros(len(weight)) if ctx.needs_input_grad[2] else None
        for rows in chunks:
            logits = kept.pop(0) if kept else F.linear(states[rows], weight, bias)
            asked, line, word = ctx.lines.of(rows)
            wanted = upstream[asked]
            scale = wanted.new_zeros(len(logits)).index_add_(0, line, wanted).neg_()
            temperature = number(ctx.temperature, states.device)
            change = log_change(logits, total[rows], scale, temperature)
            del logits
            at_target = (wanted / temperature).to(change.dtype)
            change.index_put_((line, word), at_target, accumulate=True)
            to_states[rows] = change @ weight
            if own:
                token_logprobs._add_product(to_weight, change, states[rows])
            else:
                add_product(to_weight, change.t(), states[rows])
            if to_bias is not None:
                to_bias += change.sum(0, dtype=torch.float32)
            del change
        of_bias = None if to_bias is None else to_bias.to(weight.dtype)
        of_weight = to_weight.to(weight.dtype) if own else None
        return to_states, of_weight, of_bias, None, None, None, None


def _chunks(states: Tensor, weight: Tensor) -> Any:
    return token_logprobs._chunks(len(states), token_logprobs._bounds(weight)[0])


# --- SwiGLU, rotation, residual and norm (S4)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def _before_gated(upstream: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of gate and up, and their product again."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    upstream = upstream.float()
    share = gate.sigmoid()
    to_gate = upstream * up * share * (1 + gate * (1 - share))
    parts = [part.to(gate_up.dtype) for part in (to_gate, upstream * gate * share)]
    return torch.cat(parts, dim=-1), (gate * share * up).to(gate_up.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    parts = (left * cos - right * sin, right * cos + left * sin)
    return torch.cat([part.to(x.dtype) for part in parts], dim=-1)


def _rotated_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    parts = (left * cos + right * sin, right * cos - left * sin)
    return torch.cat([part.to(x.dtype) for part in parts], dim=-1)


def _add_norm(x: Tensor, change: Tensor, norm: Tensor, eps: Tensor) -> tuple[Tensor, ...]:
    """Return the sum, its norm, and what each row was multiplied by."""
    total = (x.float() + change.float()).to(x.dtype)
    wide = total.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return total, (wide * scale * norm).to(x.dtype), scale


def _before_add_norm(
    upstream: Tensor, total: Tensor, scale: Tensor, norm: Tensor, after: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradient of the sum, that of the norm's weight, and the norm again."""
    normed = total.float() * scale
    upstream = upstream.float()
    to_norm = (upstream * normed).sum(0).to(norm.dtype)
    weighted = upstream * norm
    along = (weighted * normed).mean(-1, keepdim=True)
    to_total = (weighted - normed * along) * scale + after.float()
    return to_total.to(total.dtype), to_norm, (normed * norm).to(total.dtype)


gated = Compiled(_gated, (0,))
before_gated = Compiled(_before_gated, (0, 1))
rotated = Compiled(_rotated, (0, 1, 2))
rotated_back = Compiled(_rotated_back, (0, 1, 2))
add_norm = Compiled(_add_norm, (0, 1))
before_add_norm = Compiled(_before_add_norm, (0, 1, 2, 4))


class GatedLinear(Function):
    """In place of `fused._GatedLinear`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear map of `silu(gate) * up`."""
        ctx.save_for_backward(gate_up, weight)
        return F.linear(gated(gate_up), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of gate and up, weight and bias."""
        gate_up, weight = ctx.saved_tensors
        change, product = before_gated(grads[0] @ weight, gate_up)
        asked = ctx.needs_input_grad[1]
        to_weight = WeightGradients.of(weight, grads[0], product, asked=asked)
        return change, to_weight, grads[0].sum(0) if ctx.needs_input_grad[2] else None


class Rotate(Function):
    """In place of `fused._Rotate`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn heads by their positions."""
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Turn the gradient back."""
        return rotated_back(grads[0], *ctx.saved_tensors), None, None


class AddNormLinear(Function):
    """The sum of the residual and what is added to it, and a linear map of the norm of that."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        change: Tensor,
        norm: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum [N, D] and the product."""
        total, normed, scale = add_norm(x, change, norm, number(eps, x.device))
        ctx.save_for_backward(total, scale, norm, weight)
        return total, F.linear(normed, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of both summands, which are one, and of the weights."""
        total, scale, norm, weight = ctx.saved_tensors
        upstream = grads[1] @ weight
        to_total, to_norm, normed = before_add_norm(upstream, total, scale, norm, grads[0])
        asked = ctx.needs_input_grad[4]
        to_weight = WeightGradients.of(weight, grads[1], normed, asked=asked)
        to_bias = grads[1].sum(0) if ctx.needs_input_grad[5] else None
        return to_total, to_total, to_norm, None, to_weight, to_bias


def states(self: Any, pack: Any, caches: Any = None) -> Tensor:
    """In place of `LeanBackbone.states`, for models without adapters and norms of heads.

    The sum of the residual and what a block adds to it waits for the next norm, which makes it.
    """
    if caches is not None or self.checkpointing:
        return ORIGINAL_STATES(self, pack, caches)
    cos, sin = (table[pack.position] for table in self.rope(pack.longest))
    x: Any = F.embedding(pack.tokens, self.embedding)
    change: Any = None
    heads, keys = self.num_heads, self.num_key_heads
    for index, layer in enumerate(self.layers):
        weights = (layer.input_norm, self.eps, layer.qkv.weight, layer.qkv.bias)
        if change is None:
            qkv = fused.norm_linear(x, *weights)
        else:
            x, qkv = AddNormLinear.apply(x, change, *weights)
        both, value = qkv.view(len(x), -1, self.head_dim).split([heads + keys, keys], dim=1)
        query, key = fused.rotate(both, cos, sin).split([heads, keys], dim=1)
        mixed = attention.attend_packed(query, key, value, pack, self.scale)
        if index == len(self.layers) - 1:
            mixed, x = mixed[pack.read], x[pack.read]
        change = _Linear.apply(mixed, layer.out.weight, layer.out.bias)
        weights = (layer.mlp_norm, self.eps, layer.gate_up.weight, layer.gate_up.bias)
        x, gate_up = AddNormLinear.apply(x, change, *weights)
        change = fused.gated_linear(gate_up, layer.down.weight, layer.down.bias)
    return fused.rms_norm(x + change, self.final_norm, self.eps)


BACKBONE: Any = importlib.import_module("penstock.workers.engines.torch_engine.backbone")
ORIGINAL_STATES = BACKBONE.LeanBackbone.states
