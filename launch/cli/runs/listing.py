"""`penstock runs list`, `show` and `diff`: which runs there are, what one is, how two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ....dataflow.errors import ConfigError, nearest
from ...run_dir.environment import required
from ...run_dir.events import stage_events
from ...run_dir.run_folder import RunRecord, differences, list_runs
from ...run_dir.stop import visible
from ...runs.series import History, sparkline
from ...runs.values import RunValues, flat_values, run_of, selected, value_text
from ..words import split_words, whole_number
from .table import print_table

_SHOWN = ("state", "num_steps", "accuracy_after_rl", "wall_time_s")
"""What a listing says of a run by default, where any of the runs has it."""

_LEFT_OUT = ("examples_", "changes", "nodes.")
"""Beginnings of what `show` leaves to summary.json."""


def list_command(arguments: Sequence[str]) -> int:
    """A line per run."""
    words = split_words("runs list", arguments, ("sort", "show", "limit", "runs"), where=True)
    if words.names:
        raise ConfigError(f"penstock runs list: expected KEY=VALUE, got '{words.names[0]:.80}'")
    limit = whole_number("limit", words.option("limit", "0"))
    found = selected(list_runs(words.home), words.where, words.option("sort"))
    shown = words.options.get("show")
    wanted = _SHOWN if shown is None else tuple(shown.split(","))
    if shown is not None:
        _check_shown(wanted, found)
    having = [key for key in wanted if any(values.get(key) is not None for _, values in found)]
    rows = [["run", *having]]
    for record, values in found[: limit or None]:
        rows.append([record.folder.id, *(value_text(values.get(key)) for key in having)])
    print_table(rows)
    for record, _ in found:
        if record.fault:
            print(visible(f"{record.folder.id}: {record.fault}"))
    return 0


def _check_shown(wanted: Sequence[str], found: Sequence[RunValues]) -> None:
    known = {key for _, values in found for key in values}
    for key in wanted:
        if found and key not in known:
            raise ConfigError(f"'show': no run here has a key '{key}'{nearest(key, known)}")


def show_run(arguments: Sequence[str]) -> int:
    """What one run is, what came out of it, and how each of its metrics went."""
    words = split_words("runs show", arguments, ("runs",))
    if len(words.names) != 1:
        raise ConfigError(f"penstock runs show: expected one run, got {len(words.names)}")
    record = run_of(words.names[0], words.home)
    print(visible(str(record.folder.path)))
    _section("the run", _about(record))
    came_out = {
        key: value
        for key, value in flat_values(record, own=False).items()
        if not key.startswith(_LEFT_OUT) and value is not None
    }
    _section("what came out", came_out)
    _print_warnings(record)
    rows = [["metric", "first", "last", ""]]
    history = History(record.folder.path)
    for name in history.metrics:
        ys = history.series(name).ys
        if ys:
            rows.append([f"  {name}", value_text(ys[0]), value_text(ys[-1]), sparkline(ys)])
    if len(rows) > 1:
        print()
        print_table(rows)
    return 0


def _print_warnings(record: RunRecord) -> None:
    """What it warned of, in the words of the run."""
    found = stage_events(record.folder.path)
    if found:
        print("\nwarnings")
    for event in found:
        stage = f"stage {event['stage']}, " if event["stage"] else ""
        said = {name: str(event.get(name, "")) for name in ("node", "seen", "means", "remedy")}
        first, last = event.get("first_step", event["step"]), event["step"]
        steps = f"steps {first} to {last}" if first != last else f"step {last}"
        print(visible(f"  {stage}{steps}, {said['node']}: {said['seen']}"))
        print(visible(f"      {said['means']}\n      remedy: {said['remedy']}"))


def _about(record: RunRecord) -> dict[str, Any]:
    values = flat_values(record)
    about = {key: values[key] for key in ("state", "created", "seed", "code", "data")}
    versions, hardware = record.environment.versions, record.environment.hardware
    about["not reproducible"] = record.not_reproducible or None
    about["packages"] = ", ".join(
        f"{name} {versions[name]}" for name in ("python", *required()) if name in versions
    )
    about["machine"] = ", ".join(f"{key} {value_text(value)}" for key, value in hardware.items())
    return {key: value for key, value in about.items() if value not in (None, "", [])}


def _section(title: str, values: Mapping[str, Any]) -> None:
    if values:
        print(f"\n{title}")
        rows = [[f"  {key}", value_text(value)] for key, value in values.items()]
        print_table(rows, whole=True)


def diff_runs(arguments: Sequence[str]) -> int:
    """What two runs differ in, with both values."""
    words = split_words("runs diff", arguments, ("runs",))
    if len(words.names) != 2:
        raise ConfigError(f"penstock runs diff: expected two runs, got {len(words.names)}")
    one, other = (run_of(word, words.home) for word in words.names)
    parts = (
        ("code", {"code": str(one.code)}, {"code": str(other.code)}),
        ("data", {"data": one.data}, {"data": other.data}),
        ("files and models", asdict(one.origins), asdict(other.origins)),
        ("packages", one.environment.versions, other.environment.versions),
        ("machine", one.environment.hardware, other.environment.hardware),
        ("configuration", one.config or {}, other.config or {}),
        ("what came out", one.summary or {}, other.summary or {}),
    )
    print(visible(f"{one.folder.id} and {other.folder.id}"))
    for title, before, after in parts:
        found = differences(before, after)
        if found:
            print(f"\n{title}")
            pairs = found.items()
            print_table([[f"  {key}", value_text(a), value_text(b)] for key, (a, b) in pairs])
    if all(before == after for _, before, after in parts):
        print(
            "are the same in code, data, models, packages, machine, configuration and what came out"
        )
    return 0
