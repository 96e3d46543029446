"""Counter-based randomness, and how one token is sampled.

A uniform number belongs to `(seed, role, step, ordinal, prompt_id, sample, position)` and to
nothing else: neither the rows that share a batch nor the number of workers can change it. The
source is Philox 4x64 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in
numpy's implementation, whose raw stream numpy guarantees across versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...dataflow.runtime.call_context import CallKey
from ..training.compiled import Compiled, number

_U64 = (1 << 64) - 1
_LARGE_VOCABULARY = 4096  # With fewer tokens looking for one in blocks gains nothing
_BLOCK = 64
_IN_CACHE = 1 << 19  # Logits that are made float32 at once: 2 MiB
_PURPOSE = "generate"  # names the streams of responses
_TURNS = "converse"  # and those of turns


def stream_key(seed: int, role: str, purpose: str, key: CallKey, *more: int) -> NDArray[np.uint64]:
    """Philox key (two 64-bit words) of one call's random stream; equal arguments, equal key."""
    text = "\x1f".join(map(str, (seed, role, purpose, key.step, key.ordinal, *more)))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def stream_generator(
    seed: int, role: str, purpose: str, key: CallKey, *more: int
) -> np.random.Generator:
    """A numpy generator over the stream of one call, for shuffles."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, role, purpose, key, *more)))


def row_uniforms(
    key: NDArray[np.uint64], prompt_id: NDArray[np.int64], sample: NDArray[np.int64], count: int
) -> Tensor:
    """Uniform numbers strictly inside (0, 1) for the first `count` positions of every row."""
    # One bit generator whose counter is set per row: building 256 of them costs 16 ms, this 0.5 ms.
    source = np.random.Philox(key=key)
    state = source.state
    raw = np.empty((len(prompt_id), count), dtype=np.uint64)
    for row, (prompt, index) in enumerate(zip(prompt_id.tolist(), sample.tolist(), strict=True)):
        state["state"]["counter"] = np.array([0, prompt & _U64, index, 0], dtype=np.uint64)
        source.state = state
        raw[row] = source.random_raw(count)
    return torch.from_numpy(((raw >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32)


@dataclass(frozen=True)
class SampleStreams:
    """The random numbers of one call's responses, each in a stream of its own.

    An engine that samples tokens itself takes `uniforms`; one that has random numbers of its own
    begins each response's at its seed.
    """

    seed: int  # The run's
    role: str  # The role that generates
    key: CallKey  # The call that is served
    prompt_id: Tensor  # i64[P]; which prompts
    num_samples: int  # Responses to each; rows of one prompt are adjacent
    # i64[P]; the step in which each prompt's responses began, whose streams they go on with. None
    # if all begin in the step of `key`.
    steps: Tensor | None = None

    def uniforms(self, count: int) -> Tensor:
        """Uniform numbers f64[P * num_samples, count]; see `row_uniforms`."""
        prompt_id = self.prompt_id.repeat_interleave(self.num_samples).cpu().numpy()
        sample = torch.arange(self.num_samples).repeat(len(self.prompt_id)).numpy()
        if self.steps is None:
            return row_uniforms(self._stream(self.key), prompt_id, sample, count)
        began = self.steps.repeat_interleave(self.num_samples).cpu()
        numbers = torch.empty(len(prompt_id), count, dtype=torch.float64)
        for step in began.unique().tolist():
            rows = began == step
            stream, its = self._stream(CallKey(step, self.key.ordinal)), rows.numpy()
            numbers[rows] = row_uniforms(stream, prompt_id[its], sample[its], count)
        return numbers

    def seeds(self, lengths: Sequence[int] | None = None) -> list[int]:
        """63 bits for each response."""
        ids = self.prompt_id.tolist()
        steps = [self.key.step] * len(ids) if self.steps is None else self.steps.tolist()
        rows = list(product(zip(steps, ids, strict=True), range(self.num_samples)))
        had = [0] * len(rows) if lengths is None else lengths
        words = (
            self._stream(CallKey(step, self.key.ordinal), prompt_id, sample, *([n] if n else []))
            for ((step, prompt_id), sample), n in zip(rows, had, strict=True)
        )
        return [int(word[0] >> np.uint64(1)) for word in words]

    def _stream(self, key: CallKey, *more: int) -> NDArray[np.uint64]:
        return stream_key(self.seed, self.role, _PURPOSE, key, *more)


def turn_uniforms(
    seed: int, role: str, key: CallKey, prompt_id: int, sample: int, turn: int, count: int
) -> Tensor:
    """The random numbers of one turn of a conversation: f64[count]; see `row_uniforms`."""
    stream = stream_key(seed, role, _TURNS, key, turn)
    return row_uniforms(stream, np.array([prompt_id]), np.array([sample]), count)[0]


def turn_seed(
    seed: int, role: str, key: CallKey, prompt_id: int, sample: int, turn: int = -1
) -> int:
    """63 bits for one turn, or by default for what answers all turns of a conversation."""
    stream = stream_key(seed, role, _TURNS, key, turn, prompt_id, sample)
    return int(stream[0] >> np.uint64(1))


def sample_token(
    logits: Tensor, uniform: Tensor, temperature: float, *, waits: bool = True
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution."""
    if temperature == 0:
        token = logits.argmax(-1)
        top = logits.gather(-1, token[:, None])[:, 0].float()
        return token, torch.zeros_like(top).masked_fill(~top.isfinite(), torch.nan)
    if logits.shape[1] < _LARGE_VOCABULARY:
        logprob = torch.log_softmax(logits.float() / temperature, dim=-1)
        token = _inverted(logprob.exp(), uniform)
        return token, logprob.gather(1, token[:, None])[:, 0]
    if logits.device.type != "cpu" or not waits:
        return _sample_in_two_passes(logits, uniform, temperature)
    rows = max(1, _IN_CACHE // logits.shape[1])
    parts = zip(logits.split(rows), uniform.split(rows), strict=True)
    found = [_sample_in_blocks(*part, temperature) for part in parts]
    token, logprob = (torch.cat(each) for each in zip(*found, strict=True))
    return token, logprob


def _sample_in_blocks(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    # The same for a large vocabulary, a few rows at a time, whose float32 numbers stay in the
    # cache. Blocks are summed in float32; then it must look which rows to do again.
    scaled = logits.to(torch.float32, copy=True).div_(temperature)
    top = scaled.amax(1, keepdim=True)
    share = scaled.sub_(top).exp_()  # of the likeliest token's probability
    token, is_sure, total = _found_in_blocks(share, uniform)
    unsure = torch.nonzero(~is_sure)[:, 0]
    if len(unsure):
        token[unsure] = _inverted(share[unsure], uniform[unsure])
    taken = logits.gather(1, token[:, None]).float() / temperature
    return token, (taken - top - total.log().float())[:, 0]


def _sample_in_two_passes(
    logits: Tensor, uniform: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    # The same for a device, which is bound by reading the logits: once for the largest, once for
    # the sums of blocks, then one block of each row. Exact sums need no look.
    num_words = logits.shape[1]
    top, sums = _block_sums(logits, number(temperature, logits.device))
    after = sums.cumsum(1)
    total = after[:, -1:]
    block, start, target = _block_of(after, uniform)
    index = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    near = logits.gather(1, index.clamp(max=num_words - 1)).float() / temperature
    inside = (near - top).exp().double() * (index < num_words)
    bounds = start + inside.cumsum(1)
    # A block's sum in another order may end a little further than its last bound; the number is
    # then in the share of the last token that has one.
    target = torch.minimum(target, torch.nextafter(bounds[:, -1:], start))
    place = torch.searchsorted(bounds, target, right=True).clamp(max=_BLOCK - 1)
    token = (block * _BLOCK + place).clamp(max=num_words - 1)
    taken = near.gather(1, token - block * _BLOCK)
    return token[:, 0], (taken - top - total.log().float())[:, 0]


def _sums_of_blocks(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest scaled logit, f32[M, 1], and sums of shares of it, f64[M, blocks]."""
    scaled = logits.float() / temperature
    top = scaled.amax(1, keepdim=True)
    share = (scaled - top).exp()
    whole = logits.shape[1] // _BLOCK * _BLOCK
    sums = share[:, :whole].reshape(len(logits), -1, _BLOCK).sum(-1, dtype=torch.float64)
    if whole < logits.shape[1]:
        rest = share[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat([sums, rest], 1)
    return top, sums


_block_sums = Compiled(_sums_of_blocks, (0,))


def _inverted(probability: Tensor, uniform: Tensor) -> Tensor:
    cumulative = probability.double().cumsum(-1)
    # right=True: the first entry strictly above the target, so a token of probability 0 is never
    # sampled. uniform < 1 - 2^-33 keeps the target strictly below the total.
    target = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True)
    return token.clamp(max=probability.shape[1] - 1)[:, 0]


def _block_of(after: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block where a number lies, the sum before it, and the number's place among all sums."""
    target = uniform[:, None] * after[:, -1:]
    block = torch.searchsorted(after, target, right=True).clamp(max=after.shape[1] - 1)
    return block, after.gather(1, (block - 1).clamp(min=0)) * (block > 0), target


def _found_in_blocks(probability: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab_size = probability.shape
    whole = vocab_size // _BLOCK * _BLOCK
    sums = probability[:, :whole].view(rows, -1, _BLOCK).sum(-1)
    rest = probability[:, whole:].sum(-1, keepdim=True)
    after = torch.cat([sums, rest], 1).double().cumsum(1)
    total = after[:, -1:]
    block, start, target = _block_of(after, uniform)
    index = block * _BLOCK + torch.arange(_BLOCK)
    inside = probability.gather(1, index.clamp(max=vocab_size - 1)).double() * (index < vocab_size)
    bounds = torch.cat([start, start + inside.cumsum(1)], 1)
    place = torch.searchsorted(bounds[:, 1:].contiguous(), target, right=True)
    place = place.clamp(max=_BLOCK - 1)
    below, above = bounds.gather(1, place), bounds.gather(1, place + 1)
    slack = total * (2 * _BLOCK * 2.0**-24 + 4 * vocab_size * 2.0**-53)
    is_sure = (target - below > slack) & (above - target > slack)
    return (block * _BLOCK + place).clamp(max=vocab_size - 1)[:, 0], is_sure[:, 0], total
