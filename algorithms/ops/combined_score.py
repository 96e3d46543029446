"""Several scores of a response as one: a weighted sum, and constraints that all must hold.

A step uses them on the scores of several roles; a worker that is itself a mixture of rewards uses
the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language import PerSample
from .groups import floating


@op(scope="row")
def constrained_score(
    score: PerSample, passed: PerSample, *, violation_score: float = 0.0
) -> PerSample:
    """The score where the constraints hold, else `violation_score`; nan where nobody knows.

    Args:
        score: f32[rows].
        passed: f32[rows], above 0.5 where all constraints hold.
        violation_score: What a violation is worth. To choose among samples use -inf, as 0 would
            win over negative scores.

    Returns:
        f32[rows]. A `passed` of nan stays nan, for the optimizer to refuse.
    """
    score = floating(score)
    shaped = torch.where(passed > 0.5, score, torch.full_like(score, violation_score))
    return torch.where(passed.isnan(), torch.nan, shaped)


def weighted_sum(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The sum of named scores, each times its weight (1 where none is given): f32[rows].

    Raises:
        ValueError: If there is no score, or a weight names none of them.
    """
    unknown = [name for name in weights if name not in scores]
    if unknown or not scores:
        raise ValueError(
            f"weights are given for {', '.join(unknown) or 'nothing'}, scores are: "
            f"{', '.join(scores) or 'none'}; every weight needs a score of its name"
        )
    first = next(iter(scores.values()))
    total = torch.zeros_like(first)
    for name, score in scores.items():
        total = total + weights.get(name, 1.0) * score
    return total
