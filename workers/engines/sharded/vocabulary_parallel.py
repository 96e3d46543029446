"""Log-probabilities and entropies of logits whose vocabulary is cut over processes.

Logits are never gathered: four numbers per token are exchanged instead (the largest logit, the sum
of exponentials, the target's logit and the mean logit), or the few largest logits of each process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["vocabulary_logprob", "vocabulary_top"]


def vocabulary_logprob(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Process r of `group` holds words `r * V` to `(r + 1) * V`. Every process gets the same result
    and computes its own words' gradient, as if it alone went backward through the result.

    Args:
        logits: f32[n, V], this process's words.
        target: i64[n], or i64[n, m] for m words of each distribution; in the whole vocabulary.
        group: The processes that share the vocabulary, in its order; None for this one alone.

    Returns:
        f32 of the shape of `target`, and f32[n]; in nats.
    """
    words = target if target.ndim > 1 else target[:, None]
    both: tuple[Tensor, Tensor] = _Statistics.apply(logits, words, group)  # type: ignore[assignment]
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

    Targets are i64[n, m].
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        alone = group is None or group.size() == 1
        largest = logits.amax(-1)
        if not alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest[:, None]
        chance = shifted.exp()
        width = logits.shape[1]
        local = target - (0 if group is None else group.rank()) * width
        here = (local >= 0) & (local < width)
        column = local.clamp(0, width - 1)
        chosen = shifted.gather(1, column).where(here, 0.0)
        sums = torch.stack([chance.sum(-1), (chance * shifted).sum(-1), *chosen.unbind(1)])
        if not alone:
            dist.all_reduce(sums, group=group)
        total, weighted, *found = sums.unbind()
        log_total = total.log()
        chance /= total[:, None]
        entropy = log_total - weighted / total
        shifted -= log_total[:, None]
        ctx.save_for_backward(chance, shifted, entropy, column, here)
        return torch.stack(found, 1) - log_total[:, None], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        chance, logprob, entropy, column, here = ctx.saved_tensors
        to_logprob, to_entropy = grads
        factor = to_logprob.sum(1, keepdim=True) + to_entropy[:, None] * (
            logprob + entropy[:, None]
        )
        grad = -chance * factor
        grad.scatter_add_(1, column, to_logprob * here)
        return grad, None, None
