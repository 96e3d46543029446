"""The turns of conversations while they are sampled: what a decoder of ours calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...algorithms.roles.agents import Turn, TurnRequest
from ...algorithms.roles.language import Sampling
from .response_sampler import ResponseSampler


class TurnSampler(ResponseSampler):
    """A `ResponseSampler` whose rows are conversations: a row's turn is its response for a while.

    A row may read before it speaks: tokens that it is shown, one after another, while other rows
    sample theirs.

    Args:
        num_rows: Conversations.
        sampling: How turns are sampled.
        end_ids: Tokens that end a turn, as `sampling.stop_token_ids` do.
        vocab_size: Tokens that may be sampled.
        device: Of the model.
    """

    def __init__(
        self,
        num_rows: int,
        sampling: Sampling,
        *,
        end_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        text = torch.full((num_rows, sampling.max_total_tokens), -1)
        super().__init__(
            text,
            torch.zeros(num_rows, sampling.max_new_tokens, dtype=torch.float64, device=device),
            replace(sampling, num_samples=1),  # each row has a text of its own
            end_ids=end_ids,
            vocab_size=vocab_size,
        )
        self.open[:] = False
        self._reads: dict[int, deque[int]] = {}

    def begin(self, request: TurnRequest) -> None:
        """Begin a turn of a row."""
        row, text = request.row, torch.tensor(request.text)
        self._prompt[row] = -1
        self._prompt[row, : len(text)] = text
        self._token[row], self._logprob[row] = -1, 0.0
        self._length[row], self._limit[row] = 0, request.max_new_tokens
        self._finished[row], self.open[row] = False, True
        self.tokens.begin(row, request.uniform, request.max_new_tokens, text)
        self._note_version()
        self._version[row] = self._sampled_by

    def longest(self, row: Tensor) -> int:
        """See `ResponseSampler.longest`, with room for what is shown first after the turn."""
        return super().longest(row) + 1

    def read(self, row: int, tokens: list[int]) -> None:
        """Have a row take these tokens, one with each step, before it samples its turn."""
        self._reads[row] = deque(tokens)

    def sample(self, logits: Tensor, row: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """See `ResponseSampler.sample`; a row that reads gets the token that it is to read."""
        if not self._reads:
            return super().sample(logits, row, live)
        rows, alive = row.tolist(), live.tolist()
        reads = [place for place, own in enumerate(rows) if alive[place] and own in self._reads]
        reading = torch.zeros_like(live)
        reading[reads] = True
        token, goes_on = super().sample(logits, row, live & ~reading)
        read = [self._reads[rows[place]].popleft() for place in reads]
        token[reads] = torch.tensor(read, dtype=token.dtype, device=token.device)
        self._reads = {own: left for own, left in self._reads.items() if left}
        return token, goes_on | reading

    def turn(self, row: int) -> Turn:
        """What was sampled of a row's turn, on the CPU."""
        said = self.responses(torch.tensor([row]))
        own = slice(0, int(said.length[0]))
        return Turn(
            row,
            said.token[0, own].clone(),
            said.logprob[0, own].clone(),
            said.versions[0, own].clone(),
            bool(said.finished[0]),
        )
