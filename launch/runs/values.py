"""Which runs are meant: by a name, by values that they have, and in which sets.

A value is named as it stands in a run's files: a key of the configuration by its path, such as
`algorithm.step` or `max_lag`, and what came out as in `summary.json`, such as `accuracy_after_rl`
or `suites.change`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from ...dataflow.errors import ConfigError, nearest
from ..run_dir.run_folder import RunFolder, RunRecord, flat, list_runs, open_run, record_of
from ..run_dir.run_state import state_of
from ..run_dir.stop import say

RunValues = tuple[RunRecord, dict[str, Any]]
"""A run with everything that its files say of it."""


def flat_values(record: RunRecord, *, own: bool = True) -> dict[str, Any]:
    """Everything that a run's files say of it, `section.key` -> number, text, list or None.

    What came out does not hide a key of the configuration with the same name, as `seed` would not.

    Args:
        record: Of the run.
        own: Whether its name, state, code and configuration are among them, or only what came out.
    """
    if not own:
        return flat(record.summary or {})
    about = {
        "name": record.name,
        "seed": record.seed,
        "created": record.created.isoformat(),
        "state": state_of(record),
        "code": str(record.code),
        "data": record.data,
    }
    return {**flat(record.summary or {}), **flat(record.config or {}), **about}


def selected(
    records: Sequence[RunRecord],
    where: Mapping[str, str],
    sort: str = "",
    known: Sequence[str] = (),
) -> list[RunValues]:
    """The runs in which keys have values, with all that is known of each.

    Args:
        records: Runs, in any order.
        where: Key -> its value, as a person writes it.
        sort: By this key, the highest or the latest first, runs without it last; "" keeps
            the order.
        known: Further keys that some run must have.

    Raises:
        ConfigError: If no run has one of the keys.
    """
    found = [(record, flat_values(record)) for record in records]
    there = {key for _, values in found for key in values}
    for key in (*where, *([sort] if sort else ()), *known):
        if found and key not in there:
            raise ConfigError(f"penstock runs: no run here has a key '{key}'{nearest(key, there)}")
    found = [one for one in found if all(_has(*one, key, text) for key, text in where.items())]
    if not sort:
        return found
    having = [one for one in found if one[1].get(sort) is not None]
    rest = [one for one in found if one[1].get(sort) is None]
    return sorted(having, key=lambda one: _order(one[1][sort]), reverse=True) + rest


def folder_of(word: str, home: Path) -> RunFolder:
    """The folder of the run that a word names: that itself, or its name in the folder of runs.

    Raises:
        ConfigError: If there is none.
    """
    path = Path(word)
    if not path.exists() and (home / word).exists():
        path = home / word
    return open_run(path)


def run_of(word: str, home: Path) -> RunRecord:
    """The run that a word names; see `folder_of`.

    Raises:
        ConfigError: If there is none, or its files cannot be read.
    """
    record = record_of(folder_of(word, home))
    if record.fault:
        raise ConfigError(f"run '{record.folder.id}': {record.fault}")
    return record


def named_runs(word: str, home: Path) -> list[RunRecord]:
    """The runs that a word names: one, several with commas between them, or a pattern with `*`.

    A pattern leaves out damaged runs, which is said.

    Raises:
        ConfigError: If there is none, or the files of one that is named cannot be read.
    """
    found: list[RunRecord] = []
    for one in word.split(","):
        if "*" not in one:
            found.append(run_of(one, home))
            continue
        folder, pattern = (Path(one).parent, Path(one).name) if "/" in one else (home, one)
        matching = [
            record for record in list_runs(folder) if fnmatchcase(record.folder.id, pattern)
        ]
        if not matching:
            raise ConfigError(f"no run in '{folder}' is called '{pattern}'")
        found += _whole(matching)
    return found


def _whole(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records whose files can be read, and say which ones are left out."""
    for record in records:
        if record.fault:
            say(f"run '{record.folder.id}' is left out: {record.fault}")
    return [record for record in records if not record.fault]


def sets_by(
    words: Sequence[str], where: Mapping[str, str], by: str, home: Path
) -> dict[str, list[RunValues]]:
    """Runs in sets, each with its label, the oldest run first.

    Args:
        words: Names of runs; see `named_runs`. None stands for all in the folder of runs.
        where: Key -> its value; only runs that have it.
        by: Runs with the same value of this key make a set; "" makes one of each word, or one of
            all where no word is given.
        home: The folder of runs.

    Raises:
        ConfigError: If there is no run, or none has a key.
    """
    named = {word: named_runs(word, home) for word in words} or {"": _whole(list_runs(home))}
    sets: dict[str, list[RunValues]] = {}
    if by:
        once = {r.folder.path.resolve(): r for records in named.values() for r in records}
        for record, values in selected([*once.values()], where, known=(by,)):
            sets.setdefault(f"{by}={value_text(values.get(by))}", []).append((record, values))
    else:
        sets = {word or "all runs": selected(found, where) for word, found in named.items()}
    sets = {label: found for label, found in sets.items() if found}
    if not sets:
        raise ConfigError(
            f"there is no such run in '{home}'\n    penstock runs list says which there are"
        )
    return sets


def _has(record: RunRecord, values: Mapping[str, Any], key: str, text: str) -> bool:
    """Return whether a key has a value; a run's name is also that of its folder."""
    return _is(values.get(key), text) or (key == "name" and text == record.folder.id)


def _is(value: Any, text: str) -> bool:
    """Whether a person means the value by a text: 1e-5 is 0.00001, and true is True."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return value_text(value) == text


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size and above all others, which go by their text."""
    if isinstance(value, bool | int | float):
        return (1, float(value), "")
    return (0, 0.0, value_text(value))


def value_text(value: Any) -> str:
    """A value as a person writes it on the command line; numbers to six digits."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return format(value, ".6g")
    if isinstance(value, list) and all(isinstance(one, str) for one in cast(list[Any], value)):
        return ", ".join(cast(list[str], value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
