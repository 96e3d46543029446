"""Sweeps: which values come next, and that they follow from the trials that have ended."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.runs.drawing import draw_sweep
from penstock.launch.runs.sweep import Key, Sweep, Trial, next_values

pytest.importorskip("optuna", reason="optuna is not installed")

LR = Key("algorithm.optimizer.lr", low=1e-5, high=1e-1, log=True)
LAG = Key("max_lag", choices=("0", "1", "2"))
PROMPTS = Key("algorithm.per_step.prompts", low=4, high=12, step=4, whole=True)


def swept(*keys: Key, number: int, came_out: Callable[[Trial], float | None]) -> Sweep:
    sweep = Sweep("accuracy_after_rl", "maximize", 0, (), keys)
    for _ in range(number):
        values = next_values(sweep)
        if values is None:
            break
        trial = Trial(values)
        trial.objective = came_out(trial)
        trial.failed = "" if trial.objective is not None else "it failed"
        sweep.trials.append(trial)
    return sweep


def _nearness(trial: Trial) -> float:
    """Best where the learning rate is 1e-3."""
    return -abs(math.log10(float(trial.values[LR.name])) + 3)


def test_later_trials_are_nearer_to_what_is_best() -> None:
    sweep = swept(LR, number=40, came_out=_nearness)
    first, last = sweep.trials[:10], sweep.trials[-10:]
    assert sum(map(_nearness, last)) / 10 > sum(map(_nearness, first)) / 10 + 0.5
    assert all(1e-5 <= float(trial.values[LR.name]) <= 1e-1 for trial in sweep.trials)


def test_the_next_values_follow_from_the_trials_alone() -> None:
    keys = (LR, LAG, PROMPTS)
    whole = swept(*keys, number=14, came_out=_nearness)
    for number in (0, 1, 11, 13):
        stopped = Sweep("accuracy_after_rl", "maximize", 0, (), keys, whole.trials[:number])
        assert next_values(stopped) == whole.trials[number].values
    assert {type(trial.values[PROMPTS.name]) for trial in whole.trials} == {int}


def test_nothing_that_can_be_counted_is_tried_twice() -> None:
    sweep = swept(LAG, PROMPTS, number=20, came_out=lambda trial: None)
    found = [tuple(trial.values.values()) for trial in sweep.trials]
    assert sorted(found) == [(lag, prompts) for lag in "012" for prompts in (4, 8, 12)]


def test_a_sweep_of_other_keys_is_not_gone_on_with(tmp_path: Path) -> None:
    sweep = swept(LAG, number=2, came_out=lambda trial: None)
    sweep.save(tmp_path)
    again = Sweep("accuracy_after_rl", "maximize", 0, (), (LAG,))
    again.load(tmp_path)
    assert again.trials == sweep.trials
    assert again.name == sweep.name
    other = Sweep("accuracy_after_rl", "maximize", 1, (), (LAG,))
    assert other.name != sweep.name
    with pytest.raises(ConfigError) as raised:
        other.load(tmp_path)
    assert str(raised.value) == (
        f"'{tmp_path}' is a sweep of other keys, another metric or another seed\n"
        "    give the words it was begun with, or another sweep.name"
    )
    (tmp_path / "sweep.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="cannot be read"):
        other.load(tmp_path)


@pytest.mark.usefixtures("fonts")
def test_the_picture_has_a_chart_for_each_key(tmp_path: Path) -> None:
    sweep = swept(LR, LAG, number=5, came_out=_nearness)
    draw_sweep(tmp_path / "trials.svg", sweep)
    text = (tmp_path / "trials.svg").read_text()
    assert text.count(">accuracy_after_rl<") == 3
    assert all(f">{name}<" in text for name in ("trial", LR.name, LAG.name))
