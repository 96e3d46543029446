"""A trunk with a value head as a `ValueModel` computed by megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..algorithms.roles import TrainMetrics, ValueModel, ValueOutput
from ..dataflow.role import Loss
from ..dataflow.worker import WorkerContext
from .megatron_headed import save_trunk
from .megatron_options import MegatronOptions
from .megatron_worker import MegatronWorker
from .model import ModelSpec, ValueNetwork, load_head, seeded_heads
from .torch_worker import check_columns

__all__ = ["MegatronValue", "MegatronValueSpec"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class MegatronValueSpec(MegatronOptions):
    """Recipe for a `MegatronValue`."""

    model: ModelSpec
    """The trunk: the policy's folder or architecture, or a folder a value worker saved."""
    zero_init_head: bool = True
    """Start with value 0 everywhere, unless the folder has a head of its own."""

    def build(self, context: WorkerContext) -> MegatronValue:
        """Make this process's part of the value model on the context's device."""
        return MegatronValue(self, context)


class MegatronValue(MegatronWorker, ValueModel):
    """See `MegatronValueSpec`."""

    def __init__(self, spec: MegatronValueSpec, context: WorkerContext) -> None:
        self.spec = spec
        blank = nn.RMSNorm(1)  # the head is drawn as the torch engine's, from the same seed
        with seeded_heads(context.seed, context.role):
            size = spec.model.config.hidden_size
            head = ValueNetwork(blank, size, zero_init=spec.zero_init_head).value_head
        load_head(head, spec.model.folder, "value_head")
        super().__init__(context, spec.model, spec, ("value_head", head))

    def value(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """See `ValueModel.value`."""
        return self._evaluate(tokens, mask, self._values, per_token=True)

    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """See `ValueModel.train`."""

        def forward(rows: Any, needs_entropy: bool) -> ValueOutput:
            del needs_entropy
            check_columns(rows.tokens, rows.mask)
            return ValueOutput(self._values(rows.tokens, rows.mask))

        return self._train(forward, loss, batch, epochs, num_minibatches)

    def _values(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """f32[rows, T]: what the trunk says before each masked token."""
        reads = torch.zeros_like(mask)
        reads[:, :-1] = mask[:, 1:]
        outputs, anchor = self.network.outputs(tokens, reads)
        zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device) + anchor
        return zero.masked_scatter(mask, outputs[:, 0].float())

    def save_pretrained(self, folder: Path) -> None:
        """Write trunk and head; `ModelSpec(folder=...)` in a value spec reads both back."""
        save_trunk(self, folder, "value_head")
