"""Log-probabilities and entropies of tokens without logits of all rows in float32.

A head of 49,152 words over a thousand tokens is 190 MiB of logits in float32, and plain autograd
keeps five such tensors. Here logits are made for some rows at a time, in the precision of the
weights; fewer of them exist in float32; and the backward pass makes them again. On a CPU the bounds
are what its cache holds, elsewhere what makes products large and launches few.

Shapes: U hidden states, D hidden size, V words, n tokens asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .flat_parameters import ADDED_AT_ONCE
from .host_memory import on_host, sent

MOST_LOGITS = 1 << 23
"""Logits that exist at once on a CPU, in the precision of the weights: 16 MiB in bfloat16."""
MOST_IN_FLOAT32 = 1 << 21
"""Logits that exist at once in float32 on a CPU: 8 MiB, about what the cache holds."""
_ON_DEVICE, _ON_DEVICE_IN_FLOAT32 = 1 << 28, 1 << 27
"""Chunks on other devices, half a gigabyte each: 1,766 states of 151,936 words, and half that."""


def known_words(head: Any, num_words: int | None) -> tuple[Tensor, Tensor | None]:
    """Return weight [V, D] and bias of a head, or those of its first `num_words` words."""
    if num_words is None:
        return head.weight, head.bias
    return head.weight[:num_words], None if head.bias is None else head.bias[:num_words]


def most_logits(*, on_cpu: bool) -> tuple[int, int]:
    return (MOST_LOGITS, MOST_IN_FLOAT32) if on_cpu else (_ON_DEVICE, _ON_DEVICE_IN_FLOAT32)


def token_logprob(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    entry: Tensor | None,
    temperature: float,
    *,
    needs_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of targets, and entropies of the distributions they are of.

    Shapes: `states` [U, D]; `weight` [V, D] and `bias` [V], the head's; `target` i64[n], or
    i64[n, m] for m words of each distribution; `entry` i64[n], the state before each target, None
    if there is one for each, in order. Returns f32 of the shape of `target`, differentiable; and
    entropies f32[n] if they are wanted.
    """
    places = torch.arange(len(target)) if entry is None else on_host(entry)
    of_target = places if target.ndim == 1 else places.repeat_interleave(target.shape[1])
    found: Any = _TokenLogprob.apply(
        states, weight, bias, target.flatten(), of_target, temperature, needs_entropy
    )
    logprob, entropy = found
    if not needs_entropy:
        return logprob.view(target.shape), None
    return logprob.view(target.shape), entropy if entry is None else entropy[entry]


def top_words(
    states: Tensor, weight: Tensor, bias: Tensor | None, num_words: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The likeliest words after each state, most likely first; no gradient passes.

    Shapes: `states` [U, D]; `weight` [V, D] and `bias` [V], the head's. Returns log-probabilities
    and words, f32[U, k] and i64[U, k].
    """
    logprob = torch.empty(len(states), num_words, dtype=torch.float32, device=states.device)
    words = torch.empty_like(logprob, dtype=torch.int64)
    at_once, in_float32 = _bounds(weight)
    for rows in _chunks(len(states), at_once):
        logits = F.linear(states[rows], weight, bias)
        for part in _chunks(len(logits), in_float32):
            at = slice(rows.start + part.start, rows.start + part.stop)
            z = logits[part].float().div_(temperature)
            best, words[at] = z.topk(num_words)
            logprob[at] = best - z.logsumexp(-1, keepdim=True)
    return logprob, words


def exponential_sums(z: Tensor, *, weighted: bool) -> list[Tensor]:
    """Return `sum exp(z)` and `sum z exp(z)`, which give log-probabilities and entropies.

    The largest z must be 0. Then the logarithm of the first and minus the second have one sign, so
    that `entropy_of_sums` loses no digits; `lse - sum(p logit)` does where logits are large.
    `z`, f[n, V], is overwritten where `weighted`; words at -inf count for nothing.
    """
    chance = z.exp()
    total = chance.sum(-1)
    if not weighted:
        return [total]
    return [total, chance.mul_(finite_(z)).sum(-1)]


def entropy_of_sums(total: Tensor, weighted: Tensor) -> Tensor:
    """Return entropies in nats, never below 0, from `exponential_sums`."""
    return total.log() - weighted / total


def finite_(z: Tensor) -> Tensor:
    """Replace -inf by the lowest finite number, in place, so that 0 times it is 0."""
    return z.clamp_(min=torch.finfo(z.dtype).min)


class _TokenLogprob(torch.autograd.Function):
    """See `token_logprob`.

    With z the logits over the temperature, less the largest, and p their softmax: logprob =
    z[target] - lse(z), d logprob / d z = onehot - p, and d entropy / d z = -p (log p + entropy).
    """

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
        by_state = torch.argsort(entry, stable=True)
        order = sent(by_state, states.device)
        lines = _Lines(entry[by_state], target[order])
        at_once, in_float32 = _bounds(weight)
        largest = torch.empty(len(states), dtype=torch.float32, device=states.device)
        log_total = torch.empty_like(largest)
        entropy = torch.zeros_like(largest) if needs_entropy else largest.new_zeros(0)
        logprob = torch.empty(len(target), dtype=torch.float32, device=states.device)
        for rows in _chunks(len(states), at_once):
            logits = F.linear(states[rows], weight, bias)
            for part in _chunks(len(logits), in_float32):
                at = slice(rows.start + part.start, rows.start + part.stop)
                z = logits[part].float().div_(temperature)
                largest[at] = z.amax(-1)
                z.sub_(largest[at, None])
                asked, line, word = lines.of(at)
                # Before the sums, which overwrite z where entropies are wanted.
                found = z[line, word]
                sums = exponential_sums(z, weighted=needs_entropy)
                log_total[at] = sums[0].log()
                logprob[order[asked]] = found - log_total[at][line]
                if needs_entropy:
                    entropy[at] = entropy_of_sums(*sums)
            del logits  # before the next ones are made
        ctx.save_for_backward(states, weight, bias, largest, log_total, entropy)
        ctx.lines, ctx.order, ctx.temperature = lines, order, temperature
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, largest, log_total, entropy = ctx.saved_tensors
        lines: _Lines = ctx.lines
        upstream = grads[0][ctx.order]
        to_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        at_once, in_float32 = _bounds(weight)
        # In 16 bits the sum over pieces would be rounded again for every piece.
        exact = weight.dtype if len(states) <= at_once else torch.float32
        to_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        to_bias = largest.new_zeros(len(weight)) if ctx.needs_input_grad[2] else None
        for rows in _chunks(len(states), at_once):
            change = F.linear(states[rows], weight, bias)
            for part in _chunks(len(change), in_float32):
                at = slice(rows.start + part.start, rows.start + part.stop)
                z = change[part].float().div_(ctx.temperature)
                z.sub_(largest[at, None]).sub_(log_total[at, None])
                asked, line, word = lines.of(at)
                wanted = upstream[asked]
                p = z.exp()
                scale = wanted.new_zeros(len(p)).index_add_(0, line, wanted).neg_()
                if len(entropy):
                    of_entropy = grads[1][at, None]
                    finite_(z).add_(entropy[at, None]).mul_(-of_entropy).add_(scale[:, None]).mul_(
                        p
                    )
                else:
                    z = p.mul_(scale[:, None])
                z.index_put_((line, word), wanted, accumulate=True)
                change[part] = z.div_(ctx.temperature)
            if to_states is not None:
                to_states[rows] = change @ weight
            if to_weight is not None:
                _add_product(to_weight, change, states[rows])
            if to_bias is not None:
                to_bias += change.sum(0, dtype=torch.float32)
            del change  # before the next one is made
        of_bias = None if to_bias is None else to_bias.to(weight.dtype)
        of_weight = None if to_weight is None else to_weight.to(weight.dtype)
        return to_states, of_weight, of_bias, None, None, None, None


def _add_product(total: Tensor, change: Tensor, states: Tensor) -> None:
    """Add `change^T states`, [V, D], to a total in their precision or in float32."""
    if total.dtype == states.dtype:
        total.addmm_(change.t(), states)
        return
    # In parts: on a CPU an addition of two dtypes first converts all of what it is given.
    on_cpu = total.device.type == "cpu"
    at_once = max(ADDED_AT_ONCE // states.shape[1], 1) if on_cpu else len(total)
    for words in _chunks(len(total), at_once):
        total[words].add_(change[:, words].t() @ states)


class _Lines:
    """The tokens asked for, on the device, and their states, ascending on the CPU."""

    def __init__(self, entry: Tensor, target: Tensor) -> None:
        self._entry, self._target = entry, target
        self._there = sent(entry, target.device)

    def of(self, rows: slice) -> tuple[slice, Tensor, Tensor]:
        """For some states: places of `entry`, and for each the state, from 0, and the word."""
        edges = torch.tensor([rows.start, rows.stop])
        begin, end = torch.searchsorted(self._entry, edges).tolist()
        asked = slice(begin, end)
        return asked, self._there[asked] - rows.start, self._target[asked]


def _bounds(weight: Tensor) -> tuple[int, int]:
    """States whose logits exist at once, and in float32, under a head [V, D]."""
    at_once, in_float32 = most_logits(on_cpu=weight.device.type == "cpu")
    return at_once // len(weight), in_float32 // len(weight)


def _chunks(length: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))
