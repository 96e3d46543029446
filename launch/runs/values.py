"""The values of runs: of their files and of their steps, and which runs a word means.

A value is named as it stands in a run's files: a key of the configuration by its path, such as
`algorithm.step` or `max_lag`, what came out as in `summary.json`, such as `accuracy_after_rl` or
`suites.change`, and else a metric of the steps, such as `actor.train/loss`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ...dataflow.errors import ConfigError, nearest
from ..run_dir.files import flat
from ..run_dir.run_folder import RunFolder, RunRecord, list_runs, open_run, record_of, state_of
from ..run_dir.step_logs import METRICS, read_metrics
from ..run_dir.stop import say


def about_values(record: RunRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "seed": record.seed,
        "created": record.created.isoformat(),
        "state": state_of(record),
        "code": str(record.code),
        "data": record.data,
    }


def selected(
    records: Sequence[RunRecord],
    where: Mapping[str, str],
    sort: str = "",
    known: Sequence[str] = (),
) -> list[Figures]:
    """Return the runs that have all of the values in `where`, the highest or latest `sort` first.

    Some run must have each of the keys, and of those in `known`.
    """
    found = [Figures(record) for record in records]
    there = {key for one in found for key in one.values}
    for key in (*where, *([sort] if sort else ()), *known):
        if found and key not in there:
            raise ConfigError(
                f"penstock runs: no run here has a key '{key}'{nearest(key, there)}\n"
                "    penstock runs --help says which options and keys there are"
            )

    def has(one: Figures, key: str, text: str) -> bool:
        return _is(one.values.get(key), text) or (key == "name" and text == one.record.folder.id)

    def order(one: Figures) -> tuple[int, float, str]:
        value = one.values.get(sort)
        if value is None:
            return (0, 0.0, "")
        is_number = isinstance(value, bool | int | float)
        return (2, float(value), "") if is_number else (1, 0.0, value_text(value))

    found = [one for one in found if all(has(one, key, text) for key, text in where.items())]
    return sorted(found, key=order, reverse=True) if sort else found


def folder_of(word: str, home: Path) -> RunFolder:
    """Return the run's folder that a word names, by its path or its name in the folder of runs."""
    path = Path(word)
    if not path.exists() and (home / word).exists():
        path = home / word
    return open_run(path)


def run_of(word: str, home: Path) -> RunRecord:
    record = record_of(folder_of(word, home))
    if record.fault:
        raise ConfigError(f"run '{record.folder.id}': {record.fault}")
    return record


def named_runs(word: str, home: Path) -> list[RunRecord]:
    """Return the runs that a word names: one, several with commas between, or a pattern."""
    found: list[RunRecord] = []
    for one in word.split(","):
        if "*" not in one:
            found.append(run_of(one, home))
            continue
        folder, pattern = (Path(one).parent, Path(one).name) if "/" in one else (home, one)
        matching = [run for run in list_runs(folder) if fnmatchcase(run.folder.id, pattern)]
        if not matching:
            raise ConfigError(f"no run in '{folder}' is called '{pattern}'")
        found += _whole(matching)
    return found


def _whole(records: Sequence[RunRecord]) -> list[RunRecord]:
    for record in records:
        if record.fault:
            say(f"run '{record.folder.id}' is left out: {record.fault}")
    return [record for record in records if not record.fault]


def sets_by(
    words: Sequence[str], where: Mapping[str, str], by: str, home: Path
) -> dict[str, list[Figures]]:
    """Runs in sets, each with its label, the oldest run first; see `seed_groups` without words."""
    named = {word: named_runs(word, home) for word in words} or {"": _whole(list_runs(home))}
    sets: dict[str, list[Figures]] = {}
    if not by and not words:
        labels = seed_groups(named[""])
        for one in selected(named[""], where):
            sets.setdefault(labels[one.record.folder.path], []).append(one)
    elif by:
        once = {r.folder.path.resolve(): r for records in named.values() for r in records}
        for one in selected([*once.values()], where, known=(by,)):
            sets.setdefault(f"{by}={value_text(one.values.get(by))}", []).append(one)
    else:
        sets = {word: selected(found, where) for word, found in named.items()}
    sets = {label: found for label, found in sets.items() if found}
    if not sets:
        raise ConfigError(
            f"there is no such run in '{home}'\n    penstock runs list says which there are"
        )
    return sets


_MOST_KEYS = 3  # that a label names


def seed_groups(records: Sequence[RunRecord]) -> dict[Path, str]:
    """Return what the group of each run is called, by the run's folder.

    Runs of a group have the same name, code, own files and configuration, but for their seeds. It
    has their name, and where other groups have it too, the values of the keys that differ.
    """

    def is_compared(key: str) -> bool:
        return not key.endswith("seed") and key not in ("runs", "progress")

    named: dict[str, dict[str, tuple[dict[str, Any], list[RunRecord]]]] = {}
    for record in records:
        config = {k: v for k, v in flat(record.config or {}).items() if is_compared(k)}
        same = json.dumps([str(record.code), dict(record.origins.files), config])
        alike = str(record.folder.path) if record.config is None else same
        named.setdefault(record.name, {}).setdefault(alike, (config, []))[1].append(record)
    labels: dict[Path, str] = {}
    for name, groups in named.items():
        configs = [config for config, _ in groups.values()]
        every = dict.fromkeys(key for config in configs for key in config)
        keys = [k for k in every if any(one.get(k) != configs[0].get(k) for one in configs)]
        said = [
            " ".join((name, *(f"{k.rpartition('.')[2]}={value_text(one.get(k))}" for k in keys)))
            for one in configs
        ]
        for label, (_, runs) in zip(said, groups.values(), strict=True):
            if len(keys) > _MOST_KEYS or said.count(label) > 1:
                label = runs[0].folder.id
            labels |= {run.folder.path: label for run in runs}
    return labels


def _is(value: Any, text: str) -> bool:
    """Compare a value with a person's text: 1e-5 is 0.00001, and true is True."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return value_text(value) == text


def value_text(value: Any) -> str:
    """Return a value as a person writes it on the command line; numbers to six digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return format(value, ".6g")
    if isinstance(value, list) and all(isinstance(one, str) for one in cast(list[Any], value)):
        return ", ".join(cast(list[str], value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Over = Literal["steps", "samples", "tokens", "seconds"]
OVER: tuple[Over, ...] = get_args(Over)

_STEP, _STEP_TIME, _RATE = "step", "run/step_time_s", "run/samples_per_s"
# Ends of the metrics that count tokens: those that were generated, else those trained on.
_TOKENS = ("/new_tokens", "/tokens")


@dataclass(frozen=True)
class Series:
    """The points of a metric."""

    xs: tuple[float, ...]  # steps, samples, tokens or seconds that were over, rising
    ys: tuple[float, ...]  # finite

    @property
    def end(self) -> float:
        """The mean over the last tenth of its points, at least one."""
        last = self.ys[-max(1, len(self.ys) // 10) :]
        return math.fsum(last) / len(last)


class History:
    """Every step of a run, or of a stage's folder below it, as `metrics.jsonl` has it."""

    def __init__(self, folder: Path) -> None:
        self._name = folder.name
        self._lines = read_metrics(folder / METRICS)
        names = dict.fromkeys(name for line in self._lines for name in line)
        self.metrics = [name for name in names if name not in (_STEP, "wall_time_s")]

    def series(self, metric: str, over: Over = "steps") -> Series:
        """Return a metric where it was measured and finite.

        Samples and seconds are the steps' own: a pause between two processes counts for nothing.
        """
        if metric not in self.metrics:
            raise ConfigError(
                f"run '{self._name}' has no metric '{metric}'{nearest(str(metric), self.metrics)}\n"
                f"    penstock runs show {self._name} lists those that it has"
            )
        points = [
            (x, float(line[metric]))
            for x, line in zip(self._ends(over), self._lines, strict=True)
            if line.get(metric) is not None
        ]
        return Series(tuple(x for x, _ in points), tuple(y for _, y in points))

    def _ends(self, over: Over) -> list[float]:
        lines = self._lines
        if over == "steps":
            return [float(line[_STEP]) + 1 for line in lines]
        if over == "seconds":
            amounts = [line.get(_STEP_TIME) for line in lines]
        elif over == "samples":
            amounts = [(line.get(_STEP_TIME) or 0.0) * (line.get(_RATE) or 0.0) for line in lines]
        else:
            by_end = ([name for name in self.metrics if name.endswith(end)] for end in _TOKENS)
            names = next(filter(None, by_end), [])
            amounts = [sum(line.get(name) or 0.0 for name in names) for line in lines if names]
        if not any(amounts):
            raise ConfigError(f"run '{self._name}' has not counted its {over}\n    use over=steps")
        total, ends = 0.0, list[float]()
        for amount in amounts:
            total += amount or 0.0
            ends.append(total)
        return ends


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(ys: Sequence[float], width: int = 32) -> str:
    """Return values as characters of eight heights; neighbors are averaged to fit the width."""
    num = min(width, len(ys))
    edges = [round(at * len(ys) / num) for at in range(num + 1)] if num else []
    means = [
        math.fsum(ys[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)
    ]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if low == high:
        return _LEVELS[0] * num
    most = len(_LEVELS) - 1
    return "".join(_LEVELS[round((y - low) / (high - low) * most)] for y in means)


# Numbers of a run's summary, and sections of such numbers, by which runs can be judged.
SUMMARIZED = (
    *("accuracy_after_rl", "accuracy_before_rl", "reward_after_rl", "reward_before_rl"),
    *("num_held_out", "suites"),
    *("episode_return_after", "episode_return_before", "num_episodes"),
    *("samples_per_s", "env_steps_per_s", "step_time_s", "wall_time_s", "main_stage_wall_time_s"),
    *("peak_memory_bytes", "cpu_utilization", "nodes", "stage_times_s", "warnings", "num_steps"),
    *("verifier_errors", "verifier_timeouts", "env_restarts"),
)


class Figures:
    """A run and the values of its files, by `section.key`; its steps are read once, if at all."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        # The summary comes first: it must not hide a key of the configuration with the same name.
        summary, config = flat(record.summary or {}), flat(record.config or {})
        self.values: dict[str, Any] = {**summary, **config, **about_values(record)}

    @cached_property
    def _history(self) -> History:
        return History(self.record.folder.path)

    def of(self, key: str) -> float | str:
        """Return a value of its files, or a metric's mean over the last tenth of its points."""
        value: Any = self.values.get(key)
        run = self.record.folder.id
        if value is None:
            if key not in (metrics := self._history.metrics):
                numbers = [k for k, v in self.values.items() if isinstance(v, int | float)]
                raise ConfigError(
                    f"run '{run}' has no key and no metric '{key}'"
                    f"{nearest(key, [*numbers, *metrics])}"
                )
            value = self._history.series(key).end
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ConfigError(
                f"'{key}' of run '{run}': expected a number or a text, got {value!r:.60}"
            )
        return value

    def number(self, key: str) -> float:
        value = self.of(key)
        if isinstance(value, str):
            run = self.record.folder.id
            raise ConfigError(f"'{key}' of run '{run}': expected a number, got {value!r:.60}")
        return float(value)
