"""What `benchmarks/lag_and_reward.py` makes of its runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("lag_and_reward")
    sys.path.remove(BENCHMARKS)


def test_seeds_are_summed_up_by_algorithm_and_lag(script: Any) -> None:
    runs = [
        {"algorithm": "grpo", "lag": lag, "seed": seed, "reward": seed + lag, "accuracy": 0.5,
         "kl": 2.0 * seed}
        for seed in (0, 1, 2)
        for lag in (0, 16)
    ]  # fmt: skip
    first, second = script.summed_up(runs)
    assert (first["algorithm"], first["lag"], second["lag"]) == ("grpo", 0, 16)
    assert first["reward"] == {"mean": 1, "low": 0, "high": 2}
    assert second["reward"] == {"mean": 17, "low": 16, "high": 18}
    assert second["kl"] == {"mean": 2, "low": 0, "high": 4}


def test_a_run_that_is_there_is_not_made_again(script: Any, tmp_path: Path) -> None:
    made = tmp_path / "grpo" / "20261123-000000-grpo-seed0"
    made.mkdir(parents=True)
    (made / "summary.json").write_text("{}")
    assert script.make(tmp_path / "grpo", ["no such word"]) == made
