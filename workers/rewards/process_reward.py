"""A reward model that scores every step of a response: a `ProcessReward`.

A step ends at a token whose text holds the delimiter, and at the response's last token. The model
is one that scores whole responses, as reward modeling trains it, or one trained on labels of
steps; it is asked about what came up to each step's end.

Published models are a backbone under a head of one label; token classifiers of two labels, of
which the second is for right steps (TRL's); or language models that say a word for right and
another for wrong after a tag (Wang et al., "Math-Shepherd", 2024). The last two say the
probability of the right one of two, which is the sigmoid of one number: the difference of two rows
of their head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import SkipValidation
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
from .own_text import OwnText


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
    step_tag: str = ""
    """Text at whose last token the model says its score, in place of the delimiter and after the
    last step: `<extra_0>`, or a line break for models of TRL. Empty to read scores at the steps'
    own ends."""
    words: Sequence[str] = ()
    """The words that a language model says of a right and of a wrong step, as in `["+", "-"]`."""
    chat: bool = True
    """Whether its own chat template, if it has one, writes prompt and response."""
    own_text: SkipValidation[Any] = None
    """The `OwnText` of a model with another tokenizer or template."""

    def __post_init__(self) -> None:
        if not self.delimiter:
            raise ValueError("delimiter is empty, which every token holds; a line break is usual")
        if len(self.words) not in (0, 2) or not all(self.words):
            raise ValueError(f"words is {self.words!r}; expected one for right, one for wrong")

    def build(self, context: WorkerContext) -> TorchProcessReward:
        return TorchProcessReward(context, self)


class TorchProcessReward(LanguageWorker, ProcessReward):
    """Scores the steps of responses.

    Attributes:
        metrics: Metrics of the last call: `step_score/mean` over steps, `steps/mean` over rows.
    """

    def __init__(self, context: WorkerContext, spec: TorchProcessRewardSpec) -> None:
        super().__init__(context, Head("score", labels=2, words=tuple(spec.words)), spec)
        self._spec = spec
        self._tokenizer = spec.tokenizer.build()
        self._ends: dict[int, bool] = {}
        own: OwnText | None = spec.own_text
        self._own_text = own and replace(own, chat=spec.chat)

    def score_steps(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> StepScores:
        check_columns(tokens, mask)
        spec = self._spec
        ends = step_ends(tokens, mask, self._tokenizer, spec.delimiter, self._ends)
        if self._own_text is None:
            scores = self._evaluate(tokens, ends, self._scores, per_token=True)
        else:
            own, reads = self._own_text.steps(
                tokens, mask, ends, prompt_id, close=spec.delimiter, tag=spec.step_tag
            )
            found = self._evaluate(own, reads, self._scores, per_token=True)
            # Rows that do not fit have no places to read.
            fits = reads.sum(1) == ends.sum(1)
            scores = torch.zeros(ends.shape, device=tokens.device)
            scores[ends & fits[:, None]] = found[reads & fits[:, None]]
            scores[ends & ~fits[:, None]] = torch.nan
        known = ends & ~scores.isnan()
        steps, rows = float(known.sum()), float(len(tokens))
        means = {
            "step_score/mean": Metric.mean(float(scores[known].double().sum()), steps),
            "steps/mean": Metric.mean(float(ends.sum()), rows),
        }
        add_metrics(self.metrics, means)
        return StepScores(step_score=scores, step_end=ends)

    def _scores(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """f32[rows, T]: the head's output at each step's last token."""
        outputs = self.network.outputs(tokens, ends)
        score = outputs.column()
        return outputs.zeros(ends.shape).masked_scatter(
            ends, score.sigmoid() if self._spec.sigmoid else score
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
