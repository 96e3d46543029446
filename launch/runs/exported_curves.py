"""Curves that another program exported, as runs: a CSV file with a column for each metric.

Open RL Benchmark's command line and the web pages of W&B write such files. Rows are points of one
run or of several; a column names the run, one counts steps or moves in the environment, and each
further column of numbers is a metric. What is made has the curves of a run, and nothing else of it.
"""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

import yaml

from ...dataflow.errors import ConfigError
from ...dataflow.regular_files import opened
from ..run_dir.run_folder import CodeVersion, RunFolder, create_run
from ..run_dir.trackers.jsonl import MetricsLog

_STEPS = ("global_step", "_step", "step", "Step")
_TIMES = ("_timestamp", "wall_time_s")
_RUNS = ("run_id", "run", "name", "Name", "run_name")
_SEEDS = ("seed", "Seed")
_SPREADS = ("__MIN", "__MAX")
"""W&B's pages write the lowest and highest of a point beside it: `run - metric__MIN`."""

_MOST_STEP = 2**53


@dataclass
class _Curves:
    """Of one run: its points by step, and its seed."""

    points: dict[int, dict[str, float]]
    times_s: dict[int, float]
    seed: int = 0


def import_curves(path: Path, runs: Path) -> list[RunFolder]:
    """Make a run of each that a CSV file has points of.

    Args:
        path: The file, UTF-8, its first row the columns' names.
        runs: The folder of runs; made if it is not there.

    Raises:
        ConfigError: If there is no column of steps or none of numbers, or a step is no number.
    """
    found = _read(path)
    made: list[RunFolder] = []
    try:
        for name, curves in found.items():
            made.append(_made(runs, name, curves, path))
    except BaseException:
        for folder in made:
            shutil.rmtree(folder.path)
        raise
    return made


def _read(path: Path) -> dict[str, _Curves]:
    try:
        with TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
            rows = [*csv.reader(file, strict=True)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"'{path}' is no CSV file ({error})") from error
    names = rows[0] if rows else []
    step = next((name for name in _STEPS if name in names), None)
    if step is None:
        raise ConfigError(
            f"'{path}': expected a column of steps, called one of {', '.join(_STEPS)}\n"
            f"    its columns are: {', '.join(names):.300}"
        )
    found: dict[str, _Curves] = {}
    for number, cells in enumerate(rows[1:], 2):
        if len(cells) != len(names):
            raise ConfigError(f"{path}:{number}: expected {len(names)} cells, got {len(cells)}")
        row = dict(zip(names, cells, strict=True))
        _add(found, row, _step(path, number, row.pop(step)))
    found = {name: curves for name, curves in found.items() if curves.points}
    if not found:
        raise ConfigError(f"'{path}' has no column of numbers beside its steps")
    return found


def _step(path: Path, number: int, text: str) -> int:
    value = _number(text)
    if value is None or not 0 <= value <= _MOST_STEP or value != int(value):
        raise ConfigError(f"{path}:{number}: expected a step, a whole number, got '{text:.40}'")
    return int(value)


def _add(found: dict[str, _Curves], row: Mapping[str, str], step: int) -> None:
    """A row's points, each to its run: `run - metric` names both, in a table of many runs."""
    whose = next((row[name] for name in _RUNS if row.get(name)), "")
    seed = next((_number(row[name]) for name in _SEEDS if row.get(name)), None)
    time_s = next((_number(row[name]) for name in _TIMES if row.get(name)), None)
    for column, text in row.items():
        value = _number(text)
        if value is None or column in (*_RUNS, *_SEEDS, *_TIMES) or column.endswith(_SPREADS):
            continue
        name, dash, metric = column.rpartition(" - ")
        curves = found.setdefault(whose or name, _Curves({}, {}))
        curves.seed = curves.seed if seed is None else int(seed)
        curves.points.setdefault(step, {})[metric if dash else column] = value
        if time_s is not None:
            curves.times_s[step] = time_s


def _number(text: str) -> float | None:
    """The number; None of anything else, and of NaN and the infinities."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _made(runs: Path, name: str, curves: _Curves, path: Path) -> RunFolder:
    folder = create_run(
        runs,
        name=name or path.stem,
        seed=curves.seed,
        config=yaml.safe_dump({"imported": {"file": path.name, "run": name or path.stem}}),
        data="",
        code=CodeVersion("another program"),
    )
    steps: Sequence[int] = sorted(curves.points)
    with MetricsLog(folder.metrics) as log:
        for step in steps:
            log.write(step, curves.points[step], curves.times_s.get(step))
    folder.write_summary({"num_steps": steps[-1]})
    return folder
