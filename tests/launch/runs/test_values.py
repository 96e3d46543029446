"""Metrics over steps, samples, tokens and seconds, and their one-line curves."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.provenance import CodeVersion, Origins
from penstock.launch.run_dir.run_folder import RunFolder, RunRecord
from penstock.launch.run_dir.step_logs import METRICS, MetricsLog
from penstock.launch.runs.values import History, Over, Series, seed_groups, sparkline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three steps, of which the second has no reward and generated twice as much."""
    with MetricsLog(tmp_path / METRICS) as log:
        for step, (seconds, rate, num_new) in enumerate(
            [(1.0, 8.0, 10), (2.0, 8.0, 20), (1, 4, 5)]
        ):
            values = {"run/step_time_s": seconds, "run/samples_per_s": rate}
            counts = {"a.generate/new_tokens": num_new, "a.train/tokens": 1000.0}
            reward = {} if step == 1 else {"reward": step / 4}
            log.write(step, {**values, **counts, **reward, "bad": float("nan")})
    return tmp_path


@pytest.mark.parametrize(
    ("over", "xs"),
    [
        ("steps", (1.0, 3.0)),
        ("seconds", (1.0, 4.0)),
        ("samples", (8.0, 28.0)),
        ("tokens", (10.0, 35.0)),
    ],
)
def test_a_metric_stands_at_what_was_over(folder: Path, over: Over, xs: tuple[float, ...]) -> None:
    assert History(folder).series("reward", over) == Series(xs, (0.0, 0.5))


def test_what_is_never_finite_has_no_points(folder: Path) -> None:
    assert History(folder).series("bad") == Series((), ())


def test_an_unknown_metric_is_named_with_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        History(folder).series("rewards")
    assert str(raised.value) == (
        f"run '{folder.name}' has no metric 'rewards'; did you mean 'reward'?\n"
        f"    penstock runs show {folder.name} lists those that it has"
    )


def test_what_was_not_counted_is_said(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / METRICS) as log:
        log.write(0, {"loss": 1.0})
    for over in ("seconds", "samples", "tokens"):
        with pytest.raises(ConfigError, match=f"has not counted its {over}\\n    use over=steps"):
            History(tmp_path).series("loss", over)


def test_the_end_is_the_mean_of_the_last_tenth() -> None:
    assert Series((1.0,), (3.0,)).end == 3.0
    assert Series(tuple(range(20)), (0.0,) * 18 + (1.0, 2.0)).end == 1.5


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_a_sparkline_is_as_long_as_it_may_be_and_has_both_ends(ys: list[float]) -> None:
    line = sparkline(ys, width=32)
    assert len(line) == min(32, len(ys))
    if 1 < len(ys) <= 32 and min(ys) < max(ys):
        assert line[ys.index(min(ys))] == "▁"
        assert line[ys.index(max(ys))] == "█"


def test_runs_that_differ_in_their_seed_alone_are_a_group() -> None:
    def made(key: str, seed: int, config: dict[str, Any] | None, file: str = "a") -> RunRecord:
        origins, now = Origins({"reward.py": file}), datetime.now(UTC)
        folder, code = RunFolder(Path(key)), CodeVersion("1")
        return RunRecord(folder, key[0], seed, now, code, config=config, origins=origins)

    low = [
        made(f"a{seed}", seed, {"seed": seed, "x": {"lr": 0.1, "init_seed": seed}})
        for seed in range(2)
    ]
    high = made("a2", 0, {"seed": 0, "x": {"lr": 0.5, "init_seed": 0}})
    edited = made("a3", 2, {"seed": 2, "x": {"lr": 0.1, "init_seed": 2}}, "b")
    imported = [made(key, 0, None) for key in ("b1", "b2")]
    far = [made(f"c{i}", 0, dict.fromkeys("pqrs", i)) for i in range(2)]
    found = seed_groups([*low, high, edited, *imported, *far])
    assert {path.name: label for path, label in found.items()} == {
        "a0": "a0", "a1": "a0", "a2": "a lr=0.5", "a3": "a3",
        "b1": "b1", "b2": "b2", "c0": "c0", "c1": "c1",
    }  # fmt: skip
    alone = seed_groups([*low, high])
    assert [*alone.values()] == ["a lr=0.1", "a lr=0.1", "a lr=0.5"]
