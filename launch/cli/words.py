"""The words of a command that composes nothing: names of runs, its own keys, values of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...dataflow.errors import ConfigError, nearest

_Choice = TypeVar("_Choice", bound=str)

_MOST_DIGITS = 18


@dataclass(frozen=True)
class Words:
    """What was typed after the command.

    Attributes:
        names: Words without `=`, or that are there as files: names of runs.
        options: The command's own keys.
        where: Every other key, of runs, with the value that it must have.
    """

    names: tuple[str, ...]
    options: Mapping[str, str]
    where: Mapping[str, str]

    @property
    def home(self) -> Path:
        """The folder of runs.

        Raises:
            ConfigError: If it is not there.
        """
        home = Path(self.options.get("runs", "runs"))
        if not home.is_dir():
            raise ConfigError(
                f"'{home}' is no folder of runs\n"
                "    give runs=FOLDER, which `penstock run` writes to"
            )
        return home

    def option(self, key: str, otherwise: str = "") -> str:
        """An option's value."""
        return self.options.get(key, otherwise)


def split_words(
    command: str, arguments: Sequence[str], options: Sequence[str], *, where: bool = False
) -> Words:
    """Sort the words of a command.

    Args:
        command: Its name, for messages: "runs list".
        arguments: The words.
        options: Its own keys.
        where: Whether other keys say which runs are meant.

    Raises:
        ConfigError: If a word begins with a dash, or a key is none of the options.
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
    return Words(tuple(names), given, others)


def whole_number(key: str, text: str) -> int:
    """The number.

    Raises:
        ConfigError: If the text is none.
    """
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"'{key}': expected a whole number of at least 0, got '{text:.40}'")
    if len(text) > _MOST_DIGITS:
        raise ConfigError(f"'{key}': expected at most {_MOST_DIGITS} digits, got {len(text)}")
    return int(text)


def chosen(key: str, text: str, choices: Sequence[_Choice]) -> _Choice:
    """The choice that a text names.

    Raises:
        ConfigError: If it is none of them.
    """
    for choice in choices:
        if choice == text:
            return choice
    raise ConfigError(f"'{key}': expected one of {', '.join(choices)}, got '{text:.40}'")
