"""The responses of one batch of prompts while they are sampled: what a decoder of ours calls.

A decoder computes the logits of the next token of some rows, in whatever batches it likes; which
token is sampled, what is recorded of it and whether it ends the response is decided here.
`TokenSampler` samples where the logits are; what was sampled is kept on the host.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...algorithms.roles.language import Turn, TurnRequest
from ...algorithms.roles.language_tables import Sampling
from ...dataflow.runtime.call_context import call_version
from .generation_engine import BegunRows, EndedRows, Responses
from .sampling import sample_token

# How `tokenizers` reports tokens whose text changes once others follow them.
_INVALID_PREFIX = "Invalid prefix encountered"


class TokenizerRecipe(Protocol):
    """Recipe for the model's tokenizer, hashable: a `TokenizerSpec`."""

    def build(self) -> Any:
        """One whose `backend` is a fast tokenizer of transformers."""
        ...


class StopStrings:
    """Watches the responses of one call for stop strings."""

    def __init__(self, tokenizer: TokenizerRecipe, sampling: Sampling, prompt: Tensor) -> None:
        self._backend = _backend(tokenizer)
        self._stop = sampling.stop
        self._reach = max(map(len, self._stop)) - 1
        self._min_new_tokens = sampling.min_new_tokens
        prompts = [[token for token in row if token >= 0] for row in prompt.tolist()]
        self._streams = [_stream(ids) for ids in prompts for _ in range(sampling.num_samples)]
        self._tail = [""] * len(self._streams)
        self._count = [0] * len(self._streams)

    def complete(self, row: int, token: int) -> bool:
        new = self._decoded(row, token)
        text = self._tail[row] + new
        self._tail[row] = text[-self._reach :] if self._reach else ""
        self._count[row] += 1
        if not new or self._count[row] <= self._min_new_tokens:
            return False
        # What ended in the text before was found, or came before it might.
        return any(text.find(s, max(len(text) - len(new) - len(s) + 1, 0)) >= 0 for s in self._stop)

    def _decoded(self, row: int, token: int) -> str:
        try:
            return self._streams[row].step(self._backend, token) or ""
        except Exception as error:  # `tokenizers` raises Exception itself
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._streams[row] = _stream([])
            return self._streams[row].step(self._backend, token) or ""


@functools.cache
def _backend(tokenizer: TokenizerRecipe) -> Any:
    backend: Any = tokenizer.build().backend
    return backend.backend_tokenizer


def _stream(ids: list[int]) -> Any:
    from tokenizers.decoders import DecodeStream

    return DecodeStream(ids=ids, skip_special_tokens=False)


# Tokens among which the nucleus is looked for first: sorting a whole vocabulary takes 0.5 s for 96
# rows of 49,152, these 10 ms.
_FIRST_LOOK = 64
_GROWTH = 8
_ONE_IN_BITS = 0x3F800000  # Bits of the float32 1.0


def filtered_logits(
    logits: Tensor,
    sampling: Sampling,
    *,
    seen: Tensor | None,
    barred: Tensor | None,
    waits: bool = True,
) -> Tensor:
    """Return logits whose softmax is the distribution that a token is sampled from."""
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
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least `min_p` as likely as the likeliest: f32[rows, V], else -inf.

    Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs",
    2024.
    """
    # A ratio of probabilities is a difference of logits, so no softmax is needed.
    least = logits.amax(1, keepdim=True) + math.log(min_p)
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the `top_k` likeliest tokens, of at least as many: f32[rows, V], else -inf."""
    least = logits.topk(top_k, dim=1).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Tensor, top_p: float, *, waits: bool = True) -> Tensor:
    """Keep the likeliest tokens whose probabilities first add up to `top_p`.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020: the nucleus.
    """
    probability = logits.softmax(1)
    find = _least_ranked if waits else _least_bisected
    return logits.masked_fill(probability < find(probability, top_p), -math.inf)


def _least_ranked(probability: Tensor, top_p: float) -> Tensor:
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
    low = torch.zeros_like(probability[:, :1], dtype=torch.int32)
    high = torch.full_like(low, _ONE_IN_BITS + 1)
    # Bits of floats that are not negative are ordered as the floats are: so many halvings are
    # exact.
    for _ in range(_ONE_IN_BITS.bit_length()):
        middle = (low + high) >> 1
        enough = probability * (probability >= middle.view(torch.float32))
        found = enough.sum(1, keepdim=True, dtype=torch.float64) >= top_p
        low, high = torch.where(found, middle, low), torch.where(found, high, middle)
    return low.view(torch.float32)


class SampledTokens(NamedTuple):
    """The next tokens of M rows."""

    token: Tensor  # i64[M]
    logprob: Tensor  # f32[M]
    place: Tensor  # i64[M]; index of the token in its response


class TokenSampler:
    """Samples tokens, each with its own random number."""

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
        # One row more than there are, for rows that only fill a batch.
        self._dummy = len(uniform)
        # i64[rows + 1], on the device; tokens that have been noted; the last row is a dummy.
        self.length = torch.cat([length, length.new_zeros(1)]).to(device)
        self._seen = None if seen is None else torch.cat([seen, seen.new_zeros(1, vocab_size)])
        self._limit = limit.to(device)
        self._uniform = uniform
        self._sampling = sampling
        self._filters = bool(sampling.filtered_by)
        self._ends = ends.to(device)
        # An end token beyond the vocabulary marks the last entry, which is cut off.
        may_end = torch.zeros(vocab_size + 1, dtype=torch.bool, device=device)
        may_end.index_fill_(0, self._ends.clamp(max=vocab_size), True)
        self._may_end = may_end[:vocab_size]
        self._true = torch.ones((), dtype=torch.bool, device=device)

    def alike(self, other: TokenSampler) -> bool:
        """Whether another's responses, of the same engine, could be sampled in their place."""
        same = self._sampling == other._sampling and len(self._may_end) == len(other._may_end)
        return same and self._uniform.shape == other._uniform.shape

    def take(self, other: TokenSampler) -> None:
        """Sample another's responses from now on, where these lay, and nothing of these."""
        self.length.copy_(other.length)
        self._limit.copy_(other._limit)
        self._uniform.copy_(other._uniform)
        if self._seen is not None and other._seen is not None:
            self._seen.copy_(other._seen)

    def begin(self, row: int, uniform: Tensor, limit: int, text: Tensor) -> None:
        self._uniform[row, : len(uniform)] = uniform.to(self._uniform.device)
        self.length[row], self._limit[row] = 0, limit
        if self._seen is not None:
            self._seen[row] = tokens_of(text[None].to(self._seen.device), len(self._may_end))[0]

    def sample(self, logits: Tensor, row: Tensor, *, waits: bool) -> SampledTokens:
        """Sample the next token of some rows; `note` what has been sampled before the next."""
        logits = logits[:, : len(self._may_end)]
        max_new = self._uniform.shape[1]
        place = self.length.index_select(0, row).clamp(max=max_new - 1)
        temperature = self._sampling.temperature
        # By row and place, so that it does not matter what else is in the batch.
        uniform = self._uniform.take(row * max_new + place)
        if self._filters:
            seen = None if self._seen is None else self._seen.index_select(0, row)
            barred = None
            if self._sampling.min_new_tokens:
                early = place < self._sampling.min_new_tokens
                # To look whether there are any would wait for the device.
                if not waits or bool(early.any()):
                    barred = early[:, None] & self._may_end
            logits = filtered_logits(logits, self._sampling, seen=seen, barred=barred, waits=waits)
            temperature = 1.0 if temperature else 0.0  # they are divided by it
        token, logprob = sample_token(logits, uniform, temperature, waits=waits)
        return SampledTokens(token, logprob, place)

    def note(self, sampled: SampledTokens, row: Tensor, live: Tensor) -> None:
        """Append these tokens to the texts that the next ones follow."""
        at = row.masked_fill(~live, self._dummy)
        self.length.index_put_((at,), sampled.place + 1)
        if self._seen is not None:
            self._seen.index_put_((at, sampled.token), self._true)

    def goes_on(self, sampled: SampledTokens, row: Tensor, live: Tensor) -> Tensor:
        """Return which of the live rows go on, bool[M]; stop strings are not looked for."""
        ended = (sampled.token[:, None] == self._ends).any(1)
        return live & ~ended & (self._limit.index_select(0, row) > sampled.place + 1)


def tokens_of(text: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens occur in each text, bool[n, V], of i64[n, T] padded with -1."""
    seen = torch.zeros(len(text), vocab_size + 1, dtype=torch.bool, device=text.device)
    others = (text < 0) | (text > vocab_size)
    return seen.scatter_(1, text.masked_fill(others, vocab_size), True)[:, :vocab_size]


class ResponseSampler:
    """Samples tokens, records them, and knows when a response has ended.

    Nothing here depends on which rows are computed together.
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
        begun: BegunRows | None = None,
    ) -> None:
        # Responses per prompt; rows of one prompt are adjacent.
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
        # Whether responses may end with a string, so that each token must be recorded before the
        # next is sampled.
        self.reads_text = self._stops is not None
        self._sampled_by = call_version()
        self._version = torch.full_like(self._token, self._sampled_by)
        # bool[rows], on the CPU; the responses that a token is still to be added to.
        self.open = torch.ones(len(uniform), dtype=torch.bool)
        if begun is not None:
            self._go_on(begun)
        # Samples the next tokens; see `record_later`.
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
        seen = tokens_of(self._prompt.to(uniform.device), vocab_size)
        seen = seen.repeat_interleave(self.num_samples, 0)
        return seen | tokens_of(self._token.to(uniform.device), vocab_size)

    def _go_on(self, begun: BegunRows) -> None:
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
        """Sample and record the next token of some rows."""
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
        """Add tokens that `tokens` has sampled to responses; all given is on the CPU."""
        self._note_version()
        step, slot = torch.nonzero(live, as_tuple=True)
        at, taken = row[slot], token[step, slot]
        place = self._length[at] + (live.cumsum(0) - 1)[step, slot]
        self._token[at, place] = taken
        self._logprob[at, place] = logprob[step, slot]
        self._length.index_add_(0, at, torch.ones_like(at))
        ended = (taken[:, None] == self._ends).any(1)
        if self._stops is not None:
            given = zip(at.tolist(), taken.tolist(), ended.tolist(), strict=True)
            stopped = [not has and self._stops.complete(index, new) for index, new, has in given]
            ended |= torch.tensor(stopped, dtype=torch.bool)
        self._finished[at[ended]] = True
        return live[-1] & ~self._finished[row] & (self._limit[row] > self._length[row])

    def _note_version(self) -> None:
        version = call_version()
        if version != self._sampled_by:
            place = torch.arange(self._max_new)
            # What has been sampled keeps its version; what is to come has the new one.
            self._version.masked_fill_(place >= self._length[:, None], version)
            self._sampled_by = version

    def end(self, rows: Tensor) -> EndedRows:
        """Some responses, to which nothing more is added: i64[n], ascending, on any device."""
        rows = rows.cpu()
        self.open[rows] = False
        left = self._length[self.open]
        # Each of those that are left gets one token more at least.
        at_least = int(left.min()) + 1 if len(left) else self._max_new
        return EndedRows(rows, self.responses(rows), at_least)

    def responses(self, rows: Tensor) -> Responses:
        token = self._token[rows]
        version = self._version[rows].masked_fill(token < 0, -1)
        return Responses(
            token, self._logprob[rows], self._length[rows], self._finished[rows], version
        )


class TurnSampler(ResponseSampler):
    """A `ResponseSampler` whose rows are conversations: a row's turn is its response for a while.

    A row may read before it speaks: tokens that it is shown, one after another, while other rows
    sample theirs.
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
        self.longest_text = sampling.max_total_tokens
        self._reads: dict[int, deque[int]] = {}

    def begin(self, request: TurnRequest) -> None:
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
        return super().longest(row) + 1

    def read(self, row: int, tokens: list[int]) -> None:
        """Have a row take these tokens, one with each step, before it samples its turn."""
        self._reads[row] = deque(tokens)

    def sample(self, logits: Tensor, row: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
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

    def next_shown(self, row: int) -> int:
        """The first token that a row is to read."""
        token = self._reads[row].popleft()
        if not self._reads[row]:
            del self._reads[row]
        return token

    def shown(self, row: Tensor, width: int, count: int) -> Tensor:
        """At most `count` tokens that each of these rows reads next; -1 for none: i64[width, M]."""
        found = torch.full((width, len(row)), -1)
        for slot, own in enumerate(row.tolist()):
            for step in range(min(count, len(self._reads.get(own, ())))):
                found[step, slot] = self.next_shown(own)
        return found

    def turn(self, row: int) -> Turn:
        said = self.responses(torch.tensor([row]))
        own = slice(0, int(said.length[0]))
        return Turn(
            row,
            said.token[0, own].clone(),
            said.logprob[0, own].clone(),
            said.versions[0, own].clone(),
            bool(said.finished[0]),
        )
