"""Our own generation as a `GenerationEngine`, over the network that the torch engine evaluates.

Llama, Qwen2 and Qwen3 are decoded by `decode`, on GPUs by `decode_on_device`; other architectures
through the Hugging Face forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....algorithms.roles.language import Sampling
from ....dataflow.errors import ConfigError
from ...models.tokenizer import TokenizerSpec
from ...rollout.ended import Begun, Ended, collected
from ...rollout.response_sampler import ResponseSampler
from ...rollout.responses import Responses, check_stop
from ...rollout.sampling import SampleStreams
from ...rollout.turn_sampler import TurnSampler
from ...training.host_memory import HostCopy, give_back_freed
from .decode import decode
from .decode_plain import decode_plain
from .device_decode import decode_on_device
from .network import LeanNetwork, TorchNetwork
from .turns import TorchTurns


class TorchGenerator:
    """A `GenerationEngine` that samples from a network's own weights.

    Args:
        network: A language model.
        end_ids: Tokens that end a response.
        max_rows: Responses sampled at once; a bound on the memory of the key-value cache. On a GPU
            there are fewer if it has no memory for so many.
        tokenizer: To look for stop strings.
        num_words: Tokens that may be sampled; None for all that the model has.
    """

    name = "the torch engine's generator"
    takes_weights = True  # they lie where each token reads them

    def __init__(
        self,
        network: TorchNetwork,
        end_ids: Sequence[int],
        max_rows: int,
        tokenizer: TokenizerSpec | None = None,
        num_words: int | None = None,
    ) -> None:
        self.network = network
        self._end_ids = end_ids
        self._max_rows = max_rows
        self._tokenizer = tokenizer
        self._host_copy: HostCopy | None = None
        module: Any = network.module
        self._module = module
        self.shapes = {name: tensor.shape for name, tensor in network.tensors().items()}
        self.dtype = network.layout.dtype
        self.num_positions: int | None = getattr(module.config, "max_position_embeddings", None)
        self.vocab_size: int = module.config.vocab_size
        self._num_words = min(num_words or self.vocab_size, self.vocab_size)

    def check(self, sampling: Sampling) -> None:
        """See `GenerationEngine.check`."""
        check_stop(sampling, has_tokenizer=self._tokenizer is not None)

    def generate(self, prompt: Tensor, streams: SampleStreams, sampling: Sampling) -> Responses:
        """See `GenerationEngine.generate`."""
        return collected(
            self.stream(prompt, streams, sampling),
            len(prompt) * sampling.num_samples,
            sampling.max_new_tokens,
        )

    @torch.no_grad()  # only while it computes, not while its caller does
    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: Begun | None = None,
    ) -> Iterator[Ended]:
        """See `GenerationEngine.stream`: what this call adds nothing to comes first."""
        device = self.network.device
        sampler = ResponseSampler(
            prompt,
            streams.uniforms(sampling.max_new_tokens).to(device),
            sampling,
            end_ids=self._end_ids,
            vocab_size=self._num_words,
            tokenizer=self._tokenizer,
            begun=begun,
        )
        given = torch.nonzero(~sampler.open)[:, 0]
        if len(given):
            yield sampler.end(given)
        try:
            for rows in self._decode(sampler):
                yield sampler.end(rows)
        finally:
            give_back_freed(device)

    def _decode(self, sampler: ResponseSampler) -> Iterator[Tensor]:
        if isinstance(self.network, LeanNetwork):
            sampled = decode if self.network.device.type == "cpu" else decode_on_device
            return sampled(self.network, sampler, self._max_rows)
        return decode_plain(self._module, sampler, self._max_rows)

    def turns(self, sampling: Sampling, num_rows: int) -> TorchTurns:
        """See `GenerationEngine.turns`.

        Raises:
            ConfigError: If the model is decoded by its own forward.
        """
        if not isinstance(self.network, LeanNetwork):
            raise ConfigError(
                f"conversations need a model that {self.name} decodes itself (Llama, Qwen2 or "
                f"Qwen3), and this is a {type(self._module).__name__}\n    set rollout=vllm"
            )
        sampler = TurnSampler(
            num_rows,
            sampling,
            end_ids=self._end_ids,
            vocab_size=self._num_words,
            device=self.network.device,
        )
        return TorchTurns(self.network, sampler, num_rows, self._max_rows)

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """See `GenerationEngine.load`; nothing is kept of what was computed before."""
        del version
        self.network.flat.load(tensors)

    def sleep(self) -> int:
        """See `GenerationEngine.sleep`: weights move to host memory, if they are not there."""
        if self._host_copy is not None:
            return 0
        self._host_copy = HostCopy(self.network.held_tensors())
        return self._host_copy.num_bytes

    def wake(self) -> None:
        """See `GenerationEngine.wake`."""
        kept, self._host_copy = self._host_copy, None
        if kept is not None:
            kept.restore()

    def close(self) -> None:
        """See `GenerationEngine.close`: it holds nothing but memory."""
