"""On-policy distillation: a student learns from a teacher what to say where it finds itself.

Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
2023. `distillation_step` is about the student's own responses alone; `gkd_step` is the paper's
mixture of them with given ones. The teacher names its likeliest words in the place of each token,
and the student's distribution is drawn towards the teacher's over those; which divergence that is
says `DistillationLoss`.
"""

from __future__ import annotations

from ..dataflow.graph.tracer import op
from ..dataflow.options import PositiveInt, option_class
from .losses.distillation import DistillationLoss
from .ops.groups import stacked
from .options import train_on
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
    top = teacher.top_words(
        tokens, mask, num_words=cfg.num_words, temperature=cfg.sampling.temperature
    )
    batch = DistillationBatch(
        tokens=tokens, mask=mask, words=top.words, teacher_logprob=top.logprob
    )
    return train_on(actor, cfg.loss, batch, cfg)


@op(scope="batch", makes_rows=True)
def with_demonstrations(tokens: TokenIds, mask: TokenMask, demos: Demonstrations) -> Demonstrations:
    """Sampled responses and after them given ones, as rows of one table.

    Args:
        tokens: i64[rows, T].
        mask: bool[rows, T].
        demos: As many rows as there are.
    """
    return Demonstrations(
        tokens=stacked(tokens, demos.tokens, -1), mask=stacked(mask, demos.mask, False)
    )
