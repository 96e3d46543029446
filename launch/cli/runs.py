"""`penstock runs list` and `diff`: which runs there are, and in what two of them differ.

Both read what `penstock run` wrote of each run, `run.json` and `summary.json`, and nothing else, so
a thousand runs are listed at once. A value is named as it stands there: a key of the configuration
by its path, such as `algorithm.step` or `max_lag`, and what came out as in `summary.json`, such as
`accuracy_after_rl` or `suites..change`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ...dataflow.errors import ConfigError, nearest
from ..run_dir.run_folder import RunRecord, differences, list_runs, open_run, record_of
from ..run_dir.stop import visible

__all__ = ["flat_values", "runs_command", "selected"]

_SHOWN = ("state", "num_steps", "accuracy_after_rl", "wall_time_s")
"""What a listing says of a run by default, where any of the runs has it."""

_HELP = """\
usage: penstock runs list [KEY=VALUE ...] [sort=KEY] [show=KEY,...] [limit=N] [runs=FOLDER]
       penstock runs diff RUN RUN

list  the runs of a folder (`runs` by default), oldest first, in which each KEY has that VALUE
      sort   by a key, the highest or the latest first
      show   other keys than {shown}
      limit  only so many; 0 (the default) for all
diff  the keys in which two runs differ: code, data, models, configuration and what came out

KEY is `name`, `seed`, `created`, `state`, `code` or `data`, a key of the configuration such as
`algorithm.step`, or one of summary.json. RUN is a run's folder, or its name in `runs`.
The same from Python: penstock.launch.run_dir.run_folder.list_runs(FOLDER).
"""

_LISTING = ("sort", "show", "limit", "runs")


def runs_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock runs`.

    Raises:
        ConfigError: If a word or its value is wrong, or a run is not there.
    """
    if {"-h", "--help"} & set(arguments):
        print(_HELP.format(shown=", ".join(_SHOWN)), end="")
        return 0
    action, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if action == "list":
        return _list(rest)
    if action == "diff":
        return _diff(rest)
    raise ConfigError(
        f"penstock runs: expected list or diff, got '{action:.40}'"
        f"{nearest(action, ('list', 'diff'))}\n"
        "    penstock runs --help says what each takes"
    )


def flat_values(record: RunRecord) -> dict[str, Any]:
    """Everything that a run's files say of it, `section.key` -> number, text, list or None.

    What came out does not hide a key of the configuration with the same name, as `seed` would not.
    """
    state = "damaged" if record.fault else "unfinished"
    if record.summary is not None:
        state = "stopped" if record.summary.get("stopped") else "finished"
    own = {
        "name": record.name,
        "seed": record.seed,
        "created": record.created.isoformat(),
        "state": state,
        "code": str(record.code),
        "data": record.data,
    }
    return {**_flat(record.summary or {}), **_flat(record.config or {}), **own}


def selected(
    records: Sequence[RunRecord], where: Mapping[str, str], sort: str = ""
) -> list[tuple[RunRecord, dict[str, Any]]]:
    """The runs in which keys have values, with all that is known of each.

    Args:
        records: Runs, in any order.
        where: Key -> its value, as a person writes it.
        sort: By this key, the highest or the latest first, runs without it last; "" keeps
            the order.

    Raises:
        ConfigError: If no run has one of the keys.
    """
    found = [(record, flat_values(record)) for record in records]
    known = {key for _, values in found for key in values}
    for key in (*where, *([sort] if sort else ())):
        if found and key not in known:
            raise ConfigError(f"penstock runs: no run here has a key '{key}'{nearest(key, known)}")
    found = [one for one in found if all(_is(one[1].get(key), text) for key, text in where.items())]
    if not sort:
        return found
    having = [one for one in found if one[1].get(sort) is not None]
    rest = [one for one in found if one[1].get(sort) is None]
    return sorted(having, key=lambda one: _order(one[1][sort]), reverse=True) + rest


def _list(arguments: list[str]) -> int:
    given: dict[str, str] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"penstock runs list: expected KEY=VALUE, got '{word:.80}'")
        given[key] = value
    listing = {key: given.pop(key) for key in _LISTING if key in given}
    home, limit = Path(listing.get("runs", "runs")), listing.get("limit", "0")
    if not (limit.isascii() and limit.isdecimal()):
        raise ConfigError(f"'limit': expected a whole number of at least 0, got '{limit:.40}'")
    if not home.is_dir():
        raise ConfigError(
            f"'{home}' is no folder of runs\n    give runs=FOLDER, which `penstock run` writes to"
        )
    found = selected(list_runs(home), given, listing.get("sort", ""))
    wanted = tuple(listing["show"].split(",")) if "show" in listing else _SHOWN
    _check_shown(wanted if "show" in listing else (), found)
    having = [key for key in wanted if any(values.get(key) is not None for _, values in found)]
    rows = [["run", *having]]
    for record, values in found[: int(limit) or None]:
        rows.append([record.folder.id, *(_text(values.get(key)) for key in having)])
    _print_table(rows)
    for record, _ in found:
        if record.fault:
            print(visible(f"{record.folder.id}: {record.fault}"))
    return 0


def _check_shown(
    wanted: Sequence[str], found: Sequence[tuple[RunRecord, Mapping[str, Any]]]
) -> None:
    known = {key for _, values in found for key in values}
    for key in wanted:
        if found and key not in known:
            raise ConfigError(f"'show': no run here has a key '{key}'{nearest(key, known)}")


def _diff(arguments: list[str]) -> int:
    if len(arguments) != 2:
        raise ConfigError(f"penstock runs diff: expected two runs, got {len(arguments)}")
    one, other = (_record(word) for word in arguments)
    parts = (
        ("code", {"code": str(one.code)}, {"code": str(other.code)}),
        ("data", {"data": one.data}, {"data": other.data}),
        ("files and models", asdict(one.origins), asdict(other.origins)),
        ("configuration", one.config or {}, other.config or {}),
        ("what came out", one.summary or {}, other.summary or {}),
    )
    print(visible(f"{one.folder.id} and {other.folder.id}"))
    for title, before, after in parts:
        found = differences(before, after)
        if found:
            print(f"\n{title}")
            pairs = found.items()
            _print_table([[f"  {key}", _text(two[0]), _text(two[1])] for key, two in pairs])
    if all(before == after for _, before, after in parts):
        print("are the same in code, data, models, configuration and what came out")
    return 0


def _record(word: str) -> RunRecord:
    """Of a run, by its folder or by its name in `runs`.

    Raises:
        ConfigError: If there is none, or its files cannot be read.
    """
    path = Path(word)
    if not path.exists() and (Path("runs") / word).exists():
        path = Path("runs") / word
    record = record_of(open_run(path))
    if record.fault:
        raise ConfigError(f"run '{record.folder.id}': {record.fault}")
    return record


def _flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(cast(Mapping[str, Any], value), f"{at}{key}.")
        else:
            found[f"{at}{key}"] = value
    return found


def _is(value: Any, text: str) -> bool:
    """Whether a person means the value by a text: 1e-5 is 0.00001, and true is True."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return _text(value) == text


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size and above all others, which go by their text."""
    if isinstance(value, bool | int | float):
        return (1, float(value), "")
    return (0, 0.0, _text(value))


def _text(value: Any) -> str:
    """A value as a person writes it on the command line; numbers to six digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return format(value, ".6g")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_MOST_CHARACTERS = 60
"""Of a value in a table: an example's response may be as long as a page."""


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    cells = [[_cell(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print(
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(text: str) -> str:
    shown = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[: _MOST_CHARACTERS - 3]}..."
