"""A reward model that scores every step of a response: a `ProcessReward`.

A step ends at a token whose text holds the delimiter, and at the response's last token. The model
is one that scores whole responses, as reward modeling trains it, or one trained on labels of
steps; it is asked about what came up to each step's end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.roles.language import ProcessReward
from ...algorithms.roles.language_tables import StepScores
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.options import option_class
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..engines.roles import LanguageWorker, Recipe, last_masked
from ..engines.torch_engine.specs import TorchModel
from ..models.spec import Head
from ..models.tokenizer import Tokenizer, TokenizerSpec
from ..training.model_worker import check_columns


@option_class
class TorchProcessRewardSpec(TorchModel, Recipe):
    """Recipe for a `TorchProcessReward`.

    Its model is a folder that a reward model was saved to; else the backbone, under a new head.
    """

    tokenizer: TokenizerSpec
    """The policy's tokenizer."""
    delimiter: str = "\n"
    """Text that ends a step; it must fit into one token."""
    sigmoid: bool = True
    """Put scores between 0 and 1; False gives them as the head does."""

    def __post_init__(self) -> None:
        if not self.delimiter:
            raise ValueError("delimiter is empty, which every token holds; a line break is usual")

    def build(self, context: WorkerContext) -> TorchProcessReward:
        return TorchProcessReward(context, self)


class TorchProcessReward(LanguageWorker, ProcessReward):
    """Scores the steps of responses.

    Attributes:
        metrics: Metrics of the last call: `step_score/mean` over steps, `steps/mean` over rows.
    """

    def __init__(self, context: WorkerContext, spec: TorchProcessRewardSpec) -> None:
        super().__init__(context, Head("score"), spec)
        self._sigmoid = spec.sigmoid
        self._tokenizer = spec.tokenizer.build()
        self._delimiter = spec.delimiter
        self._ends: dict[int, bool] = {}

    def score_steps(self, tokens: Tensor, mask: Tensor) -> StepScores:
        check_columns(tokens, mask)
        ends = step_ends(tokens, mask, self._tokenizer, self._delimiter, self._ends)
        scores = self._evaluate(tokens, ends, self._scores, per_token=True)
        steps, rows = float(ends.sum()), float(len(tokens))
        means = {
            "step_score/mean": Metric.mean(float(scores.double().sum()), steps),
            "steps/mean": Metric.mean(steps, rows),
        }
        add_metrics(self.metrics, means)
        return StepScores(step_score=scores, step_end=ends)

    def _scores(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """f32[rows, T]: the head's output at each step's last token."""
        outputs = self.network.outputs(tokens, ends)
        score = outputs.column()
        return outputs.zeros(ends.shape).masked_scatter(
            ends, score.sigmoid() if self._sigmoid else score
        )


def step_ends(
    tokens: Tensor,
    mask: Tensor,
    tokenizer: Tokenizer,
    delimiter: str,
    known: dict[int, bool],
) -> Tensor:
    """Find ends of steps: sampled tokens with the delimiter in their text, and each row's last."""
    sampled = tokens[mask].unique().tolist()
    for token in sampled:
        if token not in known:
            known[token] = delimiter in tokenizer.decode([token])
    ending = torch.tensor(
        [token for token in sampled if known[token]], dtype=tokens.dtype, device=tokens.device
    )
    ends = torch.isin(tokens, ending) & mask
    return ends | last_masked(mask)
