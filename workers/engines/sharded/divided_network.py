"""A model that is divided over the processes of a data-parallel rank: what engines do alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.network import Network, Outputs
from ...training.stored_pieces import gather_weights
from .vocabulary_parallel import vocabulary_logprob, vocabulary_top


def join_processes(context: WorkerContext) -> None:
    """Require torch.distributed's default group over the worker group's processes.

    A group of one process needs none for anything else; it gets one of itself.

    Raises:
        ConfigError: If there are several processes and no group.
    """
    cuda = torch.device(context.device).type == "cuda"
    if cuda:
        torch.cuda.set_device(context.device)  # libraries ask for "the current device"
    if dist.is_initialized():
        return
    if context.num_processes > 1:
        raise ConfigError(
            f"'{context.role}' is one of {context.num_processes} processes, but torch.distributed "
            "was not started; initialize its default group over exactly these processes first"
        )
    in_memory: Any = dist
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=in_memory.HashStore(), rank=0, world_size=1)


def gathered_module(network: Network, first: Callable[[], nn.Module]) -> nn.Module | None:
    """See `LanguageNetwork.whole_module`: of a model all of whose weights are trained.

    Raises:
        RuntimeError: If the weights gathered are not all that the module has; tied ones count once.
    """
    weights = gather_weights(network, 0)  # process 0 is where transformers writes files
    if not weights:
        return None
    module = first()
    unknown = module.load_state_dict(weights, strict=False).unexpected_keys
    missing = dict(module.named_parameters()).keys() - weights.keys()
    if unknown or missing:
        raise RuntimeError(f"gathered weights do not fit: {sorted(missing)} missing, {unknown} new")
    return module


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Have training keep what goes into each layer, and compute the rest again going backward.

    Call it before anything else wraps the layers. They must have no dropout: no random state is
    kept.
    """
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


_IMPOSSIBLE = -1e30
"""A logit whose probability is 0, and finite, so that 0 times it is 0."""


class DividedNetwork:
    """The part of a `LanguageNetwork` that follows from its being divided.

    Right-padded rows are multiplied as they are, so rows of similar length go together.
    """

    is_divided = True
    sort_by_length = True
    num_words: int | None = None

    def save_adapter(self, folder: Path, base: str | None) -> None:
        """See `LanguageNetwork.save_adapter`: there are none."""

    @property
    def vocabulary_group(self) -> dist.ProcessGroup | None:
        """The processes that share the vocabulary; None if this one has all of it."""
        raise NotImplementedError

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `LanguageNetwork.token_logprob`: logits are never gathered."""
        logprob, entropy = vocabulary_logprob(
            self._known(outputs.values), target, temperature, self.vocabulary_group
        )
        return logprob, entropy if needs_entropy else None

    def top_words(
        self, outputs: Outputs, num_words: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """See `LanguageNetwork.top_words`: of logits the largest alone are gathered."""
        logits = self._known(outputs.values.float() / temperature)
        return vocabulary_top(logits, num_words, self.vocabulary_group)

    def _known(self, logits: Tensor) -> Tensor:
        """This process's logits, with those of words beyond `num_words` set to `_IMPOSSIBLE`."""
        group, width = self.vocabulary_group, logits.shape[1]
        first = 0 if group is None else group.rank() * width
        if self.num_words is None or first + width <= self.num_words:
            return logits
        beyond = torch.arange(first, first + width, device=logits.device) >= self.num_words
        return logits.masked_fill(beyond, _IMPOSSIBLE)
