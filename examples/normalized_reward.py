"""A reward model whose scores are shifted so that demonstrations score 0 on average.

Scores of a Bradley-Terry model are only determined up to an offset. Stiennon et al. 2020, "Learning
to summarize from human feedback", and Huang et al. 2024, "The N+ Implementation Details of RLHF
with PPO", take the mean score of demonstrations off every score, so that a policy begins where
rewards are about 0, as the values of a new critic are.

    algorithm.roles.reward.worker=normalized_reward:NormalizedReward
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from penstock.algorithms.roles import PerSample, PromptId, Reward, TokenIds, TokenMask
from penstock.dataflow.graph.role import Metric, add_metrics
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.data.chat import ChatOptions
from penstock.workers.data.sources import DemonstrationSource
from penstock.workers.data.task import TaskSpec
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class NormalizedReward:
    """Recipe for a `Normalized` reward; the run fills in `model`, `task` and `tokenizer`."""

    model: ModelSpec
    """The folder of a reward model."""
    task: TaskSpec
    """Where the demonstrations come from."""
    tokenizer: TokenizerSpec
    """The policy's."""
    num_demonstrations: int = 128
    """How many are scored."""
    chat: bool = False
    """As `task.chat`."""

    def build(self, context: WorkerContext) -> Normalized:
        """Load the model and score the demonstrations."""
        scorer = TorchRewardModelSpec(model=self.model).build(context)
        task, tokenizer = self.task.build(), self.tokenizer.build()
        source = DemonstrationSource(
            task,
            tokenizer,
            batch_size=min(self.num_demonstrations, len(task.train)),
            seed=0,
            chat=ChatOptions(wrap=self.chat),
        )
        demos = source.batch(0)
        nobody = torch.zeros(len(demos.tokens), dtype=torch.int64)
        mean = scorer.score(demos.tokens, demos.mask, nobody).mean()
        return Normalized(scorer, float(mean))


class Normalized(Reward):
    """See `NormalizedReward`.

    Args:
        scorer: The reward model.
        mean: Its mean score of demonstrations.

    Attributes:
        metrics: `reward/mean` of the shifted scores, and `reward/demonstration_mean`.
    """

    def __init__(self, scorer: Reward, mean: float) -> None:
        self.metrics: dict[str, Metric] = {}
        self.mean = mean
        self._scorer = scorer

    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        """The model's scores, f32[rows], less the mean score of demonstrations."""
        score = self._scorer.score(tokens, mask, prompt_id) - self.mean
        rows = float(len(score))
        sums = {"mean": float(score.double().sum()), "demonstration_mean": rows * self.mean}
        means = {f"reward/{name}": Metric.mean(total, rows) for name, total in sums.items()}
        add_metrics(self.metrics, means)
        return score
