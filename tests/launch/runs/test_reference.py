"""References: what is worse than they are is found, and what is not is let pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.environment import Environment
from penstock.launch.run_dir.run_folder import CodeVersion, create_run, record_of
from penstock.launch.run_dir.trackers.jsonl import MetricsLog
from penstock.launch.runs.reference import RULES, Finding, Reference, Rule
from penstock.launch.runs.values import RunValues, flat_values

HERE = Environment({"torch": "2.13.0"}, {"processor": "one", "system": "a", "memory_bytes": 1})
GOOD = {
    "accuracy_after_rl": 0.5,
    "peak_memory_bytes": 1_000_000,
    "weights_sha256": "a" * 64,
    "num_steps": 2,
}


def finished(
    runs: Path, seed: int = 0, environment: Environment = HERE, num_tokens: int = 7, **other: Any
) -> RunValues:
    folder = create_run(
        runs,
        name="it",
        seed=seed,
        config="a: 1\n",
        data="",
        code=CodeVersion("0"),
        environment=environment,
    )
    with MetricsLog(folder.metrics) as log:
        for step in range(2):
            log.write(step, {"a.train/tokens": num_tokens, "loss": 1.0})
    folder.write_summary({**GOOD, **other})
    record = record_of(folder)
    return record, flat_values(record)


def worse(reference: Reference, *runs: RunValues) -> list[str]:
    return [found.key for found in reference.held_against(runs) if found.worse]


def test_a_run_is_no_worse_than_itself(tmp_path: Path) -> None:
    run = finished(tmp_path)
    reference = Reference.of([run], RULES)
    assert [found.key for found in reference.held_against([run])] == [
        "accuracy_after_rl",
        "peak_memory_bytes",
        "weights_sha256",
        "num_steps",
        "sum of a.train/tokens",
    ]
    assert worse(reference, run) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"accuracy_after_rl": 0.48}, ["accuracy_after_rl"]),
        ({"accuracy_after_rl": 0.495}, []),
        ({"accuracy_after_rl": 0.9}, []),
        ({"peak_memory_bytes": 1_110_000}, ["peak_memory_bytes"]),
        ({"peak_memory_bytes": 1_090_000}, []),
        ({"peak_memory_bytes": 1}, []),
        ({"weights_sha256": "b" * 64}, ["weights_sha256"]),
        ({"num_tokens": 8}, ["sum of a.train/tokens"]),
    ],
)
def test_what_is_worse_is_found(tmp_path: Path, change: dict[str, Any], found: list[str]) -> None:
    reference = Reference.of([finished(tmp_path)], RULES)
    assert worse(reference, finished(tmp_path, **change)) == found


@pytest.mark.parametrize("seed", range(10))
def test_three_points_are_found_and_noise_is_not(tmp_path: Path, seed: int) -> None:
    """Six runs against six others that vary as much; three points are four times the spread."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(0.5, 0.0075, size=(2, 6))
    before, now = (
        [finished(tmp_path / "r", 6 * at + i, accuracy_after_rl=x) for i, x in enumerate(values)]
        for at, values in enumerate(drawn.tolist())
    )
    after = [
        finished(tmp_path / "r", 6 + i, accuracy_after_rl=x - 0.03)
        for i, x in enumerate(drawn[1].tolist())
    ]
    reference = Reference.of(before, {"accuracy_after_rl": Rule("not_lower", 0.0)})
    assert worse(reference, *now) == []
    assert worse(reference, *after) == ["accuracy_after_rl"]


@pytest.mark.parametrize(("loss", "found"), [(0.0, []), (0.03, ["accuracy_after_rl"])])
def test_the_same_seeds_are_compared_one_by_one(
    tmp_path: Path, loss: float, found: list[str]
) -> None:
    """Seeds differ by forty points, and each of them is three points worse than it was."""
    accuracies = [0.3, 0.7, 0.5]
    before = [finished(tmp_path, i, accuracy_after_rl=x) for i, x in enumerate(accuracies)]
    now = [finished(tmp_path, i, accuracy_after_rl=x - loss) for i, x in enumerate(accuracies)]
    reference = Reference.of(before, RULES)
    assert worse(reference, *reversed(now)) == found
    assert worse(reference, now[1]) == found


def test_other_seeds_are_further_draws_and_have_other_weights(tmp_path: Path) -> None:
    """A spread of forty points hides three, and neither hashes nor counts can be the same."""
    accuracies = [0.3, 0.7, 0.5]
    before = [finished(tmp_path, i, accuracy_after_rl=x) for i, x in enumerate(accuracies)]
    now = finished(tmp_path, 7, accuracy_after_rl=0.47, weights_sha256="b" * 64, num_tokens=8)
    found = Reference.of(before, RULES).held_against([now])
    assert [one.key for one in found if one.worse] == []
    notes = {one.key: one.note for one in found if one.note}
    assert set(notes.values()) == {"not compared: other seeds"}
    assert set(notes) == {"weights_sha256", "num_steps", "sum of a.train/tokens"}


@pytest.mark.parametrize(
    ("other", "note"),
    [
        (
            Environment({"torch": "2.14.0"}, HERE.hardware),
            "not compared: torch 2.13.0 -> 2.14.0",
        ),
        (Environment(HERE.versions, {"processor": "two"}), "not compared: another machine"),
        (Environment(), "not compared: the packages' versions are not recorded"),
        (Environment(HERE.versions, {**HERE.hardware, "system": "b", "memory_bytes": 2}), ""),
    ],
)
def test_hashes_are_compared_where_they_can_be(
    tmp_path: Path, other: Environment, note: str
) -> None:
    reference = Reference.of([finished(tmp_path)], RULES)
    run = finished(tmp_path, environment=other, weights_sha256="b" * 64)
    (found,) = (one for one in reference.held_against([run]) if one.key == "weights_sha256")
    assert found == Finding("weights_sha256", "a" * 64, "b" * 64, None, not note, note)


def test_what_became_nan_is_worse(tmp_path: Path) -> None:
    rules = {"accuracy_after_rl": Rule("not_lower", 1.0)}
    reference = Reference.of([finished(tmp_path)], rules)
    record, values = finished(tmp_path)
    assert worse(reference, (record, {**values, "accuracy_after_rl": float("nan")})) == [
        "accuracy_after_rl"
    ]


def test_it_is_written_and_read(tmp_path: Path) -> None:
    reference = Reference.of([finished(tmp_path), finished(tmp_path, 1)], RULES)
    reference.write(tmp_path / "ref.json")
    assert Reference.read(tmp_path / "ref.json") == reference


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"rules": 5},
        {"rules": {"a": {"direction": "same", "other": 1}}},
        {"values": {}},
        {"values": {"accuracy_after_rl": []}},
        {"values": {key: ["a"] for key in [*RULES, "num_steps", "sum of a.train/tokens"]}},
        {"environment": {"a": 1}},
    ],
)
def test_another_file_is_no_reference(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "ref.json"
    Reference.of([finished(tmp_path)], RULES).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match="is no reference .*\n    make one of good runs"):
        Reference.read(path)


def test_a_run_without_the_figure_is_not_held_against_it(tmp_path: Path) -> None:
    reference = Reference.of([finished(tmp_path)], RULES)
    run = finished(tmp_path, accuracy_after_rl=None)
    with pytest.raises(ConfigError, match="has no key and no metric 'accuracy_after_rl'"):
        reference.held_against([run])
