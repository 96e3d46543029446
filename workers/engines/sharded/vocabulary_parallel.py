"""Log-probabilities and entropies of logits whose vocabulary is cut over processes.

Logits are never gathered: four numbers per token are exchanged instead (the largest logit, the sum
of exponentials, the target's logit and the mean logit).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["vocabulary_logprob"]


def vocabulary_logprob(
    logits: Tensor, target: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution.

    Process r of `group` holds words `r * V` to `(r + 1) * V`. Every process gets the same result
    and computes its own words' gradient, as if it alone went backward through the result.

    Args:
        logits: f32[n, V], this process's words.
        target: i64[n], in the whole vocabulary.
        group: The processes that share the vocabulary, in its order; None for this one alone.

    Returns:
        f32[n] each, in nats.
    """
    both: tuple[Tensor, Tensor] = _Statistics.apply(logits, target, group)  # type: ignore[assignment]
    return both


class _Statistics(torch.autograd.Function):
    """With p = softmax(l): d logprob / dl = [target] - p, d entropy / dl = -p (log p + H)."""

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
        column = local.clamp(0, width - 1)[:, None]
        chosen = shifted.gather(1, column)[:, 0].where(here, 0.0)
        sums = torch.stack([chance.sum(-1), (chance * shifted).sum(-1), chosen])
        if not alone:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums.unbind()
        log_total = total.log()
        chance /= total[:, None]
        entropy = log_total - weighted / total
        shifted -= log_total[:, None]
        ctx.save_for_backward(chance, shifted, entropy, column, here)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        chance, logprob, entropy, column, here = ctx.saved_tensors
        to_logprob, to_entropy = grads
        factor = to_logprob[:, None] + to_entropy[:, None] * (logprob + entropy[:, None])
        grad = -chance * factor
        grad.scatter_add_(1, column, (to_logprob * here)[:, None])
        return grad, None, None
