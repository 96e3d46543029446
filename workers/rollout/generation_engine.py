"""The contract of generation engines, which sample tokens for a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ...algorithms.roles.language import Turns
from ...algorithms.roles.language_tables import Sampling
from .responses import BegunRows, EndedRows, Responses
from .sampling import SampleStreams


class GenerationEngine(ABC):
    """Samples responses from a language model in this process.

    Attributes:
        name: For messages: "vLLM".
        dtype: Data type of the weights: "float32" or "bfloat16".
        vocab_size: Tokens that the model knows.
        shapes: Parameter -> its shape, by Hugging Face name; tied weights appear once.
        num_positions: The longest sequence, prompt and response; None if unknown.
        takes_weights: `load` may be called while a stream is open, between two of what it gives.
            What there is of a response stays, with its keys and values; what is sampled from there
            on is sampled from the new weights, and of `call_version`.
        drops_weights: It can sleep without its weights: `sleep_empty`.
    """

    name: str
    dtype: str
    vocab_size: int
    shapes: Mapping[str, torch.Size]
    num_positions: int | None
    takes_weights: bool = False
    drops_weights: bool = False

    def check(self, sampling: Sampling) -> None:
        """Refuse what this engine would do otherwise than asked.

        Raises:
            ValueError: Saying what, and what to ask for instead.
        """

    @abstractmethod
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

    @abstractmethod
    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: BegunRows | None = None,
    ) -> Iterator[EndedRows]:
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

    def turns(self, sampling: Sampling, num_rows: int) -> Turns | None:
        """Begin to sample turns of so many conversations; checked, and closed by the caller.

        None, the default, if the engine samples whole responses only.

        Raises:
            ConfigError: If it cannot for this model.
        """
        return None

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights; what was computed with the old ones is void."""

    def sleep(self) -> int:
        """Give device memory to others until `wake`; nothing to do if it sleeps.

        Returns:
            Bytes given back.
        """
        return 0

    def sleep_empty(self) -> int:
        """Sleep without weights: after `wake` it has none until `load`; see `drops_weights`."""
        raise NotImplementedError

    def wake(self) -> None:
        """Take the memory back; nothing to do if it is awake."""

    def close(self) -> None:
        """End the engine; nothing is asked of it afterwards."""
