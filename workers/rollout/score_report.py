"""What every worker that scores responses reports of the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dataflow.graph.role import Metric

__all__ = ["score_metrics"]


def score_metrics(scores: Tensor, prompt_id: Tensor) -> dict[str, Metric]:
    """Metrics of a call's scores, to be added over chunks and ranks.

    - `reward/mean`, `reward/mean_square`: the standard deviation is the root of mean_square -
      mean^2.
    - `reward/equal_groups`: of the groups with at least two responses, the share in which all have
      the same score, so that comparing them says nothing; absent if there is no such group.

    Args:
        scores: f32[rows]; a score that is nan is equal to none.
        prompt_id: i64[rows], the group of each row; a group's rows are in one call.
    """
    exact, rows = scores.double(), float(len(scores))
    found = {
        "reward/mean": Metric.mean(float(exact.sum()), rows),
        "reward/mean_square": Metric.mean(float(exact.square().sum()), rows),
    }
    ids = prompt_id.to(exact.device)
    group, sizes = torch.unique(ids, return_inverse=True, return_counts=True)[1:]
    compared = sizes > 1
    if bool(compared.any()):
        empty = exact.new_zeros(len(sizes))
        lowest = empty.scatter_reduce(0, group, exact, "amin", include_self=False)
        highest = empty.scatter_reduce(0, group, exact, "amax", include_self=False)
        num_equal = float((lowest == highest)[compared].sum())
        found["reward/equal_groups"] = Metric.mean(num_equal, float(compared.sum()))
    return found
