"""Words of a command that composes nothing: names of runs, its own keys and values; tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...dataflow.errors import ConfigError, nearest
from ...planner.formatting import aligned
from ..run_dir.stop import visible

_Choice = TypeVar("_Choice", bound=str)

_MOST_DIGITS = 18
_MOST_CHARACTERS = 64  # of a cell: an example's response may be as long as a page


@dataclass(frozen=True)
class Words:
    """The sorted words after a command."""

    names: tuple[str, ...]  # words without `=`, or that are there as files: names of runs
    options: Mapping[str, str]  # the command's own keys
    where: Mapping[str, str]  # every other key, of runs, with the value that it must have

    @property
    def home(self) -> Path:
        """The folder of runs, which must exist."""
        home = Path(self.options.get("runs", "runs"))
        if not home.is_dir():
            raise ConfigError(
                f"'{home}' is no folder of runs\n"
                "    give runs=FOLDER, which `penstock run` writes to"
            )
        return home

    def option(self, key: str, otherwise: str = "") -> str:
        return self.options.get(key, otherwise)


def split_words(
    command: str,
    arguments: Sequence[str],
    options: Sequence[str],
    *,
    where: bool = False,
    num_names: tuple[int, str] | None = None,
) -> Words:
    """Sort the words of a command into names, its options and, if `where`, keys of runs.

    Args:
        command: Its name, for messages: "runs list".
        arguments: The words.
        options: The command's own keys.
        where: Whether other keys say which runs are meant.
        num_names: How many names it takes, and what is expected instead of other numbers.
    """
    names, given, others = list[str](), dict[str, str](), dict[str, str]()
    for word in arguments:
        key, equals, value = word.partition("=")
        if word.startswith("-") or (equals and not key):
            raise ConfigError(f"penstock {command}: expected KEY=VALUE or a name, got '{word:.80}'")
        if not equals or (key not in options and Path(word).exists()):
            names.append(word)
        elif key in options:
            given[key] = value
        elif where:
            others[key] = value
        else:
            raise ConfigError(
                f"penstock {command}: there is no key '{key:.80}'{nearest(key, options)}\n"
                f"    keys are: {', '.join(options)}"
            )
    if num_names is not None and len(names) != num_names[0]:
        got = len(names) if num_names[0] else f"'{names[0]:.80}'"
        raise ConfigError(f"penstock {command}: expected {num_names[1].format(got)}")
    return Words(tuple(names), given, others)


def whole_number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"'{key}': expected a whole number of at least 0, got '{text:.40}'")
    if len(text) > _MOST_DIGITS:
        raise ConfigError(f"'{key}': expected at most {_MOST_DIGITS} digits, got {len(text)}")
    return int(text)


def chosen(key: str, text: str, choices: Sequence[_Choice]) -> _Choice:
    for choice in choices:
        if choice == text:
            return choice
    raise ConfigError(f"'{key}': expected one of {', '.join(choices)}, got '{text:.40}'")


def print_table(rows: Sequence[Sequence[str]], *, whole: bool = False) -> None:
    """Print rows of as many cells each; long ones are cut unless `whole`."""
    most = sys.maxsize if whole else _MOST_CHARACTERS
    shown = [
        [visible(text).replace("\n", "\\n").replace("\t", "\\t") for text in row] for row in rows
    ]
    for line in aligned(
        [[c if len(c) <= most else f"{c[: most - 3]}..." for c in r] for r in shown]
    ):
        print(line)
