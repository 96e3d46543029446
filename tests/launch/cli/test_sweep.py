"""`penstock run --multirun sweep.metric=...`: the values that come next, and real trials."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.sweep import Key, Sweep, Trial, draw_sweep, next_values
from penstock.launch.runs.values import SUMMARIZED
from penstock.launch.stages.report import summary_of

from ..conftest import Penstock

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


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_the_picture_has_a_chart_for_each_key(tmp_path: Path) -> None:
    sweep = swept(LR, LAG, number=5, came_out=_nearness)
    draw_sweep(tmp_path / "trials.svg", sweep)
    text = (tmp_path / "trials.svg").read_text()
    assert text.count(">accuracy_after_rl<") == 3
    assert all(f">{name}<" in text for name in ("trial", LR.name, LAG.name))


_ONCE = '''
from pathlib import Path

class Once:
    """Presses Ctrl-C in the second trial, once."""

    def start(self, run):
        self.is_second = len([*Path("runs").glob("sweeps/*/*/run.json")]) == 2

    def rewind(self, step, stage):
        pass

    def log(self, step, stage, metrics):
        if self.is_second and step == 1 and not Path("pressed").exists():
            Path("pressed").touch()
            raise KeyboardInterrupt

    def finish(self, summary):
        pass
'''

SWEEP = (
    *("run", "--multirun", "algorithm=env_ppo", "task=cartpole", "model=mlp", "seed=1"),
    *("algorithm.num_steps=2", "checkpoint_every=1", "evaluation.num_episodes=2"),
    *("algorithm.per_step.rows=4", "tracker.kind=once:Once"),
    "sweep.metric=episode_return_after.actor",
    "algorithm.optimizer.lr=tag(log,interval(1e-4,1e-2))",
    "algorithm.cfg.discount=0.9,0.99",
)


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_an_interrupted_sweep_goes_on_where_it_was(penstock: Penstock) -> None:
    Path("once.py").write_text(_ONCE)
    said = penstock(*SWEEP, "sweep.trials=4")
    assert said.code == 130, said.err
    (folder,) = Path("runs/sweeps").iterdir()
    assert (
        f"the sweep is in {folder}, with 1 of 4 trials done; the same command goes on with it"
    ) in said.err
    begun = json.loads((folder / "sweep.json").read_text())["trials"]
    assert len(begun) == 2

    said = penstock(*SWEEP, "sweep.trials=4")
    assert said.code == 0, said.err
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    assert [one["values"] for one in trials[:2]] == [one["values"] for one in begun]
    runs = {path.parent.name for path in folder.glob("*/summary.json")}
    assert len(trials) == len(runs) == 4
    assert {one["run"] for one in trials} == runs
    head, *rows = [line.split("\t") for line in (folder / "trials.tsv").read_text().splitlines()]
    assert head == [
        "episode_return_after.actor",
        "algorithm.optimizer.lr",
        "algorithm.cfg.discount",
        "run",
    ]
    assert [row[3] for row in rows] != []
    returns = [float(row[0]) for row in rows]
    assert returns == sorted(returns, reverse=True)
    for row in rows:
        summary = json.loads((folder / row[3] / "summary.json").read_text())
        assert float(row[0]) == pytest.approx(summary["episode_return_after"]["actor"], rel=1e-5)
    assert (folder / "trials.svg").is_file()

    said = penstock(*SWEEP, "sweep.trials=4")  # nothing is left to do
    assert (said.code, said.out.count("\n")) == (0, 7)
    said = penstock(*SWEEP, "sweep.trials=9", "sweep.minutes=0.0001")
    assert (said.code, said.out.count("\n")) == (0, 7)
    listed = penstock("runs", "list", f"runs={folder}", "show=algorithm.cfg.discount")
    assert listed.out.count("env_ppo") == 4


REFUSED = {
    "sweep.trials=3": "'sweep.trials=3' belongs to a sweep\n    add --multirun",
    "-m sweep.trials=3": (
        "a sweep varies nothing\n    give a key several values, such as max_lag=0,1,2 or "
        "'algorithm.optimizer.lr=tag(log,interval(1e-5,1e-2))'"
    ),
    "-m sweep.trails=3 max_lag=0,1": (
        "penstock run --multirun: there is no key 'sweep.trails'; did you mean 'trials'?\n"
        "    keys are: sweep.metric, sweep.direction, sweep.trials, sweep.minutes, sweep.seed, "
        "sweep.name"
    ),
    "-m sweep.minutes=0 max_lag=0,1": "'sweep.minutes': expected a number above 0, got '0'",
    "-m sweep.seed=x max_lag=0,1": ("'sweep.seed': expected a whole number of at least 0, got 'x'"),
    "-m sweep.seed=1 lr=tag(log,interval(0,1))": (
        "'lr=tag(log,interval(0,1))': expected two ascending numbers, the first of them above 0"
    ),
    "-m sweep.seed=1 lr=range(3,3)": ("'lr': expected a range of at least two ascending numbers"),
    "-m sweep.seed=1 a=0,1 a=2,3": "'a' is varied twice\n    leave one of them out",
    **{
        f"-m sweep.name={name} max_lag=0,1": (
            f"'sweep.name': expected a name without folders, got '{name}'"
        )
        for name in ("../../x", "/tmp/x", "..", ".", "")
    },
    "-m sweep.trials=0 seed=0,1": "'sweep.trials': expected a whole number of at least 1, got '0'",
    f"-m sweep.seed={10**50} seed=0,1": "'sweep.seed': expected at most 18 digits, got 51",
    "-m sweep.metric=actor.trian/loss seed=0,1": (
        "'sweep.metric': 'actor.trian/loss' begins with no node of grpo; did you mean "
        "'actor.train'?\n    metrics of the steps begin with: run, evaluation, prompts, "
        "actor.generate, reward.score, group_advantage, broadcast_over_tokens, actor.train"
    ),
    **{
        f"-m sweep.metric={name} seed=0,1": (
            f"'sweep.metric': a run's summary has no number '{name}'{hint}\n    take one of "
            f"{', '.join(SUMMARIZED)}; or a metric of the steps, such as actor.train/loss"
        )
        for name, hint in (
            ("nope", "; did you mean 'nodes'?"),
            ("", ""),
            ("acuracy_after_rl", "; did you mean 'accuracy_after_rl'?"),
        )
    },
    "-m sweep.seed=1 max_lag=0,1 --cfg job": (
        "penstock run --multirun: expected KEY=VALUE, got '--cfg'"
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_sweep_is_refused(penstock: Penstock, words: str) -> None:
    said = penstock("run", *words.split(" "))
    assert (said.code, said.err) == (2, f"penstock: {REFUSED[words]}\n")
    assert not Path("runs").exists()


def test_what_a_search_may_look_for_is_in_a_summary() -> None:
    assert {*SUMMARIZED} <= {*re.findall(r'"(\w+)":', inspect.getsource(summary_of))}


@pytest.mark.parametrize("seed", [0, 4294, 4295, 10**18 - 1])
def test_a_search_takes_every_seed(seed: int) -> None:
    sweep = Sweep("accuracy_after_rl", "maximize", seed, (), (Key("lr", low=0.1, high=1.0),))
    found = next_values(sweep)
    assert found is not None
    assert 0.1 <= float(found["lr"]) <= 1
