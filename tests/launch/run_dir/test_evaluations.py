"""Figures of evaluations, and what is kept of them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import cast

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.evaluations import (
    WHOLE,
    Change,
    Evaluations,
    Measured,
    accuracy_interval,
    names_of,
    pass_at,
)


def measured(*correct: int, num_samples: int = 1) -> Measured:
    """Of problems 10, 11, ... so many samples are right."""
    scores: dict[str, list[float | None]] = {
        str(10 + problem): [float(sample < right) for sample in range(num_samples)]
        for problem, right in enumerate(correct)
    }
    accuracy = sum(correct) / len(correct) / num_samples
    rights = {problem: sum(one == 1 for one in its) for problem, its in scores.items()}
    return Measured({"a/b": 1.0}, accuracy, scores=scores, correct=rights)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 0, 3), (5, 5, 5), (6, 2, 4), (3, 1, 1)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_sample(n: int, c: int, k: int) -> None:
    choices = list(itertools.combinations(range(n), k))
    found = sum(any(sample < c for sample in choice) for choice in choices) / len(choices)
    assert pass_at(n, c, k) == pytest.approx(found, abs=1e-12)


def test_a_suite_reports_pass_at_powers_of_two_and_at_all_of_its_samples() -> None:
    assert measured(2, 0, 6, num_samples=6).values == {
        "accuracy": pytest.approx(8 / 18),
        "pass@2": pytest.approx((1 - 6 / 15 + 0 + 1) / 3),
        "pass@4": pytest.approx((1 - 1 / 15 + 0 + 1) / 3),
        "pass@6": pytest.approx(2 / 3),
    }
    assert names_of(6) == ["accuracy", "pass@2", "pass@4", "pass@6"]
    assert names_of(1) == list(measured(1, 0).values) == ["accuracy"]
    assert names_of(8) == ["accuracy", "pass@2", "pass@4", "pass@8"]


def test_a_change_is_compared_problem_by_problem() -> None:
    before, after = measured(0, 1, 0, 1, num_samples=2), measured(2, 2, 0, 1, num_samples=2)
    change = Change.between(before, after)
    assert change is not None
    # Changes of 1, 0.5, 0 and 0 have a mean of 0.375 and a standard deviation of sqrt(0.6875 / 3).
    assert change.mean == 0.375
    assert change.half_width == pytest.approx(1.96 * math.sqrt(0.6875 / 3 / 4), rel=1e-4)
    assert str(change) == "+37.5 points (95 % interval -9.4 to +84.4)"
    assert Change.between(before, measured(1)) is None, "of one problem nothing can be said"


def test_an_accuracy_has_an_interval_over_problems() -> None:
    assert accuracy_interval(measured(1)) is None
    low, high = accuracy_interval(measured(1, 0, 1, 1)) or (0, 0)
    assert (low + high) / 2 == pytest.approx(0.75)
    assert (high - low) / 2 == pytest.approx(1.96 * 0.25, rel=1e-4)


@pytest.fixture
def kept(tmp_path: Path) -> Evaluations:
    """Evaluations with an accuracy of 1, 2, 0, 2, 1 fourths."""
    kept = Evaluations(tmp_path)
    for step, right in enumerate((1, 2, 0, 2, 1)):
        correct = [int(problem < right) for problem in range(4)]
        kept.write(5 * step, {WHOLE: measured(*correct), "hard": measured(0, right, num_samples=2)})
    return kept


def test_what_was_found_comes_back(kept: Evaluations) -> None:
    assert kept.steps() == [0, 5, 10, 15, 20]
    assert kept.read(5)[WHOLE] == measured(1, 1, 0, 0)
    assert kept.curve("accuracy") == {0: 0.25, 5: 0.5, 10: 0.0, 15: 0.5, 20: 0.25}
    assert kept.curve("hard/pass@2") == {0: 0.5, 5: 0.5, 10: 0.0, 15: 0.5, 20: 0.5}
    assert kept.curve("soft/accuracy") == {}


def test_a_number_that_nothing_was_known_for_is_left_out(tmp_path: Path) -> None:
    """The mean score is one where no answer has a score."""
    nan, scores = math.nan, cast(dict[str, list[float | None]], {"3": [None]})
    found = Measured(
        {"mean": nan, "correct": 0.0},
        0.0,
        scores=scores,
        correct={"3": 0},
        losses={"loss": math.inf, "loss/accuracy": 1.0},
        episode_return={"actor": nan},
    )
    Evaluations(tmp_path).write(0, {WHOLE: found})
    read = Evaluations(tmp_path).read(0)[WHOLE]
    assert read.metrics == {"correct": 0.0}
    assert read.values == {"accuracy": 0.0, "loss/accuracy": 1.0}
    assert read.scores == scores


def test_the_best_step_is_the_first_with_the_highest_value(kept: Evaluations) -> None:
    assert kept.best("accuracy") == 5
    assert kept.best("hard/pass@2") == 5, "what was measured before training has no checkpoint"
    assert kept.without_improvement("accuracy") == 3
    assert kept.without_improvement("hard/pass@2") == 4
    assert kept.best("soft/accuracy") is None


def test_steps_that_are_taken_again_are_measured_again(kept: Evaluations) -> None:
    kept.rewind(10)
    assert kept.steps() == [0, 5, 10]
    assert kept.without_improvement("accuracy") == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "it is damaged"),
        ('{"suites": {"": 3}}', "it is damaged"),
        (json.dumps({"suites": {"": {"nope": 3}}}), "it is damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    kept = Evaluations(tmp_path)
    kept.write(5, {WHOLE: measured(1)})
    file = tmp_path / "evaluations" / "step-00000005.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        kept.read(5)
    assert str(raised.value) == (
        f"'{file}' cannot be read: {reason}\n    bring it back as it was; what was measured at an "
        "earlier step cannot be measured again"
    )
