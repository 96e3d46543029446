"""What samples tokens for a policy, whatever it computes them with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ...algorithms.roles.agents import Turns
from ...algorithms.roles.language import Sampling
from .ended import Begun, Ended
from .responses import Responses
from .sampling import SampleStreams


class GenerationEngine(Protocol):
    """Samples responses from a language model in this process.

    Attributes:
        name: For messages: "vLLM".
        dtype: Data type of the weights: "float32" or "bfloat16".
        vocab_size: Tokens that the model knows.
        takes_weights: Whether `load` may be called while a stream is open, between two of what it
            gives. What there is of a response stays, with its keys and values; what is sampled from
            there on is sampled from the new weights, and of `call_version`.
    """

    name: str
    dtype: str
    vocab_size: int
    takes_weights: bool

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Parameter -> its shape, by Hugging Face name; tied weights appear once."""
        ...

    @property
    def num_positions(self) -> int | None:
        """The longest sequence, prompt and response; None if unknown."""
        ...

    def check(self, sampling: Sampling) -> None:
        """Refuse what this engine would do otherwise than asked.

        Raises:
            ValueError: Saying what, and what to ask for instead.
        """

    def generate(self, prompt: Tensor, streams: SampleStreams, sampling: Sampling) -> Responses:
        """Sample responses.

        A response depends on its prompt, its stream and the weights, not on the other rows.

        Args:
            prompt: i64[P, T], right padded with -1, checked.
            streams: The random numbers of each of the P * num_samples responses.
            sampling: How responses are sampled.

        Returns:
            On the CPU, the samples of a prompt adjacent.
        """
        ...

    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: Begun | None = None,
    ) -> Iterator[Ended]:
        """Sample responses, and give each as soon as it has ended; the rest as `generate`.

        Every row is given once. Rows that are not given yet are given up if the caller stops. In
        flight (`call_in_flight`) something is given after every token, be it no row.

        Args:
            prompt: i64[P, T], right padded with -1, checked.
            streams: The random numbers of each of the P * num_samples responses.
            sampling: How responses are sampled.
            begun: What there is of them already; nothing by default. Token t of a response has the
                same random number in whatever call it is sampled, if the engine takes `uniforms`;
                one with random numbers of its own begins them anew, at a seed of that length.
        """
        ...

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights; what was computed with the old ones is void."""

    def sleep(self) -> int:
        """Give device memory to others until `wake`; nothing to do if it sleeps.

        Returns:
            Bytes given back.
        """
        ...

    def wake(self) -> None:
        """Take the memory back; nothing to do if it is awake."""

    def close(self) -> None:
        """End the engine; nothing is asked of it afterwards."""


@runtime_checkable
class DropsWeights(Protocol):
    """A `GenerationEngine` that can sleep without its weights. Optional."""

    @property
    def drops_weights(self) -> bool:
        """Whether it can on the device that it is on."""
        ...

    def sleep_empty(self) -> int:
        """As `sleep`; after `wake` it has no weights until `load`.

        Returns:
            Bytes given back.
        """
        ...


@runtime_checkable
class SamplesTurns(Protocol):
    """A `GenerationEngine` for conversations. Optional."""

    def turns(self, sampling: Sampling, num_rows: int) -> Turns:
        """Begin to sample turns of so many conversations; checked, and closed by the caller.

        Raises:
            ConfigError: If it cannot, for this model.
        """
        ...
