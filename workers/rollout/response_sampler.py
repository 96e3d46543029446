"""The responses of one batch of prompts while they are sampled: what a decoder of ours calls.

A decoder computes the logits of the next token of some rows, in whatever batches it likes; which
token is sampled, what is recorded of it and whether it ends the response is decided here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.roles.language import Sampling
from ...dataflow.runtime.call_context import call_version
from .ended import Begun, Ended
from .filters import filtered_logits
from .responses import Responses
from .sampling import sample_token
from .stop_strings import StopStrings, TokenizerRecipe

__all__ = ["ResponseSampler", "tokens_of"]


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
        begun: What there is of the responses already; nothing by default.

    Attributes:
        num_samples: Responses per prompt; rows of one prompt are adjacent.
        open: bool[rows], on the CPU; the responses that a token is still to be added to.
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
        begun: Begun | None = None,
    ) -> None:
        self.num_samples = sampling.num_samples
        self._prompt = prompt
        self._uniform = uniform
        self._sampling = sampling
        self._filters = bool(sampling.filtered_by)
        rows, self._max_new = uniform.shape
        device = uniform.device
        self._token = torch.full(uniform.shape, -1, dtype=torch.int64, device=device)
        self._logprob = torch.zeros(uniform.shape, dtype=torch.float32, device=device)
        self._length = torch.zeros(rows, dtype=torch.int64, device=device)
        self._finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self._ends = torch.tensor([eos_token_id, *sampling.stop_token_ids], device=device)
        self._vocab_size = vocab_size
        limits = [sampling.longest_response(n) for n in (prompt >= 0).sum(1).tolist()]
        limit = torch.tensor(limits, dtype=torch.int64).repeat_interleave(self.num_samples)
        self._limit = limit.to(device)
        self._seen = None
        if sampling.repetition_penalty != 1:
            self._seen = tokens_of(prompt, vocab_size).repeat_interleave(self.num_samples, 0)
        self._stops = None
        if sampling.stop:
            assert tokenizer is not None, "the engine refuses stop strings without a tokenizer"
            self._stops = StopStrings(tokenizer, sampling, prompt)
        self._sampled_by = call_version()
        self._version = torch.full_like(self._token, self._sampled_by)
        self.open = torch.ones(rows, dtype=torch.bool)
        if begun is not None:
            self._go_on(begun)

    def _go_on(self, begun: Begun) -> None:
        """Take what there is as sampled here."""
        self._token.copy_(begun.token)
        self._logprob.copy_(begun.logprob)
        self._length = (self._token >= 0).sum(1)
        most_new = torch.as_tensor(begun.most_new, device=self._limit.device)
        self._limit = torch.minimum(self._limit, self._length + most_new)
        self.open = ~begun.ended.cpu() & (self._length < self._limit).cpu()
        last = self._token.gather(1, (self._length - 1).clamp(min=0)[:, None])
        self._finished = (last == self._ends).any(1)
        if self._seen is not None:
            self._seen |= tokens_of(self._token, self._vocab_size)
        if self._stops is not None:
            for row, tokens in enumerate(begun.token.tolist()):
                said = [self._stops.complete(row, token) for token in tokens if token >= 0]
                self._finished[row] |= bool(said and said[-1])

    def texts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """What rows are to go on from, prompt and response; for samples that have none, once.

        Args:
            row: i64[n], ascending.

        Returns:
            i64[m, T], right padded with -1, no wider than the longest; and i64[n], the text of
            each row.
        """
        has_begun = self._length[row] > 0
        prompt = row // self.num_samples
        new = torch.ones_like(has_begun)
        new[1:] = has_begun[1:] | has_begun[:-1] | (prompt[1:] != prompt[:-1])
        before, after = self._prompt[prompt[new]], self._token[row[new]]
        both = torch.cat([before, after], 1)
        # Stable, so that what is there keeps its order and moves to the left.
        both = both.gather(1, torch.argsort((both < 0).to(torch.int8), dim=1, stable=True))
        return both[:, : int((both >= 0).sum(1).max())], new.cumsum(0) - 1

    def longest(self, row: Tensor) -> int:
        """Tokens, of prompt and response, that the longest of some rows may come to have."""
        return int(((self._prompt >= 0).sum(1)[row // self.num_samples] + self._limit[row]).max())

    def sample(self, logits: Tensor, row: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Sample and record the next token of some rows.

        Args:
            logits: [M, V], any float dtype.
            row: i64[M]; which response each of them is of.
            live: bool[M]; False for rows that fill a batch and count for nothing.

        Returns:
            The tokens, i64[M], and which rows are to go on, bool[M]: neither ended nor as long as
            they may be.
        """
        self._note_version()
        place = self._length[row].clamp(max=self._max_new - 1)
        temperature, uniform = self._sampling.temperature, self._uniform[row, place]
        if self._filters:
            seen = None if self._seen is None else self._seen[row]
            barred = self._barred(place, logits.shape[1])
            logits = filtered_logits(logits, self._sampling, seen=seen, barred=barred)
            temperature = 1.0 if temperature else 0.0  # they are divided by it
        token, logprob = sample_token(logits, uniform, temperature)
        at, taken = row[live], token[live]
        self._token[at, place[live]] = taken
        self._logprob[at, place[live]] = logprob[live]
        self._length[at] += 1
        if self._seen is not None:
            self._seen[at, taken] = True
        ended = (token[:, None] == self._ends).any(1)
        if self._stops is not None:
            ended |= self._stopped(token, row, live & ~ended)
        self._finished[at] = ended[live]
        return token, live & ~ended & (self._limit[row] > place + 1)

    def _note_version(self) -> None:
        """Newer weights may have come: what is sampled from here on is theirs."""
        version = call_version()
        if version != self._sampled_by:
            place = torch.arange(self._max_new, device=self._length.device)
            self._version.masked_fill_(place >= self._length[:, None], version)
            self._sampled_by = version

    def _barred(self, place: Tensor, vocab_size: int) -> Tensor | None:
        """bool[M, V]: the tokens that would end a response too early; None if none would."""
        early = place < self._sampling.min_new_tokens
        if not self._sampling.min_new_tokens or not bool(early.any()):
            return None
        ends = torch.zeros(vocab_size, dtype=torch.bool, device=place.device)
        ends[self._ends] = True
        return early[:, None] & ends

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

    def end(self, rows: Tensor) -> Ended:
        """Some responses, to which nothing more is added: i64[n], ascending, on any device."""
        self.open[rows.cpu()] = False
        left = self._length[self.open.to(rows.device)]
        # Each of those that are left gets one token more at least.
        at_least = int(left.min()) + 1 if len(left) else self._max_new
        return Ended(rows.cpu(), self.responses(rows), at_least)

    def responses(self, rows: Tensor | slice = slice(None)) -> Responses:
        """What there is of some rows, on the CPU; of all by default."""
        parts = (self._token, self._logprob, self._length, self._finished)
        token, logprob, length, finished = (part[rows].cpu() for part in parts)
        version = self._version[rows].cpu().masked_fill(token < 0, -1)
        return Responses(token, logprob, length, finished, version)


def tokens_of(text: Tensor, vocab_size: int) -> Tensor:
    """bool[n, V]: which tokens stand in each text, i64[n, T] padded with -1."""
    seen = torch.zeros(len(text), vocab_size + 1, dtype=torch.bool, device=text.device)
    return seen.scatter_(1, text.where(text >= 0, vocab_size), True)[:, :vocab_size]
