"""The responses of one batch of prompts while they are sampled: what a decoder of ours calls.

A decoder computes the logits of the next token of some rows, in whatever batches it likes; which
token is sampled, what is recorded of it and whether it ends the response is decided here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.roles.language import Sampling
from .filters import filtered_logits
from .responses import Responses
from .sampling import sample_token
from .stop_strings import StopStrings, TokenizerRecipe

__all__ = ["ResponseSampler"]


class ResponseSampler:
    """Samples tokens, records them, and knows when a response has ended.

    Nothing here depends on which rows are computed together.

    Args:
        prompt: i64[P, T], right padded with -1, no empty rows, on the model's device.
        uniform: f64[P * num_samples, max_new] on the same device; the random numbers.
        sampling: How responses are sampled.
        eos_token_id: Ends a response, as `sampling.stop_token_ids` do.
        vocab_size: Tokens that the model knows.
        tokenizer: To look for `sampling.stop`.

    Attributes:
        prompt: As given.
        num_samples: Responses per prompt; rows of one prompt are adjacent.
        num_rows: Responses.
        max_new: Longest response.
    """

    def __init__(
        self,
        prompt: Tensor,
        uniform: Tensor,
        sampling: Sampling,
        *,
        eos_token_id: int,
        vocab_size: int,
        tokenizer: TokenizerRecipe | None = None,
    ) -> None:
        self.prompt = prompt
        self.num_samples = sampling.num_samples
        self.num_rows, self.max_new = uniform.shape
        self._uniform = uniform
        self._sampling = sampling
        self._filters = bool(sampling.filtered_by)
        device = uniform.device
        self._token = torch.full(uniform.shape, -1, dtype=torch.int64, device=device)
        self._logprob = torch.zeros(uniform.shape, dtype=torch.float32, device=device)
        self._finished = torch.zeros(self.num_rows, dtype=torch.bool, device=device)
        self._ends = torch.tensor([eos_token_id, *sampling.stop_token_ids], device=device)
        lengths = (prompt >= 0).sum(1).tolist()
        limits = torch.tensor([sampling.longest_response(length) for length in lengths])
        self._limit = limits.repeat_interleave(self.num_samples).to(device)
        self._seen = None
        if sampling.repetition_penalty != 1:
            self._seen = _tokens_of(prompt, vocab_size).repeat_interleave(self.num_samples, 0)
        self._stops = None
        if sampling.stop:
            assert tokenizer is not None, "the engine refuses stop strings without a tokenizer"
            self._stops = StopStrings(tokenizer, sampling, prompt)

    def sample(self, logits: Tensor, row: Tensor, live: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Sample and record token `t` of some rows.

        Args:
            logits: [M, V], any float dtype.
            row: i64[M]; which response each of them is of.
            live: bool[M]; False for rows that fill a batch and count for nothing.
            t: Tokens that the live rows have so far.

        Returns:
            The tokens, i64[M], and which rows are to go on, bool[M]: neither ended nor as long as
            they may be.
        """
        temperature, uniform = self._sampling.temperature, self._uniform[row, t]
        if self._filters:
            seen = None if self._seen is None else self._seen[row]
            barred = self._ends if t < self._sampling.min_new_tokens else None
            logits = filtered_logits(logits, self._sampling, seen=seen, barred=barred)
            temperature = 1.0 if temperature else 0.0  # they are divided by it
        token, logprob = sample_token(logits, uniform, temperature)
        at, taken = row[live], token[live]
        self._token[at, t] = taken
        self._logprob[at, t] = logprob[live]
        if self._seen is not None:
            self._seen[at, taken] = True
        ended = (token[:, None] == self._ends).any(1)
        if self._stops is not None:
            ended |= self._stopped(token, row, live & ~ended)
        self._finished[at] = ended[live]
        return token, live & ~ended & (self._limit[row] > t + 1)

    def _stopped(self, token: Tensor, row: Tensor, asked: Tensor) -> Tensor:
        """bool[M]: which of the rows asked about end with a stop string."""
        assert self._stops is not None
        found = [
            is_asked and self._stops.complete(index, sampled)
            for index, sampled, is_asked in zip(
                row.tolist(), token.tolist(), asked.tolist(), strict=True
            )
        ]
        return torch.tensor(found, dtype=torch.bool, device=token.device)

    def responses(self) -> Responses:
        """What was sampled."""
        length = (self._token >= 0).sum(1)
        return Responses(self._token, self._logprob, length, self._finished)


def _tokens_of(prompt: Tensor, vocab_size: int) -> Tensor:
    """bool[P, V]: which tokens stand in each prompt, i64[P, T] padded with -1."""
    seen = torch.zeros(len(prompt), vocab_size + 1, dtype=torch.bool, device=prompt.device)
    return seen.scatter_(1, prompt.where(prompt >= 0, vocab_size), True)[:, :vocab_size]
