"""A backbone with a value head as a `ValueModel`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ....algorithms.roles.language import TrainMetrics, ValueModel, ValueOutput
from ....dataflow.graph.role import Loss
from ....dataflow.option_checks import check_range
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import ModelSpec, ValueNetwork, load_head, save_headed, seeded_heads
from ...training.optimizer import OptimizerSpec
from ...training.train_calls import column_forward
from .network import make_network
from .worker import TorchWorker, first_masked, no_outputs

__all__ = ["TorchValue", "TorchValueSpec"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class TorchValueSpec:
    """Recipe for a `TorchValue`."""

    model: ModelSpec
    """The backbone: the policy's folder or architecture, or a folder this worker saved."""
    optimizer: OptimizerSpec | None = None
    """None for a frozen value model."""
    zero_init_head: bool = True
    """Start with value 0 everywhere, unless the folder has a head of its own."""
    micro_batch_tokens: int = 4096
    """Tokens computed at once."""

    def __post_init__(self) -> None:
        check_range(self, "micro_batch_tokens", at_least=1)

    def build(self, context: WorkerContext) -> TorchValue:
        """Make the value model on the context's device."""
        return TorchValue(self, context)


class TorchValue(TorchWorker, ValueModel):
    """See `TorchValueSpec`."""

    def __init__(self, spec: TorchValueSpec, context: WorkerContext) -> None:
        backbone = spec.model.backbone(context.device)
        with seeded_heads(context.seed, context.role):
            module = ValueNetwork(
                backbone, backbone.config.hidden_size, zero_init=spec.zero_init_head
            )
        load_head(module.value_head, spec.model.folder, "value_head")
        self.module = module
        network = make_network(module, backbone, module.value_head)
        super().__init__(context, network, spec.optimizer, spec.micro_batch_tokens)

    def value(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """See `ValueModel.value`."""
        return self._evaluate(tokens, mask, self._values, per_token=True)

    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """See `ValueModel.train`."""
        forward = column_forward(self._values, ValueOutput)
        return self._train(forward, loss, batch, epochs, num_minibatches)

    def _values(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """f32[rows, T]: what the backbone says before each masked token."""
        zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        if not bool(mask.any()):
            return zero + no_outputs(self.network)
        reads = torch.zeros_like(mask)
        reads[:, :-1] = mask[:, 1:]
        outputs, entry = self.network.outputs(tokens, reads, first_masked(mask))
        return zero.masked_scatter(mask, outputs[:, 0].float()[entry])

    def save_pretrained(self, folder: Path) -> None:
        """Write backbone and head; `ModelSpec(folder=...)` in a value spec reads both back."""
        if self.context.rank == 0:
            save_headed(folder, self.module.model, self.module.value_head, "value_head")
