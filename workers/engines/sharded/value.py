"""What a backbone with a value or score head does that is spread over the processes of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ....algorithms.roles.language import ScoreOutput, TrainMetrics, ValueOutput
from ....dataflow.graph.role import Loss
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import (
    ModelSpec,
    ScoreNetwork,
    ValueNetwork,
    load_head,
    save_headed,
    seeded_heads,
)
from ...training.train_calls import column_forward, report_scores
from .worker import ShardedWorker

__all__ = ["ShardedReward", "ShardedValue", "score_head", "value_head"]

B = TypeVar("B")


def value_head(spec: ModelSpec, context: WorkerContext, *, zero_init: bool) -> nn.Linear:
    """The head that the torch engine starts from: the folder's, or drawn from the same seed."""
    blank = nn.RMSNorm(1)  # stands for a backbone
    with seeded_heads(context.seed, context.role):
        head = ValueNetwork(blank, spec.config.hidden_size, zero_init=zero_init).value_head
    load_head(head, spec.folder, "value_head")
    return head


def score_head(spec: ModelSpec, context: WorkerContext) -> nn.Linear:
    """The same of a reward model."""
    blank = nn.RMSNorm(1)
    with seeded_heads(context.seed, context.role):
        head = ScoreNetwork(blank, spec.config.hidden_size).score
    load_head(head, spec.folder, "score")
    return head


class ShardedValue(ShardedWorker):
    """What an engine's `ValueModel` does with its network, whose `outputs` are values."""

    network: Any

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
        reads = torch.zeros_like(mask)
        reads[:, :-1] = mask[:, 1:]
        outputs, anchor = self.network.outputs(tokens, reads)
        zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device) + anchor
        return zero.masked_scatter(mask, outputs[:, 0].float())

    def save_pretrained(self, folder: Path) -> None:
        """Write backbone and head; `ModelSpec(folder=...)` in a value spec reads both back."""
        _save_backbone(self, folder, "value_head")


class ShardedReward(ShardedWorker):
    """What an engine's `RewardModel` does with its network, whose `outputs` are scores.

    A row without any masked token scores 0.
    """

    network: Any

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
        place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = (mask * place).amax(1)
        reads = (place == last[:, None]) & mask
        outputs, anchor = self.network.outputs(tokens, reads)
        zero = torch.zeros(len(tokens), dtype=torch.float32, device=tokens.device) + anchor
        return zero.masked_scatter(last > 0, outputs[:, 0].float())

    def save_pretrained(self, folder: Path) -> None:
        """Write backbone and head; `ModelSpec(folder=...)` in such a spec reads both back."""
        _save_backbone(self, folder, "score")


def _save_backbone(
    worker: ShardedWorker, folder: Path, name: Literal["value_head", "score"]
) -> None:
    """Write a backbone in Hugging Face's layout and its head beside it (one process does)."""
    weights = worker.weights_to_write()
    if not weights:
        return
    head = nn.Linear(weights[f"{name}.weight"].shape[1], 1).to(weights[f"{name}.weight"].dtype)
    head.load_state_dict({part: weights.pop(f"{name}.{part}") for part in ("weight", "bias")})
    backbone: Any = worker.model.backbone("cpu")
    backbone.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
    save_headed(folder, backbone, head, name)
