"""The responses of one batch of prompts while they are sampled: what a decoder of ours calls.

A decoder computes the logits of the next token of some rows, in whatever batches it likes; which
token is sampled, what is recorded of it and whether it ends the response is decided here.
`TokenSampler` samples where the logits are; what was sampled is kept on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...algorithms.roles.language import Sampling
from ...dataflow.runtime.call_context import call_version
from .ended import Begun, Ended
from .responses import Responses
from .stop_strings import StopStrings, TokenizerRecipe
from .token_sampler import TokenSampler, tokens_of


class ResponseSampler:
    """Samples tokens, records them, and knows when a response has ended.

    Nothing here depends on which rows are computed together.

    Args:
        prompt: i64[P, T], right padded with -1, no empty rows, on any device.
        uniform: f64[P * num_samples, max_new] on the model's device; the random numbers.
        sampling: How responses are sampled.
        end_ids: Tokens that end a response, as `sampling.stop_token_ids` do.
        vocab_size: Tokens that may be sampled.
        tokenizer: To look for `sampling.stop`.
        begun: What there is of the responses already; nothing by default.

    Attributes:
        num_samples: Responses per prompt; rows of one prompt are adjacent.
        open: bool[rows], on the CPU; the responses that a token is still to be added to.
        tokens: Samples the next tokens; see `record_later`.
        reads_text: Whether responses may end with a string, so that each token must be recorded
            before the next is sampled.
    """

    def __init__(
        self,
        prompt: Tensor,
        uniform: Tensor,
        sampling: Sampling,
        *,
        end_ids: Sequence[int],
        vocab_size: int,
        tokenizer: TokenizerRecipe | None = None,
        begun: Begun | None = None,
    ) -> None:
        self.num_samples = sampling.num_samples
        self._prompt = prompt.cpu()
        shape = uniform.shape
        self._max_new = shape[1]
        self._token = torch.full(shape, -1, dtype=torch.int64)
        self._logprob = torch.zeros(shape, dtype=torch.float32)
        self._length = torch.zeros(len(uniform), dtype=torch.int64)
        self._finished = torch.zeros(len(uniform), dtype=torch.bool)
        self._ends = torch.tensor([*end_ids, *sampling.stop_token_ids])
        limits = [sampling.longest_response(n) for n in (self._prompt >= 0).sum(1).tolist()]
        limit = torch.tensor(limits, dtype=torch.int64)
        self._limit = limit.repeat_interleave(self.num_samples)
        self._stops = None
        if sampling.stop:
            assert tokenizer is not None, "the engine refuses stop strings without a tokenizer"
            self._stops = StopStrings(tokenizer, sampling, self._prompt)
        self.reads_text = self._stops is not None
        self._sampled_by = call_version()
        self._version = torch.full_like(self._token, self._sampled_by)
        self.open = torch.ones(len(uniform), dtype=torch.bool)
        if begun is not None:
            self._go_on(begun)
        self.tokens = TokenSampler(
            uniform,
            sampling,
            ends=self._ends,
            vocab_size=vocab_size,
            length=self._length,
            limit=self._limit,
            seen=self._seen(vocab_size, uniform) if sampling.repetition_penalty != 1 else None,
        )
        # On the CPU lengths that are recorded are noted as well; more is to be noted otherwise.
        self._length = self.tokens.length[:-1].cpu()
        self._notes = uniform.device.type != "cpu" or sampling.repetition_penalty != 1

    def _seen(self, vocab_size: int, uniform: Tensor) -> Tensor:
        """bool[rows, V], on the device of `uniform`: which tokens each text has."""
        seen = tokens_of(self._prompt.to(uniform.device), vocab_size)
        seen = seen.repeat_interleave(self.num_samples, 0)
        return seen | tokens_of(self._token.to(uniform.device), vocab_size)

    def _go_on(self, begun: Begun) -> None:
        """Take what there is as sampled here."""
        self._token.copy_(begun.token)
        self._logprob.copy_(begun.logprob)
        self._length = (self._token >= 0).sum(1)
        most_new = torch.as_tensor(begun.most_new).cpu()
        self._limit = torch.minimum(self._limit, self._length + most_new)
        self.open = ~begun.ended.cpu() & (self._length < self._limit)
        last = self._token.gather(1, (self._length - 1).clamp(min=0)[:, None])
        self._finished = (last == self._ends).any(1)
        if self._stops is not None:
            for row, tokens in enumerate(begun.token.tolist()):
                said = [self._stops.complete(row, token) for token in tokens if token >= 0]
                self._finished[row] |= bool(said and said[-1])

    def texts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """What rows are to go on from, prompt and response; for samples that have none, once.

        Args:
            row: i64[n], ascending, on the CPU.

        Returns:
            i64[m, T], right padded with -1, no wider than the longest; and i64[n], the text of
            each row. On the CPU.
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

    def longest_now(self, row: Tensor) -> int:
        """Tokens, of prompt and response, that the longest of some rows has."""
        return int(((self._prompt >= 0).sum(1)[row // self.num_samples] + self._length[row]).max())

    def most_left(self, row: Tensor) -> int:
        """Tokens by which the response of one of some rows may grow at most."""
        return int((self._limit[row] - self._length[row]).max())

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
        device = logits.device
        sampled = self.tokens.sample(logits, row, waits=device.type == "cpu")
        token, logprob = sampled.token[None].cpu(), sampled.logprob[None].cpu()
        goes_on = self.record(row.cpu(), live[None].cpu(), token, logprob)
        if self._notes:
            self.tokens.note(sampled, row, live)
        return sampled.token, goes_on.to(device)

    def record_later(self) -> None:
        """Have tokens that are noted in `tokens` count here when they are recorded, and not before.

        For a decoder that asks `tokens` for several before it records them.
        """
        self._length = self._length.clone()

    def record(self, row: Tensor, live: Tensor, token: Tensor, logprob: Tensor) -> Tensor:
        """Add tokens that `tokens` has sampled to responses; all given is on the CPU.

        Args:
            row: i64[M]; which responses.
            live: bool[n, M]; which of them each of n tokens counts for: of each row the first few.
            token: i64[n, M]; of texts that are looked at for strings one at a time.
            logprob: f32[n, M].

        Returns:
            bool[M]; rows that the last token counts for and that are to go on.
        """
        self._note_version()
        step, slot = torch.nonzero(live, as_tuple=True)
        at, taken = row[slot], token[step, slot]
        place = self._length[at] + step
        self._token[at, place] = taken
        self._logprob[at, place] = logprob[step, slot]
        self._length.index_add_(0, at, torch.ones_like(at))
        ended = (taken[:, None] == self._ends).any(1)
        if self._stops is not None:
            ended |= self._stopped(at, taken, ended)
        self._finished[at[ended]] = True
        return live[-1] & ~self._finished[row] & (self._limit[row] > self._length[row])

    def _note_version(self) -> None:
        """Newer weights may have come: what is sampled from here on is theirs."""
        version = call_version()
        if version != self._sampled_by:
            place = torch.arange(self._max_new)
            self._version.masked_fill_(place >= self._length[:, None], version)
            self._sampled_by = version

    def _stopped(self, row: Tensor, token: Tensor, ended: Tensor) -> Tensor:
        """bool[n]: which rows end with a stop string; those that have ended are not asked."""
        assert self._stops is not None
        given = zip(row.tolist(), token.tolist(), ended.tolist(), strict=True)
        found = [not has and self._stops.complete(index, new) for index, new, has in given]
        return torch.tensor(found, dtype=torch.bool)

    def end(self, rows: Tensor) -> Ended:
        """Some responses, to which nothing more is added: i64[n], ascending, on any device."""
        rows = rows.cpu()
        self.open[rows] = False
        left = self._length[self.open]
        # Each of those that are left gets one token more at least.
        at_least = int(left.min()) + 1 if len(left) else self._max_new
        return Ended(rows, self.responses(rows), at_least)

    def responses(self, rows: Tensor) -> Responses:
        """What there is of some rows, i64[n] on the CPU."""
        token = self._token[rows]
        version = self._version[rows].masked_fill(token < 0, -1)
        return Responses(
            token, self._logprob[rows], self._length[rows], self._finished[rows], version
        )
