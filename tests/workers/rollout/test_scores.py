"""What is reported of scores, and that parts of a batch add up to the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.graph.role import Metric, add_metrics
from penstock.workers.rollout.scores import score_metrics


def values(scores: list[float], groups: list[int]) -> dict[str, float]:
    found = score_metrics(torch.tensor(scores), torch.tensor(groups))
    return {name.removeprefix("reward/"): metric.value for name, metric in found.items()}


def test_a_worked_example() -> None:
    # Groups 7 and 8 differ within themselves or not; 9 has a single response and is not counted.
    found = values([1.0, 0.0, 0.5, 0.5, 3.0], [7, 7, 8, 8, 9])
    assert found == pytest.approx({"mean": 1.0, "mean_square": 2.1, "equal_groups": 0.5})


def test_without_groups_none_is_equal() -> None:
    assert set(values([1.0, 1.0], [3, 4])) == {"mean", "mean_square"}


def test_what_has_no_score_is_in_no_mean_and_no_comparison() -> None:
    missing = float("nan")
    assert "equal_groups" not in values([1.0, missing, missing, 1.0], [3, 3, 4, 5])
    found = values([1.0, missing, 1.0, 0.0], [3, 3, 3, 4])
    assert found == pytest.approx({"mean": 2 / 3, "mean_square": 2 / 3, "equal_groups": 1.0})


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0])), min_size=1))
def test_chunks_of_whole_groups_add_up(rows: list[tuple[int, float]]) -> None:
    ids = torch.tensor([group for group, _ in rows])
    scores = torch.tensor([score for _, score in rows])
    parts: dict[str, Metric] = {}
    for chunk in (ids < 2, ids >= 2):
        if bool(chunk.any()):
            add_metrics(parts, score_metrics(scores[chunk], ids[chunk]))
    whole = score_metrics(scores, ids)
    assert parts == whole  # these scores have exact sums
    groups = [scores[ids == group].tolist() for group in set(ids.tolist())]
    several = [group for group in groups if len(group) > 1]
    if several:
        equal = sum(len(set(group)) == 1 for group in several) / len(several)
        assert whole["reward/equal_groups"].value == pytest.approx(equal)
