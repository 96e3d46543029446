"""A model that is divided over the processes of a data-parallel rank: what engines do alike."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.heads import Head
from ...models.spec import ModelSpec
from ...training.checkpoint_files import TensorSource, WholeTensors
from ...training.network import Network, Outputs
from ...training.stored_pieces import fill_weights
from .vocabulary_parallel import vocabulary_logprob

__all__ = ["DividedNetwork", "fill_first_weights"]


class DividedNetwork:
    """The part of a `LanguageNetwork` that follows from its being divided.

    Right-padded rows are multiplied as they are, so rows of similar length go together.
    """

    module: nn.Module | None = None
    sort_by_length = True

    @property
    def vocabulary_group(self) -> dist.ProcessGroup | None:
        """The processes that share the vocabulary; None if this one has all of it."""
        raise NotImplementedError

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `LanguageNetwork.token_logprob`: logits are never gathered."""
        logits = outputs.values.float() / temperature
        logprob, entropy = vocabulary_logprob(logits, target, self.vocabulary_group)
        return logprob, entropy if needs_entropy else None


def fill_first_weights(
    network: Network, source: TensorSource, head: Head, model: ModelSpec, context: WorkerContext
) -> None:
    """Give a process's part its first weights.

    Args:
        network: The part.
        source: The language model's, or at least its backbone's.
        head: Its first weights are its own unless it is the language model's.
        model: Where they come from.
        context: The run's seed and the role.
    """
    if not head.is_scalar:
        fill_weights(network, source, exact=False)
        return
    fill_weights(network, source, exact=False, but=head.name)
    linear = head.first_weights(model, context)
    added = {f"{head.name}.{part}": value for part, value in linear.named_parameters()}
    fill_weights(network, WholeTensors(added), exact=False, only=head.name)
