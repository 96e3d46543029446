"""A trunk with a score head as a `RewardModel` computed by megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..algorithms.roles import RewardModel, ScoreOutput, TrainMetrics
from ..dataflow.role import Loss, Metric, add_metrics
from ..dataflow.worker import WorkerContext
from .megatron_headed import save_trunk
from .megatron_options import MegatronOptions
from .megatron_worker import MegatronWorker
from .model import ModelSpec, ScoreNetwork, load_head, seeded_heads
from .torch_worker import check_columns

__all__ = ["MegatronReward", "MegatronRewardSpec"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class MegatronRewardSpec(MegatronOptions):
    """Recipe for a `MegatronReward`."""

    model: ModelSpec
    """The trunk: the policy's folder or architecture, or a folder a reward worker saved."""

    def build(self, context: WorkerContext) -> MegatronReward:
        """Make this process's part of the reward model on the context's device."""
        return MegatronReward(self, context)


class MegatronReward(MegatronWorker, RewardModel):
    """See `MegatronRewardSpec`. A row without any masked token scores 0."""

    def __init__(self, spec: MegatronRewardSpec, context: WorkerContext) -> None:
        self.spec = spec
        blank = nn.RMSNorm(1)  # the head is drawn as the torch engine's, from the same seed
        with seeded_heads(context.seed, context.role):
            head = ScoreNetwork(blank, spec.model.config.hidden_size).score
        load_head(head, spec.model.folder, "score")
        super().__init__(context, spec.model, spec, ("score", head))

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        """See `Reward.score`; a learned score does not look at `prompt_id`."""
        del prompt_id
        score = self._evaluate(tokens, mask, self._scores, per_token=False)
        sums = {
            "reward/mean": float(score.double().sum()),
            "reward/mean_square": float(score.double().square().sum()),
        }
        rows = float(len(score))
        add_metrics(self.metrics, {name: Metric.mean(sums[name], rows) for name in sums})
        return score

    def train(
        self, loss: Loss[B, ScoreOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """See `RewardModel.train`."""

        def forward(rows: Any, needs_entropy: bool) -> ScoreOutput:
            del needs_entropy
            check_columns(rows.tokens, rows.mask)
            return ScoreOutput(self._scores(rows.tokens, rows.mask))

        return self._train(forward, loss, batch, epochs, num_minibatches)

    def _scores(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """f32[rows]: the head's output at each row's last masked token."""
        place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = (mask * place).amax(1)
        reads = (place == last[:, None]) & mask
        outputs, anchor = self.network.outputs(tokens, reads)
        zero = torch.zeros(len(tokens), dtype=torch.float32, device=tokens.device) + anchor
        return zero.masked_scatter(last > 0, outputs[:, 0].float())

    def save_pretrained(self, folder: Path) -> None:
        """Write trunk and head; `ModelSpec(folder=...)` in such a spec reads both back."""
        save_trunk(self, folder, "score")
