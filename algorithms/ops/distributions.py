"""Categorical distributions over actions of which some may be invalid; random numbers for ops.

Distributions are tensors whose last dimension counts actions. An action with several independent
components has the sum of their log-probabilities and of their entropies.

An op has no state, and may be computed in any number of pieces, in any process and again after a
restart. A number that depends on a seed and on the tokens of some rows alone comes out the same
each time, and differs from step to step because the rows do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor


def masked_logits(logits: Tensor, valid: Tensor | None) -> Tensor:
    """Logits with the lowest finite number where an action is invalid, so its probability is 0.

    Sampling, log-probabilities and entropies must all use them, the update included, or the ratio
    to the policy that acted is biased. Huang and Ontanon, "A Closer Look at Invalid Action Masking
    in Policy Gradient Algorithms", 2020.

    Args:
        logits: f32[..., actions].
        valid: bool[..., actions], True where an action may be taken; None if all may.

    Returns:
        f32[..., actions]; no gradient reaches the logit of an invalid action.

    Raises:
        ValueError: If no action is valid somewhere.
    """
    if valid is None:
        return logits
    if not bool(valid.any(dim=-1).all()):
        raise ValueError("a state has no valid action; every row of the mask needs one True")
    return torch.where(valid, logits, torch.finfo(logits.dtype).min)


def action_logprob(logits: Tensor, action: Tensor, valid: Tensor | None = None) -> Tensor:
    """Log-probability of the actions that were taken.

    Args:
        logits: f32[..., actions], differentiable.
        action: i64[...].
        valid: bool[..., actions]; see `masked_logits`.

    Returns:
        f32[...].
    """
    logprob = masked_logits(logits, valid).log_softmax(dim=-1)
    return logprob.gather(-1, action[..., None]).squeeze(-1)


def entropy_of_logits(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Entropy in nats; invalid actions and those of probability 0 count for nothing.

    Args:
        logits: f32[..., actions], differentiable.
        valid: bool[..., actions]; see `masked_logits`.

    Returns:
        f32[...].
    """
    return entropy_of_logprobs(masked_logits(logits, valid).log_softmax(dim=-1), valid)


def entropy_of_logprobs(logprob: Tensor, valid: Tensor | None = None) -> Tensor:
    """Entropy in nats, never below 0, from log-probabilities of all actions f32[..., actions]."""
    # One may be -inf; 0 times it would be nan, and so would its gradient.
    term = logprob.exp() * logprob.clamp(min=torch.finfo(logprob.dtype).min)
    return -(term if valid is None else torch.where(valid, term, torch.zeros_like(term))).sum(-1)


def uniforms(seed: int, *tokens: Tensor) -> Iterator[float]:
    """Endless numbers in [0, 1) for some rows.

    Args:
        seed: Another seed gives other numbers.
        tokens: i64[T] each, a row's tokens; padding of -1 is left out.
    """
    rows = [row[row >= 0].tolist() for row in tokens]
    key = hashlib.blake2b(repr((seed, rows)).encode(), digest_size=16).digest()
    count = 0
    while True:
        digest = hashlib.blake2b(count.to_bytes(8, "little"), key=key, digest_size=8).digest()
        yield (int.from_bytes(digest, "little") >> 11) / 2**53
        count += 1
