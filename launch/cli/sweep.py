"""`penstock run --multirun sweep.metric=...`: runs whose values Optuna chooses, within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, RangeSweep

from ...dataflow.errors import NOT_STARTED, ConfigError, PenstockError, nearest, no_exit
from ..run_dir.files import write_text
from ..run_dir.run_folder import RunFolder
from ..run_dir.stop import say, visible
from ..runs.drawing import draw_sweep
from ..runs.sweep import DIRECTIONS, Key, Sweep, Trial, next_values
from ..runs.values import SUMMARIZED, value_text
from .hydra_app import composed
from .overrides import command_line, read_override
from .words import chosen, print_table, whole_number

OWN = "sweep."  # how the sweep's own words begin

_MULTIRUN = ("-m", "--multirun")
_KEYS = ("metric", "direction", "trials", "minutes", "seed", "name")
_MOST_FAILED = 3  # trials that may fail one after the other

# runs a composed configuration, or goes on with the run of its key `resume`
CarryOut = Callable[[dict[str, Any]], RunFolder]


def sweep_command(arguments: Sequence[str], carry_out: CarryOut) -> int:
    """Run trials until the budget is spent, and say what came out; `arguments` follow `run`."""
    try:
        import optuna  # noqa: F401  # pyright: ignore[reportUnusedImport] - whether it is there
    except ImportError as error:
        raise ConfigError(
            f"a sweep needs a package that is not installed ({error})\n"
            "    pip install 'penstock-rl[optuna]'"
        ) from error
    sweep, options, home = _read(arguments)
    most, minutes = whole_number("sweep.trials", options.get("trials", "20")), _minutes(options)
    if not most:
        raise ConfigError("'sweep.trials': expected a whole number of at least 1, got '0'")
    _check_metric(sweep)
    name = options.get("name", sweep.name)
    if Path(name).name != name or name in ("", ".."):
        raise ConfigError(f"'sweep.name': expected a name without folders, got '{name:.80}'")
    folder = home / "sweeps" / name
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).locked(), _said_where(sweep, folder, most):
        sweep.load(folder)
        say(f"the sweep is in {folder}, {len(sweep.trials)} trials begun")
        while trial := _next_trial(sweep, most, minutes):
            sweep.save(folder)
            _try(sweep, trial, folder, carry_out)
            sweep.save(folder)
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
    for word in (*line.keys, *(word for word in line.options if word not in _MULTIRUN)):
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
    from ..inputs.compose import run_config
    from ..inputs.record import recorded

    first = [f"{key.name}={_typed(key.first)}" for key in sweep.keys]
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


def _minutes(options: dict[str, str]) -> float:
    text = options.get("minutes")
    if text is None:
        return math.inf
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not minutes > 0:
        raise ConfigError(f"'sweep.minutes': expected a number above 0, got '{text:.40}'")
    return minutes


@contextmanager
def _said_where(sweep: Sweep, folder: Path, most: int) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        if sweep.trials:
            done = sum(trial.ended for trial in sweep.trials)
            error.add_note(
                f"the sweep is in {folder}, with {done} of {most} trials done; the same command "
                "goes on with it"
            )
        raise


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


def _try(sweep: Sweep, trial: Trial, folder: Path, carry_out: CarryOut) -> None:
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
            trial.run = carry_out(made).path.name
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
