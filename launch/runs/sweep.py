"""A sweep: the values that keys may take, the trials so far, and the values to try next.

A sweep is a folder of runs, one for each trial, with `sweep.json` beside them: what is looked for,
and which values each run was given. What came out is read from the runs themselves. The next values
follow from these alone, so a sweep that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from ...dataflow.errors import ConfigError
from ..run_dir.files import parse_object, parsed, write_json
from ..run_dir.run_folder import RunFolder, record_of
from .values import Figures, flat_values

SWEEP = "sweep.json"

Direction = Literal["maximize", "minimize"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

Value = str | int | float


@dataclass(frozen=True)
class Key:
    """A key of the configuration that is varied."""

    name: str
    choices: tuple[str, ...] = ()  # values as they are typed; empty for a number
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0  # from one value to the next; 0 for any number between
    log: bool = False  # the logarithm is searched
    whole: bool = False  # whole numbers only

    def distribution(self) -> Any:
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if self.whole:
            low, high, step = int(self.low), int(self.high), int(self.step)
            return distributions.IntDistribution(low, high, step=step)
        return distributions.FloatDistribution(
            self.low, self.high, log=self.log, step=self.step or None
        )

    @property
    def first(self) -> Value:
        low = int(self.low) if self.whole else self.low
        return self.choices[0] if self.choices else low

    def values(self) -> Sequence[Value] | None:
        if self.choices:
            return self.choices
        if not self.step:
            return None
        number = math.floor((self.high - self.low) / self.step + 1e-9) + 1
        found = [self.low + at * self.step for at in range(number)]
        return [int(value) for value in found] if self.whole else found


@dataclass
class Trial:
    """One run of a sweep."""

    values: dict[str, Value]
    run: str = ""  # the name of its folder; "" if there is none yet
    failed: str = ""  # why it has no objective
    took_s: float = 0.0  # without the time of interrupted processes
    objective: float | None = None

    @property
    def ended(self) -> bool:
        return bool(self.failed) or self.objective is not None


@dataclass
class Sweep:
    """A search and its trials so far."""

    metric: str  # a key of summary.json, or a metric of the steps
    direction: Direction
    seed: int  # of the search, not of the runs
    fixed: tuple[str, ...]  # words of every run
    keys: tuple[Key, ...]
    trials: list[Trial] = field(default_factory=list[Trial])  # in the order they were begun

    @property
    def name(self) -> str:
        """A name that is the same for the same search, whatever its budget."""
        said = json.dumps(self._about(), sort_keys=True)
        return f"{self.metric.replace('/', '-')}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"

    def load(self, folder: Path) -> None:
        """Take over the trials that the folder has; refuse those of another search."""

        def read(content: bytes) -> tuple[dict[str, Any], list[Trial]]:
            about = parse_object(content)
            return about, [Trial(**one) for one in about.pop("trials")]

        before = parsed(folder / SWEEP, read)
        if before is None:
            return
        found, trials = before
        if found != json.loads(json.dumps(self._about())):
            raise ConfigError(
                f"'{folder}' is a sweep of other keys, another metric or another seed\n"
                "    give the words it was begun with, or another sweep.name"
            )
        self.trials = trials
        for trial in trials:
            if not trial.failed:
                self.find_run(trial, folder)
                if trial.run and (folder / trial.run / "summary.json").exists():
                    self.note(trial, folder)

    def save(self, folder: Path) -> None:
        trials = [
            {name: value for name, value in asdict(trial).items() if name != "objective"}
            for trial in self.trials
        ]
        write_json(folder / SWEEP, {**self._about(), "trials": trials})

    def note(self, trial: Trial, folder: Path) -> None:
        record = record_of(RunFolder(folder / trial.run))
        found = Figures((record, flat_values(record))).of(self.metric)
        if isinstance(found, str):
            raise ConfigError(f"'sweep.metric': '{self.metric}' is a text, {found!r:.40}")
        if math.isfinite(found):
            trial.objective = float(found)
        else:
            trial.failed = f"{self.metric} is {found}"

    def ranked(self) -> list[Trial]:
        sign = -1.0 if self.direction == "maximize" else 1.0
        return sorted(
            self.trials,
            key=lambda one: math.inf if one.objective is None else sign * one.objective,
        )

    def find_run(self, trial: Trial, folder: Path) -> None:
        """Note the run of a trial that ended before its name was saved: no other trial has it."""
        if not trial.run:
            known = {one.run for one in self.trials}
            there = [path.parent.name for path in folder.glob("*/run.json")]
            trial.run = next((name for name in there if name not in known), "")

    def _about(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "trials"}


def next_values(sweep: Sweep) -> dict[str, Value] | None:
    """Choose values by Optuna's tree-structured Parzen estimator; None if all have been tried.

    Of a search whose values can be counted, nothing is tried twice.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key.name: key.distribution() for key in sweep.keys}
    number = len(sweep.trials)
    # Seeds of numpy's generator have 32 bits.
    sampler = optuna.samplers.TPESampler(seed=(sweep.seed * 1_000_003 + number) % 2**32)
    study = optuna.create_study(sampler=sampler, direction=sweep.direction)
    states = optuna.trial.TrialState
    for trial in sweep.trials:
        study.add_trial(
            optuna.trial.create_trial(
                params=trial.values,
                distributions=space,
                value=trial.objective,
                state=states.FAIL if trial.objective is None else states.COMPLETE,
            )
        )
    chosen = study.ask(space).params
    tried = [trial.values for trial in sweep.trials]
    counted = [key.values() for key in sweep.keys]
    if chosen not in tried or any(values is None for values in counted):
        return chosen
    names = [key.name for key in sweep.keys]
    all_of_them = product(*(values or () for values in counted))
    left = (dict(zip(names, one, strict=True)) for one in all_of_them)
    return next((one for one in left if one not in tried), None)
