"""Which problems a step takes: curricula, priorities, bands of pass rates, shares."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.orders import Order, StepRows, step_rows
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.row_task import RowTask


def rated(folder: Path, rates: list[float]) -> RowTask:
    path = folder / "rated.jsonl"
    rows = [{"prompt": f"p{i}", "answer": "a", "rate": rate} for i, rate in enumerate(rates)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileTaskSpec(path=str(path), pass_rate_field="rate").build()


def rows_of(task: RowTask, batch_size: int = 2, seed: int = 0, **order: Any) -> StepRows:
    chosen = Order(**order)
    return step_rows(
        "prompt", task.train, batch_size=batch_size, seed=seed, task=task, order=chosen
    )


@pytest.mark.parametrize("kind", ["shuffled", "curriculum", "priority"])
def test_a_step_is_a_function_of_seed_and_step(tmp_path: Path, kind: Any) -> None:
    task = rated(tmp_path, [i / 10 for i in range(10)])
    one, other = rows_of(task, kind=kind), rows_of(task, kind=kind)
    late = [other.at(step) for step in reversed(range(20))]
    assert [one.at(step) for step in range(20)] == late[::-1]
    assert all(len(set(batch)) == 2 for batch in late)
    assert late != [rows_of(task, seed=1, kind=kind).at(step) for step in range(20)][::-1]


def test_a_curriculum_begins_with_the_easiest(tmp_path: Path) -> None:
    task = rated(tmp_path, [i / 10 for i in range(10)])
    rows = rows_of(task, kind="curriculum", curriculum_steps=10)
    assert set(rows.at(0)) == {8, 9}
    assert set(rows.at(4)) <= {5, 6, 7, 8, 9}
    assert {index for step in range(9, 60) for index in rows.at(step)} == set(range(10))


def test_priority_takes_what_is_hard_by_its_weight(tmp_path: Path) -> None:
    task = rated(tmp_path, [0.0, 0.5, 0.75, 1.0])
    rows = rows_of(task, batch_size=1, kind="priority")
    counts = Counter(index for step in range(4000) for index in rows.at(step))
    # Weights are 1, 1/2, 1/4 and 0; three standard deviations of 4000 draws are below 0.025.
    shares = np.array([counts[i] for i in range(4)]) / 4000
    assert np.abs(shares - np.array([4, 2, 1, 0]) / 7).max() < 0.025


def test_a_band_leaves_out_what_is_too_easy_or_too_hard(tmp_path: Path) -> None:
    task = rated(tmp_path, [0.0, 0.1, 0.5, 0.9, 1.0])
    rows = rows_of(task, batch_size=3, pass_rates=(0.1, 0.9))
    assert set(rows.at(0)) == {1, 2, 3}


def test_pass_rates_must_be_known(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n' * 3)
    with pytest.raises(ConfigError) as caught:
        rows_of(FileTaskSpec(path=str(path)).build(), kind="priority")
    assert str(caught.value) == (
        "task 'plain' does not say how often its problems are solved, which task.order and "
        "task.pass_rates need\n    give task.pass_rate_field, or leave both out"
    )


def test_a_pass_rate_is_a_share(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rated(tmp_path, [0.5, 50.0])
    assert "rated.jsonl:2: wrong value of 'rate': expected 0 to 1, got 50\n" in str(caught.value)
