"""How the next tokens of some rows are sampled: the part of a response's life on the device.

The host need not look at anything here. What the device knows of a response (how long it is, which
tokens it has, where it ends) lies here in tensors that stay where they are, so a step that samples
can be captured as a CUDA graph. `ResponseSampler` keeps what was sampled, on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...algorithms.roles.language import Sampling
from .filters import filtered_logits
from .sampling import sample_token


class Sampled(NamedTuple):
    """The next tokens of M rows."""

    token: Tensor
    """i64[M]."""
    logprob: Tensor
    """f32[M]."""
    place: Tensor
    """i64[M]; of the token in its response."""


class TokenSampler:
    """Samples tokens, each with its own random number.

    Args:
        uniform: f64[rows, max_new] on the model's device; the random numbers.
        sampling: How responses are sampled.
        ends: Tokens that end a response.
        vocab_size: Tokens that may be sampled, the first of those that the model knows.
        length: i64[rows]; tokens that there are of each response.
        limit: i64[rows]; and how many there may be.
        seen: bool[rows, V]; which tokens each text has. None without a penalty for repetition.

    Attributes:
        length: i64[rows + 1], on the device; tokens that have been noted, of nobody at the end.
    """

    def __init__(
        self,
        uniform: Tensor,
        sampling: Sampling,
        *,
        ends: Tensor,
        vocab_size: int,
        length: Tensor,
        limit: Tensor,
        seen: Tensor | None,
    ) -> None:
        device = uniform.device
        # One row more than there are: rows that count for nothing write theirs.
        self._nobody = len(uniform)
        self.length = torch.cat([length, length.new_zeros(1)]).to(device)
        self._seen = None if seen is None else torch.cat([seen, seen.new_zeros(1, vocab_size)])
        self._limit = limit.to(device)
        self._uniform = uniform
        self._sampling = sampling
        self._filters = bool(sampling.filtered_by)
        self._ends = ends.to(device)
        # A token that ends a text may be no word of the vocabulary: then none does.
        may_end = torch.zeros(vocab_size + 1, dtype=torch.bool, device=device)
        may_end.index_fill_(0, self._ends.clamp(max=vocab_size), True)
        self._may_end = may_end[:vocab_size]
        self._true = torch.ones((), dtype=torch.bool, device=device)

    def begin(self, row: int, uniform: Tensor, limit: int, text: Tensor) -> None:
        """Begin another response in a row.

        Args:
            row: Which.
            uniform: f64[n]; its random numbers.
            limit: Tokens that it may have.
            text: i64[T]; what it answers.
        """
        self._uniform[row, : len(uniform)] = uniform.to(self._uniform.device)
        self.length[row], self._limit[row] = 0, limit
        if self._seen is not None:
            self._seen[row] = tokens_of(text[None].to(self._seen.device), len(self._may_end))[0]

    def sample(self, logits: Tensor, row: Tensor, *, waits: bool) -> Sampled:
        """Sample the next token of some rows; `note` what has been sampled before the next.

        Args:
            logits: [M, V], any float dtype; V may be more than `vocab_size`.
            row: i64[M]; which response each of them is of.
            waits: Whether the host may look at what was computed, which is faster on the CPU.
        """
        logits = logits[:, : len(self._may_end)]
        max_new = self._uniform.shape[1]
        place = self.length.index_select(0, row).clamp(max=max_new - 1)
        temperature = self._sampling.temperature
        uniform = self._uniform.take(row * max_new + place)
        if self._filters:
            seen = None if self._seen is None else self._seen.index_select(0, row)
            barred = self._barred(place, waits=waits)
            logits = filtered_logits(logits, self._sampling, seen=seen, barred=barred, waits=waits)
            temperature = 1.0 if temperature else 0.0  # they are divided by it
        token, logprob = sample_token(logits, uniform, temperature, waits=waits)
        return Sampled(token, logprob, place)

    def note(self, sampled: Sampled, row: Tensor, live: Tensor) -> None:
        """Have the next tokens follow these.

        Args:
            sampled: From `sample`.
            row: i64[M]; which response each row is of.
            live: bool[M]; False for rows that fill a batch and count for nothing.
        """
        at = row.masked_fill(~live, self._nobody)
        self.length.index_put_((at,), sampled.place + 1)
        if self._seen is not None:
            self._seen.index_put_((at, sampled.token), self._true)

    def goes_on(self, sampled: Sampled, row: Tensor, live: Tensor) -> Tensor:
        """Which of the live rows are to have more, bool[M]; stop strings are not looked for."""
        ended = (sampled.token[:, None] == self._ends).any(1)
        return live & ~ended & (self._limit.index_select(0, row) > sampled.place + 1)

    def _barred(self, place: Tensor, *, waits: bool) -> Tensor | None:
        """bool[M, V]: the tokens that would end a response too early; None if surely none would."""
        if not self._sampling.min_new_tokens:
            return None
        early = place < self._sampling.min_new_tokens
        if waits and not bool(early.any()):
            return None
        return early[:, None] & self._may_end


def tokens_of(text: Tensor, vocab_size: int) -> Tensor:
    """bool[n, V]: which tokens stand in each text, i64[n, T] padded with -1."""
    seen = torch.zeros(len(text), vocab_size + 1, dtype=torch.bool, device=text.device)
    others = (text < 0) | (text > vocab_size)
    return seen.scatter_(1, text.masked_fill(others, vocab_size), True)[:, :vocab_size]
