"""What sampling options make of logits before a token is sampled: penalties and truncations.

The order is vLLM's: tokens that must not come yet, the penalty for repetition, the temperature,
min-p, top-k, top-p. Transformers applies min-p last; one filter alone is the same in both. A filter
keeps a token that is as likely as the last one it keeps, so what is kept does not depend on the
order in which equal ones are found; vLLM and transformers do so for top-k and min-p alone.

Each row is filtered for itself: its bits do not depend on the rows beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...algorithms.roles.language import Sampling

_FIRST_LOOK = 64
"""Tokens among which the nucleus is looked for first: sorting a whole vocabulary takes 0.5 s for
96 rows of 49,152, these 10 ms."""
_GROWTH = 8
_ONE_IN_BITS = 0x3F800000
"""A float32 of 1."""


def filtered_logits(
    logits: Tensor,
    sampling: Sampling,
    *,
    seen: Tensor | None,
    barred: Tensor | None,
    waits: bool = True,
) -> Tensor:
    """Logits whose softmax is the distribution that a token is sampled from.

    Args:
        logits: [rows, V], any float dtype; kept as they are.
        sampling: The options. At temperature 0 the logits are not divided, and not truncated,
            which would not move the likeliest token.
        seen: bool[rows, V]: tokens of the prompt and the response so far. None without a penalty.
        barred: bool[rows, V]: tokens that must not come yet; None if all may.
        waits: Whether the host may look at what was computed, which is faster on the CPU; the same
            tokens are left out.

    Returns:
        f32[rows, V]; -inf where a token is left out.
    """
    logits = logits.float().clone()
    if barred is not None:
        logits = logits.masked_fill_(barred, -math.inf)
    if seen is not None:
        logits = penalized(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        logits = keep_min_p(logits, sampling.min_p)
    if 0 < sampling.top_k < logits.shape[1]:
        logits = keep_top_k(logits, sampling.top_k)
    return keep_top_p(logits, sampling.top_p, waits=waits) if sampling.top_p < 1 else logits


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by the penalty, and multiply negative ones with it.

    Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation",
    2019, section 4.1, in the form of vLLM and transformers.

    Args:
        logits: f32[rows, V].
        seen: bool[rows, V].
        penalty: Above 0; above 1 makes repetitions less likely.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least `min_p` as likely as the likeliest: f32[rows, V], else -inf.

    Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs",
    2024.
    """
    least = logits.amax(1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the `top_k` likeliest tokens, of at least as many: f32[rows, V], else -inf."""
    least = logits.topk(top_k, dim=1).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Tensor, top_p: float, *, waits: bool = True) -> Tensor:
    """Keep the likeliest tokens whose probabilities first add up to `top_p`.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020: the nucleus.

    Args:
        logits: f32[rows, V].
        top_p: In (0, 1).
        waits: See `filtered_logits`.

    Returns:
        f32[rows, V]; -inf outside the nucleus, which has one token at least.
    """
    probability = logits.softmax(1)
    find = _least_ranked if waits else _least_bisected
    return logits.masked_fill(probability < find(probability, top_p), -math.inf)


def _least_ranked(probability: Tensor, top_p: float) -> Tensor:
    """The least probability in the nucleus, f32[rows, 1], among those ranked first."""
    least = torch.empty_like(probability[:, :1])
    rows = torch.arange(len(probability), device=probability.device)
    count = _FIRST_LOOK
    while len(rows):
        count = min(count, probability.shape[1])
        ranked = probability[rows].topk(count, dim=1).values
        total = ranked.double().cumsum(1)
        # How many tokens come before the one that completes the nucleus. A sum does not depend on
        # how far it is continued, so neither do the tokens kept.
        place = (total < top_p).sum(1, keepdim=True)
        found = (place < count)[:, 0] | (count == probability.shape[1])
        least[rows[found]] = ranked.gather(1, place.clamp(max=count - 1))[found]
        rows = rows[~found]
        count *= _GROWTH
    return least


def _least_bisected(probability: Tensor, top_p: float) -> Tensor:
    """The same without a look: the most of which all that are at least as likely add up to `top_p`.

    Floats that are not negative are ordered as their bits are, so 30 halvings of those up to 1 find
    it to the bit.
    """
    low = torch.zeros_like(probability[:, :1], dtype=torch.int32)
    high = torch.full_like(low, _ONE_IN_BITS + 1)
    for _ in range(_ONE_IN_BITS.bit_length()):
        middle = (low + high) >> 1
        enough = probability * (probability >= middle.view(torch.float32))
        found = enough.sum(1, keepdim=True, dtype=torch.float64) >= top_p
        low, high = torch.where(found, middle, low), torch.where(found, high, middle)
    return low.view(torch.float32)
