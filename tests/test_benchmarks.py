"""What scripts of `benchmarks` compare runs with, the cases that they give them, and their sums."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
SECONDS = st.floats(0.0, 9.0)


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], Any]]:
    """Imports one by its name."""
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module
    sys.path.remove(BENCHMARKS)


def test_the_ideal_of_three_steps(script: Callable[[str], Any]) -> None:
    ideal = script("asynchrony").ideal
    assert ideal([2, 2, 2], [1, 3, 1], 0) == [3, 8, 11]
    # Step 2 begins to generate when step 0 has been trained, at 3, though step 1 ended at 4.
    assert ideal([2, 2, 2], [1, 3, 1], 1) == [3, 7, 8]
    assert ideal([2, 2, 2], [9, 9, 9], 0) == [11, 22, 33]
    assert ideal([2, 2, 2], [9, 9, 9], 1) == [11, 20, 29]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12), st.integers(0, 12))
def test_the_ideal_is_between_one_stage_and_both(
    script: Callable[[str], Any], steps: list[tuple[float, float]], max_lag: int
) -> None:
    generate_s, train_s = zip(*steps, strict=True)
    end = script("asynchrony").ideal(generate_s, train_s, max_lag)[-1]
    assert end <= sum(generate_s) + sum(train_s) + 1e-9
    assert end >= max(sum(generate_s) + train_s[-1], generate_s[0] + sum(train_s)) - 1e-9
    assert end <= script("asynchrony").ideal(generate_s, train_s, max(max_lag - 1, 0))[-1] + 1e-9


def test_the_longest_of_a_step_is_eight_times_the_mean(script: Callable[[str], Any]) -> None:
    case, mean = script("asynchrony_case"), 1000
    rows = case.lengths(torch.arange(400 * case.NUM_PROMPTS), case.NUM_SAMPLES, mean)
    steps = rows.view(400, -1).float()
    assert steps.shape[1] == 128
    assert float(steps.mean()) == pytest.approx(mean, rel=0.02)
    longest = steps.log().amax(1).mean().exp()  # the middle one, as its spread is wide
    assert float(longest) == pytest.approx(8 * mean, rel=0.1)
    assert float(steps.max()) == case.LONGEST * mean
    again = case.lengths(torch.arange(32, 64), case.NUM_SAMPLES, mean)
    assert torch.equal(again, rows[128:256])


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([0.0, 0.0], 4.0),  # all generating
        ([0.5, 1.0], 4.5),  # the longer one, which waits least
        ([0.5, 3.0], 5.0),  # the shorter one: half of the tokens, and a long wait
    ],
)
def test_the_ideal_is_the_longest_chain(
    script: Callable[[str], Any], waits: list[float], expected: float
) -> None:
    held = script("agents_ideal").Held(9.0, [10, 5], waits, 0, 0, 0.0)
    assert script("agents_ideal").ideal_s(held, 4.0) == pytest.approx(expected)


@pytest.mark.slow
def test_waits_change_no_conversation(script: Callable[[str], Any], tmp_path: Path) -> None:
    script("agents_task").chain_folder(tmp_path, hidden=64, layers=1)
    with script("agents_ideal").talk_of("torch", tmp_path, 3, 3, 0.02) as talk:
        together, held = talk.hold(waits=False), talk.hold(waits=True)
    assert held.own_tokens == together.own_tokens
    assert min(held.own_tokens) >= 3 * 10  # a word of each group, a call and the end
    assert sum(together.wait_s) == 0 < min(held.wait_s) < max(held.wait_s) < 2 * 0.02
    # Of the tokens before a later turn all are held but the last.
    assert held.reused == held.known - 3 * 2


def test_seeds_are_summed_up_by_algorithm_and_lag(script: Callable[[str], Any]) -> None:
    runs = [
        {"algorithm": "grpo", "lag": lag, "seed": seed, "reward": seed + lag, "accuracy": 0.5,
         "kl": 2.0 * seed}
        for seed in (0, 1, 2)
        for lag in (0, 16)
    ]  # fmt: skip
    first, second = script("lag_and_reward").summed_up(runs)
    assert (first["algorithm"], first["lag"], second["lag"]) == ("grpo", 0, 16)
    assert first["reward"] == {"mean": 1, "low": 0, "high": 2}
    assert second["reward"] == {"mean": 17, "low": 16, "high": 18}
    assert second["kl"] == {"mean": 2, "low": 0, "high": 4}


def test_a_run_that_is_there_is_not_made_again(
    script: Callable[[str], Any], tmp_path: Path
) -> None:
    made = tmp_path / "grpo" / "20261123-000000-grpo-seed0"
    made.mkdir(parents=True)
    (made / "summary.json").write_text("{}")
    assert script("lag_and_reward").make(tmp_path / "grpo", ["no such word"]) == made


@pytest.mark.slow
def test_planned_environments_are_compared_with_a_grid(
    script: Callable[[str], Any], tmp_path: Path
) -> None:
    planned = script("planned_environments")
    assert [len(planned.grid(overlaps=overlaps)) for overlaps in (True, False)] == [12, 12]
    assert len({str(one) for one in planned.verifying_grid()}) == 12
    file, state = tmp_path / "found.json", tmp_path / "state.json"
    words = ["--tiny", "--json", str(file), "--state", str(state)]
    planned.main(words)
    (task,) = json.loads(file.read_text())["tasks"]
    assert task["same_weights"]
    assert {row["placement"] for row in task["placements"]} == {
        "inline 1, 1 groups",
        "inline 1, 2 groups",
        "inline 1, 2 groups x2",
        "automatic",
        "one rank",
    }
    before = state.read_text()
    planned.main(words)  # nothing is left to measure
    assert state.read_text() == before
