"""Counter-based randomness, and how one token is sampled.

A uniform number belongs to `(seed, role, step, ordinal, prompt_id, sample, position)` and to
nothing else: neither the rows that share a batch nor the number of workers can change it. The
source is Philox 4x64 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") in
numpy's implementation, whose raw stream numpy guarantees across versions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...dataflow.runtime.call_context import CallKey

__all__ = ["SampleStreams", "sample_token", "row_uniforms", "stream_generator", "stream_key"]

_U64 = (1 << 64) - 1
_PURPOSE = "generate"  # names the streams of responses


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
    """Uniform numbers strictly inside (0, 1) for the first `count` positions of every row.

    Args:
        key: From `stream_key`.
        prompt_id: i64[rows]; which prompt each row answers.
        sample: i64[rows]; which of the prompt's samples it is.
        count: Positions per row.

    Returns:
        f64[rows, count]; column t does not depend on `count`. The resolution is 2^-32.
    """
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

    Attributes:
        seed: The run's.
        role: The role that generates.
        key: The call that is served.
        prompt_id: i64[P]; which prompts.
        num_samples: Responses to each; rows of one prompt are adjacent.
    """

    seed: int
    role: str
    key: CallKey
    prompt_id: Tensor
    num_samples: int

    def uniforms(self, count: int) -> Tensor:
        """See `row_uniforms`: f64[P * num_samples, count]."""
        prompt_id = self.prompt_id.repeat_interleave(self.num_samples).cpu().numpy()
        sample = torch.arange(self.num_samples).repeat(len(self.prompt_id)).numpy()
        stream = stream_key(self.seed, self.role, _PURPOSE, self.key)
        return row_uniforms(stream, prompt_id, sample, count)

    def seeds(self) -> list[int]:
        """63 bits for each response."""
        words = (
            stream_key(self.seed, self.role, _PURPOSE, self.key, prompt_id, sample)
            for prompt_id in self.prompt_id.tolist()
            for sample in range(self.num_samples)
        )
        return [int(word[0] >> np.uint64(1)) for word in words]


def sample_token(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: [rows, V], any float dtype.
        uniform: f64[rows] in (0, 1), on the same device.
        temperature: Divides the logits; 0 takes the most likely token, whose log-probability
            is then 0.

    Returns:
        Token i64[rows] and its log-probability f32[rows] at `temperature`; nan where logits are
        not finite, whatever the token is then.
    """
    if temperature == 0:
        token = logits.argmax(-1)
        top = logits.gather(-1, token[:, None])[:, 0].float()
        return token, torch.zeros_like(top).masked_fill(~top.isfinite(), torch.nan)
    logprob = torch.log_softmax(logits.float() / temperature, dim=-1)
    cumulative = logprob.exp().double().cumsum(-1)
    # right=True: the first entry strictly above the target, so a token of probability 0 is never
    # sampled. uniform < 1 - 2^-33 keeps the target strictly below the total.
    target = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)
    return token[:, 0], logprob.gather(1, token)[:, 0]
