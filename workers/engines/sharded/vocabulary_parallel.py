"""Log-probabilities and entropies of logits whose vocabulary is cut over processes.

Logits are never gathered: four numbers per token are exchanged instead (the largest logit, the sum
of exponentials, the target's logit and the mean logit), or the few largest logits of each process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...training.token_logprob import entropy_of_sums, exponential_sums, finite_

_AT_ONCE = 1 << 26
"""Logits that exist at once in float32: 256 MiB, so that few kernels are started for many rows."""


def vocabulary_logprob(
    logits: Tensor, target: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Process r of `group` holds words `r * V` to `(r + 1) * V`. Every process gets the same result
    and computes its own words' gradient, as if it alone went backward through the result.

    Args:
        logits: f[n, V], this process's words.
        target: i64[n], or i64[n, m] for m words of each distribution; in the whole vocabulary.
        temperature: Divides the logits.
        group: The processes that share the vocabulary, in its order; None for this one alone.

    Returns:
        f32 of the shape of `target`, and f32[n]; in nats.
    """
    words = target if target.ndim > 1 else target[:, None]
    both: tuple[Tensor, Tensor] = _Statistics.apply(logits, words, temperature, group)  # type: ignore[assignment]
    return both[0].view(target.shape), both[1]


def vocabulary_top(
    logits: Tensor, num_words: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The likeliest words, most likely first; no gradient passes.

    Args:
        logits: f32[n, V], this process's words; see `vocabulary_logprob`.
        num_words: At most as many as there are words in the whole vocabulary.
        group: See `vocabulary_logprob`.

    Returns:
        Their log-probabilities f32[n, num_words] and the words, i64[n, num_words]; the same in
        every process.
    """
    width = logits.shape[1]
    best, words = logits.topk(min(num_words, width))
    total = logits.logsumexp(-1, keepdim=True)
    if group is None or group.size() == 1:
        return best - total, words
    words += group.rank() * width
    parts = [_gathered(column, group) for column in (best, words, total)]
    best, chosen = torch.cat(parts[0], 1).topk(num_words)
    total = torch.cat(parts[2], 1).logsumexp(-1, keepdim=True)
    return best - total, torch.cat(parts[1], 1).gather(1, chosen)


def _gathered(column: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """A tensor of the same shape in all processes, from each of them."""
    parts = [torch.empty_like(column) for _ in range(group.size())]
    dist.all_gather(parts, column.contiguous(), group)
    return parts


class _Statistics(torch.autograd.Function):
    """With p = softmax(l): d logprob / dl = [target] - p, d entropy / dl = -p (log p + H).

    l are the logits over the temperature, targets i64[n, m]. Of the logits `_AT_ONCE` are looked at
    together, in float32, and looked at again going backward: what is kept is as large as they are,
    in their precision, and no larger.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        alone = group is None or group.size() == 1
        num_words = logits.shape[1]
        # Dividing keeps the order, so the largest can be divided afterwards.
        largest = _wide(logits.amax(-1)) / temperature
        if not alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        local = target - (0 if group is None else group.rank()) * num_words
        here = (local >= 0) & (local < num_words)
        column = local.clamp(0, num_words - 1)
        sums = largest.new_empty(2 + target.shape[1], len(logits))
        for rows in _rows(logits):
            shifted = _shifted(logits[rows], temperature, largest[rows])
            sums[2:, rows] = shifted.gather(1, column[rows]).where(here[rows], 0.0).t()
            sums[:2, rows] = torch.stack(exponential_sums(shifted, weighted=True))
        if not alone:
            dist.all_reduce(sums, group=group)
        total, weighted, *found = sums.unbind()
        entropy = entropy_of_sums(total, weighted)
        ctx.save_for_backward(logits, largest, total, entropy, column, here)
        ctx.temperature = temperature
        return torch.stack(found, 1) - total.log()[:, None], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, largest, total, entropy, column, here = ctx.saved_tensors
        to_logprob, to_entropy = grads
        grad = torch.empty_like(logits)
        for rows in _rows(logits):
            logprob = _shifted(logits[rows], ctx.temperature, largest[rows])
            chance = logprob.exp().div_(total[rows, None])
            logprob -= total[rows].log()[:, None]
            factor = finite_(logprob).add_(entropy[rows, None]).mul_(to_entropy[rows, None])
            factor += to_logprob[rows].sum(1, keepdim=True)
            part = chance.neg_().mul_(factor)
            part.scatter_add_(1, column[rows], to_logprob[rows] * here[rows])
            grad[rows] = part.div_(ctx.temperature)
        return grad, None, None, None


def _shifted(logits: Tensor, temperature: float, largest: Tensor) -> Tensor:
    return (_wide(logits) / temperature).sub_(largest[:, None])


def _wide(x: Tensor) -> Tensor:
    """In float32, unless it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(logits: Tensor) -> Iterator[slice]:
    size = max(1, _AT_ONCE // max(1, logits.shape[1]))
    for begin in range(0, len(logits), size):
        yield slice(begin, begin + size)
