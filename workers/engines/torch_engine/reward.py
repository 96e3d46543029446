"""A backbone with a score head as a `RewardModel`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ....algorithms.roles.language import RewardModel, ScoreOutput, TrainMetrics
from ....dataflow.graph.role import Loss
from ....dataflow.option_checks import check_range
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import ModelSpec, ScoreNetwork, load_head, save_headed, seeded_heads
from ...training.optimizer import OptimizerSpec
from ...training.train_calls import column_forward, report_scores
from .network import make_network
from .worker import TorchWorker, first_masked, no_outputs

__all__ = ["TorchRewardModel", "TorchRewardModelSpec"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class TorchRewardModelSpec:
    """Recipe for a `TorchRewardModel`."""

    model: ModelSpec
    """The backbone: the policy's folder or architecture, or a folder this worker saved."""
    optimizer: OptimizerSpec | None = None
    """None for a frozen reward model."""
    micro_batch_tokens: int = 4096
    """Tokens computed at once."""

    def __post_init__(self) -> None:
        check_range(self, "micro_batch_tokens", at_least=1)

    def build(self, context: WorkerContext) -> TorchRewardModel:
        """Make the reward model on the context's device."""
        return TorchRewardModel(self, context)


class TorchRewardModel(TorchWorker, RewardModel):
    """See `TorchRewardModelSpec`. A row without any masked token scores 0."""

    def __init__(self, spec: TorchRewardModelSpec, context: WorkerContext) -> None:
        backbone = spec.model.backbone(context.device)
        with seeded_heads(context.seed, context.role):
            module = ScoreNetwork(backbone, backbone.config.hidden_size)
        load_head(module.score, spec.model.folder, "score")
        self.module = module
        network = make_network(module, backbone, module.score)
        super().__init__(context, network, spec.optimizer, spec.micro_batch_tokens)

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        """See `Reward.score`; a learned score does not look at `prompt_id`."""
        del prompt_id
        score = self._evaluate(tokens, mask, self._scores, per_token=False)
        report_scores(self.metrics, score)
        return score

    def train(
        self, loss: Loss[B, ScoreOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """See `RewardModel.train`."""
        forward = column_forward(self._scores, ScoreOutput)
        return self._train(forward, loss, batch, epochs, num_minibatches)

    def _scores(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """f32[rows]: the head's output at each row's last masked token."""
        width = mask.shape[1]
        place = torch.arange(1, width + 1, device=mask.device)
        last = (mask * place).amax(1) if width else mask.new_zeros(len(mask), dtype=torch.int64)
        reads = (place == last[:, None]) & mask
        zero = torch.zeros(len(tokens), dtype=torch.float32, device=tokens.device)
        if not bool(reads.any()):
            return zero + no_outputs(self.network)
        outputs, entry = self.network.outputs(tokens, reads, first_masked(mask))
        return zero.masked_scatter(last > 0, outputs[:, 0].float()[entry])

    def save_pretrained(self, folder: Path) -> None:
        """Write backbone and head; `ModelSpec(folder=...)` in such a spec reads both back."""
        if self.context.rank == 0:
            save_headed(folder, self.module.model, self.module.score, "score")
