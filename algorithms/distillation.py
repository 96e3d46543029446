"""On-policy distillation: a student learns from a teacher what to say where it finds itself.

Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
2023. `distillation_step` is about the student's own responses alone; `gkd_step` is the paper's
mixture of them with given ones. The teacher names its likeliest words in the place of each token,
and the student's distribution is drawn towards the teacher's over those; which divergence that is
says `DistillationLoss`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dataflow.graph.tracer import op
from ..dataflow.options import PositiveInt, option_class
from .losses.distillation import DistillationLoss
from .roles import (
    Demonstrations,
    DistillationBatch,
    Policy,
    Prompts,
    Sampling,
    TokenIds,
    TokenMask,
    TrainMetrics,
)


@option_class
class Distillation:
    """Options of distillation."""

    sampling: Sampling = Sampling(max_new_tokens=1024)
    """Sampling of the student's responses; the divergence is at the same temperature."""
    num_words: PositiveInt = 64
    """Words that the teacher names in the place of each token; from the vocabulary's size on the
    divergence is exact."""
    epochs: PositiveInt = 1
    """Passes over each step's responses."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    loss: DistillationLoss = DistillationLoss()
    """Divergence, and the weighing of tokens and rows."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()


def distillation_step(
    prompts: Prompts, actor: Policy, teacher: Policy, cfg: Distillation
) -> TrainMetrics:
    """Sample from the student, and draw it towards the teacher on what it said."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    return _distilled(roll.tokens, roll.mask, actor, teacher, cfg)


def gkd_step(
    prompts: Prompts, demos: Demonstrations, actor: Policy, teacher: Policy, cfg: Distillation
) -> TrainMetrics:
    """As `distillation_step`, on demonstrations as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    rows = with_demonstrations(roll.tokens, roll.mask, demos)
    return _distilled(rows.tokens, rows.mask, actor, teacher, cfg)


def _distilled(
    tokens: TokenIds, mask: TokenMask, actor: Policy, teacher: Policy, cfg: Distillation
) -> TrainMetrics:
    temperature = cfg.sampling.temperature
    top = teacher.top_words(tokens, mask, num_words=cfg.num_words, temperature=temperature)
    return actor.train(
        cfg.loss,
        DistillationBatch(tokens=tokens, mask=mask, words=top.words, teacher_logprob=top.logprob),
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=temperature,
    )


@op(scope="batch", makes_rows=True)
def with_demonstrations(tokens: TokenIds, mask: TokenMask, demos: Demonstrations) -> Demonstrations:
    """Sampled responses and after them given ones, as rows of one table.

    Args:
        tokens: i64[rows, T].
        mask: bool[rows, T].
        demos: As many rows as there are.
    """
    width = max(tokens.shape[1], demos.tokens.shape[1])

    def both(one: Tensor, other: Tensor, fill: float) -> Tensor:
        return torch.cat([F.pad(x, (0, width - x.shape[1]), value=fill) for x in (one, other)])

    return Demonstrations(tokens=both(tokens, demos.tokens, -1), mask=both(mask, demos.mask, False))
