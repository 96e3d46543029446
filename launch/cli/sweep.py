"""`penstock run --multirun sweep.metric=...`: runs whose values Optuna chooses, within a budget.

A sweep is a folder of runs, one for each trial, with `sweep.json` beside them: what is looked for,
and which values each run was given. What came out is read from the runs themselves. The next values
follow from these alone, so a sweep that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from hydra.core.override_parser.types import IntervalSweep, RangeSweep

from ...dataflow.errors import NOT_STARTED, ConfigError, PenstockError, nearest, no_exit
from ..run_dir.files import parse_object, parsed, write_json, write_text
from ..run_dir.run_folder import RunFolder, record_of
from ..run_dir.stop import say, visible
from ..runs.comparison import charts, label_axes
from ..runs.values import SUMMARIZED, Figures, value_text
from .hydra_app import command_line, composed, read_override
from .runs import chosen, print_table, whole_number

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
        found = Figures(record_of(RunFolder(folder / trial.run))).of(self.metric)
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


OWN = "sweep."  # how the sweep's own words begin
_KEYS = ("metric", "direction", "trials", "minutes", "seed", "name")
_MOST_FAILED = 3  # trials that may fail one after the other


def sweep_command(arguments: Sequence[str]) -> int:
    """Run trials until the budget is spent, and say what came out; `arguments` follow `run`."""
    try:
        import optuna  # noqa: F401  # pyright: ignore[reportUnusedImport] - whether it is there
    except ImportError as error:
        raise ConfigError(
            f"a sweep needs a package that is not installed ({error})\n"
            "    pip install 'penstock-rl[optuna]'"
        ) from error
    sweep, options, home = _read(arguments)
    most = whole_number("sweep.trials", options.get("trials", "20"))
    text = options.get("minutes", "inf")
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not minutes > 0:
        raise ConfigError(f"'sweep.minutes': expected a number above 0, got '{text:.40}'")
    if not most:
        raise ConfigError("'sweep.trials': expected a whole number of at least 1, got '0'")
    _check_metric(sweep)
    name = options.get("name", sweep.name)
    if Path(name).name != name or name in ("", ".."):
        raise ConfigError(f"'sweep.name': expected a name without folders, got '{name:.80}'")
    folder = home / "sweeps" / name
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked():
        try:
            sweep.load(folder)
            say(f"the sweep is in {folder}, {len(sweep.trials)} trials begun")
            while trial := _next_trial(sweep, most, minutes):
                sweep.save(folder)
                _try(sweep, trial, folder)
                sweep.save(folder)
        except BaseException as error:
            if sweep.trials:
                done = sum(trial.ended for trial in sweep.trials)
                error.add_note(
                    f"the sweep is in {folder}, with {done} of {most} trials done; the same "
                    "command goes on with it"
                )
            raise
    _report(sweep, folder)
    return 0


def _read(arguments: Sequence[str]) -> tuple[Sweep, dict[str, str], Path]:
    line = command_line("run", arguments)
    if not line.is_sweep:
        word = next(word for word in arguments if word.startswith(OWN))
        raise ConfigError(f"'{word:.80}' belongs to a sweep\n    add --multirun")
    options: dict[str, str] = {}
    keys: list[Key] = []
    fixed: list[str] = []
    home = Path("runs")
    for word in (*line.keys, *(one for one in line.options if one not in ("-m", "--multirun"))):
        name, equals, value = word.partition("=")
        if not equals or word.startswith("-") or name == "resume":
            raise ConfigError(f"penstock run --multirun: expected KEY=VALUE, got '{word:.80}'")
        if name.startswith(OWN):
            key_name = name.removeprefix(OWN)
            if key_name not in _KEYS:
                raise ConfigError(
                    f"penstock run --multirun: there is no key '{name:.80}'"
                    f"{nearest(key_name, _KEYS)}\n"
                    f"    keys are: {', '.join(OWN + one for one in _KEYS)}"
                )
            options[key_name] = value
        elif name == "runs":
            home = Path(value)
        elif (key := _varied(word)) is not None:
            if any(other.name == key.name for other in keys):
                raise ConfigError(f"'{key.name}' is varied twice\n    leave one of them out")
            keys.append(key)
        else:
            fixed.append(word)
    if not keys:
        raise ConfigError(
            "a sweep varies nothing\n    give a key several values, such as max_lag=0,1,2 or "
            "'algorithm.optimizer.lr=tag(log,interval(1e-5,1e-2))'"
        )
    sweep = Sweep(
        metric=options.get("metric", "accuracy_after_rl"),
        direction=chosen("sweep.direction", options.get("direction", DIRECTIONS[0]), DIRECTIONS),
        seed=whole_number("sweep.seed", options.get("seed", "0")),
        fixed=tuple(fixed),
        keys=tuple(keys),
    )
    return sweep, options, home


def _check_metric(sweep: Sweep) -> None:
    metric = sweep.metric
    node, slash, _ = metric.partition("/")
    if not slash:
        if metric.partition(".")[0] not in SUMMARIZED:
            raise ConfigError(
                f"'sweep.metric': a run's summary has no number '{metric:.80}'"
                f"{nearest(metric, SUMMARIZED)}\n    take one of {', '.join(SUMMARIZED)}; or a "
                "metric of the steps, such as actor.train/loss"
            )
        return
    # Imported here: torch and all that follows it take seconds.
    from ..inputs.record import recorded
    from ..inputs.run import run_config

    first = [f"{key.name}={_typed((key.values() or [key.low])[0])}" for key in sweep.keys]
    made = composed("run", [*sweep.fixed, *first])
    del made["resume"]
    config = run_config(made)
    graph = recorded(config.algorithm, config.seed)[-1].graph
    known = ("run", "evaluation", *(one.name for one in graph.nodes))
    if node not in known:
        raise ConfigError(
            f"'sweep.metric': '{metric:.80}' begins with no node of {graph.name}"
            f"{nearest(node, known)}\n    metrics of the steps begin with: {', '.join(known)}"
        )


def _varied(word: str) -> Key | None:
    override = read_override(word)
    name, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        low, high = value.start or 0.0, value.end or 0.0
        log = "log" in value.tags
        if not low < high or not math.isfinite(high - low) or (log and low <= 0):
            above = ", the first of them above 0" if log else ""
            raise ConfigError(f"'{word:.80}': expected two ascending numbers{above}")
        return Key(name, low=low, high=high, log=log)
    if isinstance(value, RangeSweep):
        found = [float(text) for text in override.sweep_string_iterator()]
        if len(found) < 2 or found[0] > found[1]:
            raise ConfigError(f"'{name}': expected a range of at least two ascending numbers")
        whole = all(number.is_integer() for number in found)
        return Key(name, low=found[0], high=found[-1], step=found[1] - found[0], whole=whole)
    if not override.is_sweep_override():
        return None
    return Key(name, choices=tuple(override.sweep_string_iterator()))


def _next_trial(sweep: Sweep, most: int, minutes: float) -> Trial | None:
    left = next((trial for trial in sweep.trials if not trial.ended), None)
    if left is not None:
        return left
    took_s = sum(trial.took_s for trial in sweep.trials)
    if len(sweep.trials) >= most or took_s >= minutes * 60:
        return None
    values = next_values(sweep)
    if values is None:
        say("every value has been tried")
        return None
    sweep.trials.append(Trial(values))
    return sweep.trials[-1]


def _try(sweep: Sweep, trial: Trial, folder: Path) -> None:
    from .carry_out import run_composed  # here: torch and all that follows it take seconds

    words = [f"{key}={_typed(value)}" for key, value in trial.values.items()]
    number = sweep.trials.index(trial) + 1
    say(f"trial {number}: {' '.join(words)}")
    began_s = time.monotonic()
    try:
        if trial.run:
            made = composed("run", []) | {"resume": str(folder / trial.run)}
        else:
            made = composed("run", [*sweep.fixed, *words]) | {"runs": str(folder)}
        with no_exit(ConfigError):
            trial.run = run_composed(made, ()).path.name
    except PenstockError as error:
        if number == 1 and isinstance(error, NOT_STARTED):
            sweep.trials.remove(trial)
            raise
        trial.failed = str(error) or type(error).__name__
        sweep.find_run(trial, folder)
        last = sweep.trials[number - _MOST_FAILED : number]
        if number >= _MOST_FAILED and all(one.failed for one in last):
            raise
        say(f"warning: trial {number} failed, and the sweep goes on: {error}")
    else:
        sweep.note(trial, folder)
        say(f"trial {number}: {sweep.metric} {value_text(trial.objective)}")
    finally:
        trial.took_s += time.monotonic() - began_s
        sweep.save(folder)


def _typed(value: str | int | float) -> str:
    return value if isinstance(value, str) else repr(value)


def _report(sweep: Sweep, folder: Path) -> None:
    names = [key.name for key in sweep.keys]
    rows = [[sweep.metric, *names, "run"]]
    for trial in sweep.ranked():
        cells = [value_text(trial.values[name]) for name in names]
        rows.append([value_text(trial.objective), *cells, trial.run or "-"])
    print_table(rows)
    for trial in sweep.trials:
        if trial.failed:
            print(visible(f"{trial.run or 'a trial'}: {trial.failed.splitlines()[0]}"))
    lines = ["\t".join(row) for row in rows]
    write_text(folder / "trials.tsv", "".join(f"{line}\n" for line in lines))
    drawn = replace(sweep, trials=[one for one in sweep.trials if one.objective is not None])
    print(visible(f"table: {folder / 'trials.tsv'}"))
    if drawn.trials:
        draw_sweep(folder / "trials.svg", drawn)
        print(visible(f"picture: {folder / 'trials.svg'}"))


def draw_sweep(path: Path, sweep: Sweep) -> None:
    found = np.asarray([trial.objective for trial in sweep.trials], dtype=np.float64)
    best = (np.maximum if sweep.direction == "maximize" else np.minimum).accumulate(found)
    numbers = np.arange(1, len(found) + 1)
    with charts(path, 1 + len(sweep.keys)) as (first, *others):
        first.step(numbers, best, where="post", linewidth=1.5)
        first.xaxis.get_major_locator().set_params(integer=True)
        first.scatter(numbers, found, s=18, zorder=3)
        label_axes(first, "trial", sweep.metric)
        for place, key in zip(others, sweep.keys, strict=True):
            place.scatter([trial.values[key.name] for trial in sweep.trials], found, s=18, zorder=3)
            label_axes(place, key.name, sweep.metric)
            if key.log:
                place.set_xscale("log")
