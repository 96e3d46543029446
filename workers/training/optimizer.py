"""AdamW over one flat buffer, with a learning rate that moves once per train call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...dataflow.options import (
    Fraction,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    option_class,
)
from .data_parallel import RankGroup, sum_over

_AT_ONCE, _AT_ONCE_ON_GPU = 1 << 18, 1 << 28
"""Weights stepped together. On a CPU what is read and written of them fits into the cache; on a GPU
each part is a launch or two, and the kernel counts with 32 bits."""
_SUMMED_IN_FLOAT32 = 1 << 16
"""Squares added up in float32. On a CPU torch adds those of a norm one by one, so that a longer sum
loses numbers small beside it: 1.5 % of the norm of 135M normal ones, and 2e-7 in such pieces."""

_TIMESCALE = 10_000
"""Calls that `inverse_sqrt` counts as its warm-up where there is none, as in transformers."""

Schedule = Literal[
    "constant",
    "linear",
    "cosine",
    "constant_with_warmup",
    "cosine_with_min_lr",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]


@option_class
class OptimizerSpec:
    """AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization") and schedule."""

    lr: NonNegativeFloat = 1e-4
    """Peak learning rate."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """Decay of the first and second moments per optimizer step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Weights shrink by `lr * weight_decay` per optimizer step, biases and norms included."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients of a longer global norm are scaled down to it; 0 never clips."""
    schedule: Schedule = "constant"
    """Decay of the learning rate after warm-up, by the name and the formula of transformers: none,
    or to `min_lr_ratio` of the peak. `constant_with_warmup` and `cosine_with_min_lr` are the same
    as the shorter names."""
    warmup_calls: NonNegativeInt = 0
    """Train calls over which the learning rate rises: call n (from 0) uses (n + 1) / warmup."""
    warmup_ratio: FractionBelowOne = 0.0
    """Instead of `warmup_calls`: the share of all train calls, rounded up, that are warm-up."""
    total_calls: NonNegativeInt = 0
    """Train calls over which a schedule falls, warm-up included; 0 stands for all of the stage."""
    min_lr_ratio: Fraction = 0.0
    """End of a falling schedule, as a fraction of the peak."""
    num_cycles: PositiveInt = 1
    """Times that `cosine_with_restarts` falls."""
    power: PositiveFloat = 1.0
    """Exponent of `polynomial`."""
    decay_calls: NonNegativeInt = 0
    """The last train calls, over which alone `warmup_stable_decay` falls."""
    restart_every_call: bool = False
    """Begin every train call without moments, as the first one does (Kimi k1.5, section 2.3.2)."""
    frozen: tuple[str, ...] = ()
    """Parameters that never move, as patterns of their names: `model.embed_tokens.*`."""

    def __post_init__(self) -> None:
        if self.warmup_ratio and self.warmup_calls:
            raise ValueError(
                f"OptimizerSpec: warmup_ratio is {self.warmup_ratio} and warmup_calls "
                f"{self.warmup_calls}; leave one of them out"
            )
        if self._falls and 0 < self.total_calls <= self.warmup_calls:
            raise ValueError(
                f"OptimizerSpec: schedule '{self.schedule}' needs total_calls above "
                f"warmup_calls={self.warmup_calls}, got {self.total_calls}; take more steps or a "
                "shorter warm-up, or leave optimizer.total_calls at 0 for all calls of the stage"
            )
        if (self.schedule == "warmup_stable_decay") != bool(self.decay_calls):
            raise ValueError(
                f"OptimizerSpec: decay_calls is {self.decay_calls} and schedule '{self.schedule}'; "
                "they belong together: decay_calls are the last calls, over which "
                "warmup_stable_decay falls"
            )

    @property
    def _falls(self) -> bool:
        return not (self.schedule.startswith("constant") or self.schedule == "inverse_sqrt")

    def over(self, num_calls: int) -> OptimizerSpec:
        """Return the same with a schedule over so many train calls, unless it says otherwise.

        Raises:
            ValueError: If the warm-up takes them all.
        """
        total = self.total_calls or num_calls
        warmup = math.ceil(self.warmup_ratio * total) or self.warmup_calls
        total = total if self._falls else self.total_calls
        return replace(self, total_calls=total, warmup_calls=warmup, warmup_ratio=0.0)

    def lr_at(self, call: int) -> float:
        """The learning rate of train call `call`, counted from 0.

        Example:
            >>> spec = OptimizerSpec(lr=1.0, schedule="linear", warmup_calls=2, total_calls=4)
            >>> [spec.lr_at(call) for call in range(5)]
            [0.5, 1.0, 1.0, 0.5, 0.0]
        """
        if self.warmup_ratio:
            raise ValueError("OptimizerSpec: warmup_ratio needs the number of calls; see `over`")
        if call < self.warmup_calls:
            return self.lr * (call + 1) / self.warmup_calls
        if self.schedule == "inverse_sqrt":
            timescale = self.warmup_calls or _TIMESCALE
            return self.lr * math.sqrt(timescale / (call + timescale - self.warmup_calls))
        if not self._falls:
            return self.lr
        if not self.total_calls:
            raise ValueError(f"OptimizerSpec: schedule '{self.schedule}' needs total_calls")
        begin = self.warmup_calls
        if self.schedule == "warmup_stable_decay":
            begin = max(begin, self.total_calls - self.decay_calls)
        past = 1.0
        if call < self.total_calls:
            past = max(call - begin, 0) / (self.total_calls - begin)
        left = 1 - past
        if self.schedule == "polynomial":
            left **= self.power
        elif self.schedule == "cosine_with_restarts" and past < 1:
            left = (1 + math.cos(math.pi * (self.num_cycles * past % 1))) / 2
        elif self.schedule not in ("linear", "cosine_with_restarts"):
            left = (1 + math.cos(math.pi * past)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)


def optimizer_buffers(data: Tensor) -> dict[str, Tensor]:
    """State of an optimizer that has taken no step.

    f32, shaped as the weights: "first" and "second", and "master" unless the weights themselves are
    float32.
    """
    buffers = {
        moment: torch.zeros_like(data, dtype=torch.float32) for moment in ("first", "second")
    }
    if data.dtype != torch.float32:
        buffers["master"] = data.float()
    return buffers


def state_bytes(data: Tensor) -> int:
    """Bytes of `optimizer_buffers`."""
    return 4 * data.numel() * (2 if data.dtype == torch.float32 else 3)


def square_sum(x: Tensor, spans: Sequence[tuple[int, int]] | None = None) -> Tensor:
    """The squares' sum of a long float32 vector: pieces in float32, their sums in float64."""
    norms = [x.new_zeros(1)]
    for begin, end in ((0, len(x)),) if spans is None else spans:
        cut = end - (end - begin) % _SUMMED_IN_FLOAT32
        pieces = x[begin:cut].view(-1, _SUMMED_IN_FLOAT32)
        norms += [torch.linalg.vector_norm(pieces, dim=1)] if len(pieces) else []
        norms += [torch.linalg.vector_norm(x[cut:end])[None]] if cut < end else []
    return torch.cat(norms).double().square().sum()


def _checked(there: Tensor, step: int) -> float:
    """A gradient's norm, once the host has waited for it."""
    norm = float(there)
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the gradient norm is {norm} at optimizer step {step}, which is not taken"
        )
    return norm


Clip = tuple[Tensor, Tensor]
"""A divisor of a gradient, and 1 if it is not finite and no step is taken: f32[] each."""


def clip_of(norm: Tensor, spec: OptimizerSpec) -> Clip:
    """The clip that scales a gradient of a global norm, f64[], down to the spec's bound."""
    largest = spec.max_grad_norm or math.inf
    return (norm / largest).clamp(min=1).float(), norm.isfinite().logical_not().float()


def update_weights(
    data: Tensor,
    grad: Tensor,
    buffers: Mapping[str, Tensor],
    spec: OptimizerSpec,
    lr: float,
    step: int,
    clip: Clip | None = None,
) -> None:
    """One step of AdamW, in place; on a CUDA device the gradient may be clipped with it."""
    on_gpu = data.device.type == "cuda"
    at_once = _AT_ONCE_ON_GPU if on_gpu else _AT_ONCE
    rule = partial(_fused_step, clip=clip) if on_gpu or clip else _plain_step
    with torch.no_grad():
        for begin in range(0, len(data), at_once):
            part = slice(begin, begin + at_once)
            first, second = buffers["first"][part], buffers["second"][part]
            master = buffers.get("master", data)[part]
            rule((master, grad[part], first, second), spec, lr, step)
            if "master" in buffers:
                data[part].copy_(master)


def update_each(
    parts: Sequence[tuple[Tensor, Tensor, Mapping[str, Tensor]]],
    spec: OptimizerSpec,
    lr: float,
    step: int,
    clip: Clip | None = None,
) -> None:
    """`update_weights` of several tensors, with their gradients and buffers.

    A CUDA device steps all of them in a few launches, of which each tensor would take three.
    """
    if clip is None and all(data.device.type != "cuda" for data, _, _ in parts):
        for data, grad, buffers in parts:
            update_weights(data, grad, buffers, spec, lr, step)
        return
    with torch.no_grad():
        masters = [buffers.get("master", data) for data, _, buffers in parts]
        states = [
            (master, grad, buffers["first"], buffers["second"])
            for master, (_, grad, buffers) in zip(masters, parts, strict=True)
        ]
        _fused_steps(states, spec, lr, step, clip)
        if any("master" in buffers for _, _, buffers in parts):
            copy: Any = torch.ops.aten._foreach_copy_  # pyright: ignore[reportPrivateUsage]
            copy([data for data, _, _ in parts], masters)


_State = tuple[Tensor, Tensor, Tensor, Tensor]
"""Weights, gradient, first and second moments: f32, of one shape."""


def _plain_step(state: _State, spec: OptimizerSpec, lr: float, step: int) -> None:
    """AdamW in place, with one temporary."""
    master, grad, first, second = state
    beta1, beta2 = spec.betas
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(spec.eps)
    if spec.weight_decay:
        master.mul_(1 - lr * spec.weight_decay)
    master.addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


def _fused_step(
    state: _State, spec: OptimizerSpec, lr: float, step: int, clip: Clip | None = None
) -> None:
    _fused_steps([state], spec, lr, step, clip)


def _fused_steps(
    states: Sequence[_State], spec: OptimizerSpec, lr: float, step: int, clip: Clip | None
) -> None:
    """AdamW to float32 rounding by one kernel of torch, with no temporary."""
    masters, grads, firsts, seconds = (list(column) for column in zip(*states, strict=True))
    beta1, beta2 = spec.betas
    fused: Any = torch.ops.aten._fused_adamw_  # pyright: ignore[reportPrivateUsage]
    steps = torch.full((), float(step), dtype=torch.float32, device=masters[0].device)
    scale, bad = clip or (None, None)
    fused(
        masters, grads, firsts, seconds, [], [steps] * len(states),
        lr=lr, beta1=beta1, beta2=beta2, weight_decay=spec.weight_decay, eps=spec.eps,
        amsgrad=False, maximize=False, grad_scale=scale, found_inf=bad,
    )  # fmt: skip


class AdamW:
    """Optimizer of weights in one flat buffer.

    Weights in bfloat16 are stepped through a float32 master copy: a bfloat16 weight cannot hold an
    update smaller than 1/256 of itself. Moments and master copy are made by the first step, so a
    replica that only generates has none.

    An engine whose weights are divided derives from this and says which part of a gradient is a
    process's own, how long the whole of it is, and how its part of the weights is stepped.
    """

    clips_at_once = frozenset({"cuda"})
    """Devices that clip with the step, at whose norm the host looks last; none, to compare."""

    def __init__(self, data: Tensor, spec: OptimizerSpec) -> None:
        self._data = data
        self._spec = spec
        self.steps = 0  # Optimizer steps taken
        self._buffers: dict[str, Tensor] = {}
        self._frozen: tuple[tuple[int, int], ...] = ()
        self._begin = 0  # of what this process steps, in the layout of the weights
        self._clip: Clip | None = None  # of the step that is taken, on a CUDA device

    def freeze(self, spans: Sequence[tuple[int, int]]) -> None:
        """Leave parts of the weights as they are: no decay, no moments, no share in the norm."""
        self._frozen = tuple(spans)

    def step(self, grad: Tensor, lr: float) -> float:
        """Clip a gradient, take one step, return the gradient's norm before clipping.

        `grad`, f32[size] in the layout of the weights, is overwritten. If its norm is not finite
        this raises FloatingPointError, and no weight has changed, on any process.
        """
        for begin, end in self._frozen:
            # Before the norm, in which what is frozen has no share.
            grad[begin:end].zero_()
        own = self._own(grad)
        there = self._square(own).sqrt()
        self.steps += 1
        self._clip = None
        try:
            if own.device.type in self.clips_at_once:
                self._clip = clip_of(there, self._spec)
                self._update(own, lr)
                return _checked(there, self.steps)
            norm = _checked(there, self.steps)
        except FloatingPointError:
            self.steps -= 1  # none was taken
            raise
        if 0 < self._spec.max_grad_norm < norm:
            own.mul_(self._spec.max_grad_norm / norm)
        self._update(own, lr)
        return norm

    def _own(self, grad: Tensor) -> Tensor:
        """The part of a gradient that this process steps, added up over ranks."""
        return grad

    def _square(self, own: Tensor) -> Tensor:
        """The square of the norm of the whole model's gradient, f64[]."""
        return square_sum(own)

    def _update(self, own: Tensor, lr: float) -> None:
        weights, buffers = self._weights(), self._allocated()
        for begin, end in self._stepped(len(weights)):
            part = {kind: buffer[begin:end] for kind, buffer in buffers.items()}
            where = slice(begin, end)
            step = (self._spec, lr, self.steps, self._clip)
            update_weights(weights[where], own[where], part, *step)

    def _stepped(self, length: int) -> Iterator[tuple[int, int]]:
        """Spans of this process's `length` weights that are not frozen."""
        begin = 0
        for start, stop in self._frozen:
            if start - self._begin > begin:
                yield begin, min(start - self._begin, length)
            begin = max(begin, stop - self._begin)
            if begin >= length:
                return
        yield begin, length

    def _weights(self) -> Tensor:
        """The weights that this process steps, in the layout of the buffers."""
        return self._data

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, once it has taken a step."""
        return state_bytes(self._weights())

    def _allocated(self) -> dict[str, Tensor]:
        if not self._buffers:
            self._buffers |= optimizer_buffers(self._weights())
        return self._buffers

    def restart(self) -> None:
        self.steps = 0
        for kind, buffer in self._buffers.items():
            # The master copy is no state but the weights themselves, in more digits.
            if kind != "master":
                buffer.zero_()

    @property
    def buffers(self) -> list[Tensor]:
        return list(self._buffers.values())

    def refresh(self) -> None:
        if "master" in self._buffers:
            self._buffers["master"].copy_(self._weights())

    def state(self) -> dict[str, Tensor]:
        """The buffers, f32[size] each, laid out as the weights; none before a step.

        All ranks must ask.
        """
        return dict(self._buffers)

    def new_state(self) -> dict[str, Tensor]:
        """Buffers to fill and hand to `load_state`, laid out as the weights."""
        return optimizer_buffers(self._weights())

    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Load what `state` gave, in this layout or another; load the weights first."""
        self._buffers = dict(state)
        self.steps = steps


_DIST: Any = dist
# torch 2.13 renamed both and warns of the old names, which are all that torch 2.11 has.
_RENAMED = hasattr(dist, "all_gather_single")
_REDUCE_SCATTER: Any = _DIST.reduce_scatter_single if _RENAMED else _DIST.reduce_scatter_tensor
_ALL_GATHER: Any = _DIST.all_gather_single if _RENAMED else _DIST.all_gather_into_tensor


class SharedAdamW(AdamW):
    """Steps `data`, which all ranks of `ranks` hold alike.

    With `shared`, ranks share out the optimizer's state (ZeRO stage 1). Spans that are `counted` in
    the norm are those that no other process of the model counts; sums over `model_groups`, in
    turn, are those over the processes with the other parts of a rank's model.
    """

    def __init__(
        self,
        data: Tensor,
        spec: OptimizerSpec,
        ranks: RankGroup,
        *,
        counted: Sequence[tuple[int, int]],
        model_groups: Sequence[dist.ProcessGroup | None],
        shared: bool,
    ) -> None:
        super().__init__(data, spec)
        self._ranks = ranks
        self._shared = shared and not ranks.alone
        # Every rank's run is as long; the last one's may reach beyond the weights.
        self._length = -(-len(data) // ranks.num_ranks) if self._shared else len(data)
        self._begin = self._length * ranks.rank if self._shared else 0
        self._end = min(self._begin + self._length, len(data))
        clipped = [(max(a, self._begin), min(b, self._end)) for a, b in counted]
        self._counted = [(a - self._begin, b - self._begin) for a, b in clipped if a < b]
        # Runs are disjoint, so then every process adds its own; else every rank has the same.
        self._norm_groups = [None] if self._shared else model_groups

    def _own(self, grad: Tensor) -> Tensor:
        if not self._shared:
            return self._ranks.sum_(grad)
        mine = grad.new_empty(self._length)
        padded = F.pad(grad, (0, self._length * self._ranks.num_ranks - len(grad)))
        _REDUCE_SCATTER(mine, padded, group=self._ranks.group)
        return mine[: self._end - self._begin]

    def _square(self, own: Tensor) -> Tensor:
        square = square_sum(own, self._counted)
        for group in self._norm_groups:
            sum_over(square, group)
        return square

    def _update(self, own: Tensor, lr: float) -> None:
        super()._update(own, lr)
        if self._shared:
            self._data.copy_(self._whole(self._weights()))

    def _weights(self) -> Tensor:
        return self._data[self._begin : self._end]

    def _whole(self, run: Tensor) -> Tensor:
        if not self._shared:
            return run
        padded = F.pad(run, (0, self._length - len(run)))
        whole = run.new_empty(self._length * self._ranks.num_ranks)
        _ALL_GATHER(whole, padded, group=self._ranks.group)
        return whole[: len(self._data)]

    def state(self) -> dict[str, Tensor]:
        return {kind: self._whole(buffer) for kind, buffer in self._buffers.items()}

    def new_state(self) -> dict[str, Tensor]:
        return optimizer_buffers(self._data)

    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        self._buffers = {
            kind: buffer[self._begin : self._end].clone() for kind, buffer in state.items()
        }
        self.steps = steps


class JoinedAdamW(AdamW):
    """Several optimizers of neighboring parts of the weights, under one norm.

    Parts are shared by different ranks: each by those that hold the same of it.
    """

    def __init__(
        self, data: Tensor, spec: OptimizerSpec, parts: Sequence[AdamW], sizes: Sequence[int]
    ) -> None:
        super().__init__(data, spec)
        self._parts, self._sizes = parts, list(sizes)
        self._lengths = self._sizes  # of what this process steps of each

    def freeze(self, spans: Sequence[tuple[int, int]]) -> None:
        super().freeze(spans)
        begin = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            clipped = [(max(a - begin, 0), min(b - begin, size)) for a, b in spans]
            part.freeze([span for span in clipped if span[0] < span[1]])
            begin += size

    def _own(self, grad: Tensor) -> Tensor:
        grads = zip(self._parts, grad.split(self._sizes), strict=True)
        own = [part._own(of) for part, of in grads]
        self._lengths = [len(one) for one in own]
        return torch.cat(own)

    def _square(self, own: Tensor) -> Tensor:
        return torch.stack([part._square(of) for part, of in self._each(own)]).sum()

    def _update(self, own: Tensor, lr: float) -> None:
        for part, of in self._each(own):
            part.steps, part._clip = self.steps, self._clip
            part._update(of, lr)

    def _each(self, own: Tensor) -> Iterator[tuple[AdamW, Tensor]]:
        return zip(self._parts, own.split(self._lengths), strict=True)

    def restart(self) -> None:
        self.steps = 0
        for part in self._parts:
            part.restart()

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for part in self._parts for buffer in part.buffers]

    def refresh(self) -> None:
        for part in self._parts:
            part.refresh()

    def state(self) -> dict[str, Tensor]:
        states = [part.state() for part in self._parts]
        return {kind: torch.cat([state[kind] for state in states]) for kind in states[0]}

    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        split = {kind: buffer.split(self._sizes) for kind, buffer in state.items()}
        for index, part in enumerate(self._parts):
            part.load_state({kind: buffers[index] for kind, buffers in split.items()}, steps)
        self.steps = steps
