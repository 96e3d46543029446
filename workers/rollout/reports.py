"""Metrics of responses: their lengths, the age of their weights, their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.roles.language_tables import Rollout
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.runtime.call_context import call_lag, call_version
from .responses import Responses


def report_responses(metrics: dict[str, Metric], responses: Responses, new_tokens: int) -> None:
    """Add lengths and truncation to a worker's metrics."""
    rows = float(len(responses.length))
    values: dict[str, Metric] = {}
    if rows or new_tokens:
        values["new_tokens"] = Metric.sum(float(new_tokens))
    if rows:
        values |= {
            "response_length": Metric.mean(float(responses.length.sum()), rows),
            "response_length_min": Metric(float(responses.length.min()), 1.0, "min"),
            "response_length_max": Metric(float(responses.length.max()), 1.0, "max"),
            "truncated": Metric.mean(rows - float(responses.finished.sum()), rows),
        }
    add_metrics(metrics, values)


def report_lag(metrics: dict[str, Metric], roll: Rollout) -> None:
    """Add by how many versions tokens are older than weights that had waited for nothing.

    Those are the weights that are current at the call's own line of the step.
    """
    age = call_version() + call_lag() - roll.version[roll.mask]
    if not len(age):
        return
    values = {
        "token_lag": Metric.mean(float(age.sum()), float(len(age))),
        "token_lag_max": Metric(float(age.max()), 1.0, "max"),
    }
    add_metrics(metrics, values)


def score_metrics(scores: Tensor, prompt_id: Tensor) -> dict[str, Metric]:
    """Metrics of a call's scores, to be added over chunks and ranks.

    - `reward/mean`, `reward/mean_square`: the standard deviation is the root of mean_square -
      mean^2.
    - `reward/equal_groups`: of the groups with at least two responses, the share in which all have
      the same score, so that comparing them says nothing; absent if there is no such group.
    """
    known = ~scores.isnan()
    exact = scores[known].double()
    found = {"reward/mean": mean_score(exact), "reward/mean_square": mean_score(exact.square())}
    ids = prompt_id.to(exact.device)[known]
    group, sizes = torch.unique(ids, return_inverse=True, return_counts=True)[1:]
    compared = sizes > 1
    if bool(compared.any()):
        empty = exact.new_zeros(len(sizes))
        lowest = empty.scatter_reduce(0, group, exact, "amin", include_self=False)
        highest = empty.scatter_reduce(0, group, exact, "amax", include_self=False)
        num_equal = float((lowest == highest)[compared].sum())
        found["reward/equal_groups"] = Metric.mean(num_equal, float(compared.sum()))
    return found


def mean_score(scores: Tensor) -> Metric:
    """Return the mean of the scores that are known; rows without a score (nan) do not count."""
    exact = scores[~scores.isnan()].double()
    return Metric.mean(float(exact.sum()), float(len(exact)))
