"""Log-probabilities and entropies of tokens without logits of all rows in float32.

A head of 49,152 words over a thousand tokens is 190 MiB of logits in float32, and plain autograd
keeps five such tensors. Here logits are made for some rows at a time, in the precision of the
weights; fewer of them exist in float32; and the backward pass makes them again. On a CPU the bounds
are what its cache holds, elsewhere what makes products large and launches few.

A CUDA device reads each logit once forward, makes none of them float32, and replaces it by its
gradient once; it keeps them in between if they are not too many.

Shapes: U hidden states, D hidden size, V words, n tokens asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiled import Compiled, number
from .flat_parameters import ADDED_AT_ONCE
from .host_memory import on_host, sent
from .weight_gradients import add_product, set_total, total_of

MOST_LOGITS = 1 << 23
"""Logits that exist at once on a CPU, in the precision of the weights: 16 MiB in bfloat16."""
MOST_IN_FLOAT32 = 1 << 21
"""Logits that exist at once in float32 on a CPU: 8 MiB, about what the cache holds."""
_ON_DEVICE, _ON_DEVICE_IN_FLOAT32 = 1 << 28, 1 << 27
"""Chunks on other devices, half a gigabyte each: 1,766 states of 151,936 words, and half that."""
_MOST_KEPT, _PIECE_KEPT = 3 << 30, (1 << 31) - 1
"""Logits of 16 bits that a CUDA device keeps from the forward to the backward pass, 6 GiB, and how
many of them are a piece, which kernels count with 32 bits."""
_LEAST = -1e4  # of a logit less the largest: its chance is 0 by far, and times anything still 0


def known_words(head: Any, num_words: int | None) -> tuple[Tensor, Tensor | None]:
    """Return weight [V, D] and bias of a head, or those of its first `num_words` words."""
    return _first_words(head.weight, num_words), _first_words(head.bias, num_words)


def _first_words(leaf: Any, num_words: int | None) -> Any:
    if leaf is None or num_words in (None, len(leaf)):
        return leaf
    total, part = total_of(leaf), leaf[:num_words]
    if total is not None:
        set_total(part, total[:num_words])
    return part


def most_logits(*, on_cpu: bool) -> tuple[int, int]:
    return (MOST_LOGITS, MOST_IN_FLOAT32) if on_cpu else (_ON_DEVICE, _ON_DEVICE_IN_FLOAT32)


def keeps_logits(num_logits: int, dtype_bytes: int, *, on_cpu: bool) -> bool:
    """Whether so many logits stay from the forward to the backward pass."""
    return not on_cpu and dtype_bytes < 4 and num_logits <= _MOST_KEPT


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
    by = number(temperature, states.device)
    for rows in _chunks(len(states), at_once):
        logits = F.linear(states[rows], weight, bias)
        if logits.device.type == "cuda":
            best, words[rows] = logits.topk(num_words)
            largest, log_total = _sums(logits, by, False)
            logprob[rows] = best.float().div_(by) - largest[:, None] - log_total[:, None]
            continue
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
    """Replace -inf by a number, in place, so that 0 times it is 0."""
    return z.clamp_(min=_LEAST)


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
        by = number(temperature, states.device)
        size = len(states) * len(weight), weight.element_size()
        keeps = keeps_logits(*size, on_cpu=states.device.type != "cuda")
        ctx.most = _PIECE_KEPT if keeps and ctx.needs_input_grad[0] else None
        largest = torch.empty(len(states), dtype=torch.float32, device=states.device)
        log_total = torch.empty_like(largest)
        entropy = torch.empty_like(largest) if needs_entropy else largest.new_zeros(0)
        logprob = torch.empty(len(target), dtype=torch.float32, device=states.device)
        ctx.kept = []
        for rows in _pieces(states, weight, ctx.most):
            logits = F.linear(states[rows], weight, bias)
            asked, line, word = lines.of(rows)
            # Before the sums, which overwrite logits of float32.
            found = logits[line, word].float().div_(by)
            largest[rows], log_total[rows], *spread = _sums(logits, by, needs_entropy)
            logprob[order[asked]] = found - largest[rows][line] - log_total[rows][line]
            if needs_entropy:
                entropy[rows] = spread[0]
            if ctx.most is not None:
                ctx.kept.append(logits)
            del logits  # before the next ones are made
        ctx.save_for_backward(states, weight, bias, largest, log_total, entropy)
        ctx.lines, ctx.order, ctx.by = lines, order, by
        ctx.totals = total_of(weight), total_of(bias)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, largest, log_total, entropy = ctx.saved_tensors
        upstream = grads[0][ctx.order]
        pieces = list(_pieces(states, weight, ctx.most))
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        to_states = torch.empty_like(states) if needs_states else None
        to_weight, to_bias = ctx.totals
        if needs_weight and to_weight is None:
            # In 16 bits the sum over pieces would be rounded again for every piece.
            exact = weight.dtype if len(pieces) == 1 else torch.float32
            to_weight = torch.zeros_like(weight, dtype=exact)
        if needs_bias and to_bias is None:
            to_bias = largest.new_zeros(len(weight))
        for rows in pieces:
            change = ctx.kept.pop(0) if ctx.kept else F.linear(states[rows], weight, bias)
            asked, line, word = ctx.lines.of(rows)
            wanted = upstream[asked]
            scale = wanted.new_zeros(len(change)).index_add_(0, line, wanted).neg_()
            of_rows = [largest[rows], log_total[rows], scale]
            if len(entropy):
                of_rows += [entropy[rows], grads[1][rows]]
            # In float32: the gradient at a target is a small difference where it is likely.
            at_target = change[line, word].float()
            z = at_target.div_(ctx.by).sub_(of_rows[0][line]).sub_(of_rows[1][line])
            at_target = _before_sums(z, *(one[line] for one in of_rows[2:]))
            first = _first_of_each(line * len(weight) + word)
            at_target.index_put_((first,), wanted, accumulate=True)
            _change(change, ctx.by, *of_rows)
            change.index_put_((line, word), at_target[first].div_(ctx.by).to(change.dtype))
            if to_states is not None:
                to_states[rows] = change @ weight
            if needs_weight:
                _add_product(to_weight, change, states[rows])
            if to_bias is not None and needs_bias:
                to_bias += change.sum(0, dtype=torch.float32)
            del change  # before the next one is made
        found = [to_weight if needs_weight else None, to_bias if needs_bias else None]
        for place, total in enumerate(ctx.totals):
            own = found[place]
            found[place] = None if own is None or total is not None else own.to(weight.dtype)
        return to_states, *found, None, None, None, None


def _sums_eager(logits: Tensor, by: Tensor, weighted: bool) -> list[Tensor]:
    """The largest logit over a temperature, the logarithm of `exponential_sums`, and entropies."""
    found = [logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2 + weighted)]
    for part in _chunks(len(logits), _bounds(logits[0])[1]):
        z = logits[part].float().div_(by)
        largest = found[0][part] = z.amax(-1)
        sums = exponential_sums(z.sub_(largest[:, None]), weighted=weighted)
        found[1][part] = sums[0].log()
        if weighted:
            found[2][part] = entropy_of_sums(*sums)
    return found


def _sums_compiled(logits: Tensor, by: Tensor, weighted: bool) -> list[Tensor]:
    z = logits.float() / by
    largest = z.amax(-1)
    z = z - largest[:, None]
    chance = z.exp()
    total = chance.sum(-1)
    if not weighted:
        return [largest, total.log()]
    spread = (chance * z.clamp(min=_LEAST)).sum(-1)
    return [largest, total.log(), (total.log() - spread / total).clamp(min=0)]


def _change_eager(
    logits: Tensor,
    by: Tensor,
    largest: Tensor,
    log_total: Tensor,
    scale: Tensor,
    entropy: Tensor | None = None,
    of_entropy: Tensor | None = None,
) -> None:
    """Replace logits by their gradient but for the targets' own part of it."""
    of_rows = [one[:, None] for one in (scale, entropy, of_entropy) if one is not None]
    for part in _chunks(len(logits), _bounds(logits[0])[1]):
        z = logits[part].float().div_(by)
        z.sub_(largest[part, None]).sub_(log_total[part, None])
        logits[part] = _before_sums(z, *(one[part] for one in of_rows)).div_(by)


def _before_sums(
    z: Tensor, scale: Tensor, entropy: Tensor | None = None, of_entropy: Tensor | None = None
) -> Tensor:
    """The gradient of sums over words, by the logarithms z of their chances, in place."""
    p = z.exp()
    if entropy is None or of_entropy is None:
        return p.mul_(scale)
    return finite_(z).add_(entropy).mul_(-of_entropy).add_(scale).mul_(p)


def _change_compiled(
    logits: Tensor,
    by: Tensor,
    largest: Tensor,
    log_total: Tensor,
    scale: Tensor,
    entropy: Tensor | None = None,
    of_entropy: Tensor | None = None,
) -> None:
    z = logits.float() / by - largest[:, None] - log_total[:, None]
    factor = scale[:, None]
    if entropy is not None and of_entropy is not None:
        factor = factor - of_entropy[:, None] * (z.clamp(min=_LEAST) + entropy[:, None])
    logits.copy_(z.exp() * factor / by)


_sums = Compiled(_sums_compiled, (0,), _sums_eager)
_change = Compiled(_change_compiled, (0, 2, 3, 4, 5, 6), _change_eager)


def _first_of_each(keys: Tensor) -> Tensor:
    """For each of n keys the place of the first one like it, i64[n]."""
    found, order = keys.sort(stable=True)
    return order[torch.searchsorted(found, keys)]


def _add_product(total: Tensor, change: Tensor, states: Tensor) -> None:
    """Add `change^T states`, [V, D], to a total in their precision or in float32."""
    if total.dtype == states.dtype or total.device.type == "cuda":
        add_product(total, change.t(), states)
        return
    # In parts: on a CPU an addition of two dtypes first converts all of what it is given.
    for words in _chunks(len(total), max(ADDED_AT_ONCE // states.shape[1], 1)):
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


def _pieces(states: Tensor, weight: Tensor, most: int | None) -> Iterator[slice]:
    """States whose logits are made together, at most so many logits if that is given."""
    return _chunks(len(states), _bounds(weight)[0] if most is None else most // len(weight))


def _chunks(length: int, size: int) -> Iterator[slice]:
    size = max(size, 1)
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))
