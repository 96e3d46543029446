"""The words of a `penstock runs` command: names of runs, options, and values that runs have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....dataflow.errors import ConfigError

__all__ = ["Words", "chosen", "split_words", "whole_number"]


@dataclass(frozen=True)
class Words:
    """What was typed after the action.

    Attributes:
        names: Words without `=`: names of runs, or files.
        options: The action's own keys.
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
    action: str, arguments: Sequence[str], options: Sequence[str], *, where: bool = False
) -> Words:
    """Sort the words of an action.

    Args:
        action: Its name, for messages.
        arguments: The words.
        options: Its own keys; `runs` is one of every action.
        where: Whether other keys say which runs are meant.

    Raises:
        ConfigError: If a word begins with a dash, or a key is none of the options.
    """
    names, given, others = list[str](), dict[str, str](), dict[str, str]()
    known = (*options, "runs")
    for word in arguments:
        key, equals, value = word.partition("=")
        if word.startswith("-") or (equals and not key):
            raise ConfigError(
                f"penstock runs {action}: expected RUN or KEY=VALUE, got '{word:.80}'"
            )
        if not equals:
            names.append(word)
        elif key in known:
            given[key] = value
        elif where:
            others[key] = value
        else:
            raise ConfigError(
                f"penstock runs {action} has no key '{key:.80}'\n    keys are: {', '.join(known)}"
            )
    return Words(tuple(names), given, others)


def whole_number(key: str, text: str) -> int:
    """The number.

    Raises:
        ConfigError: If the text is none.
    """
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"'{key}': expected a whole number of at least 0, got '{text:.40}'")
    return int(text)


def chosen(key: str, text: str, choices: Sequence[str]) -> str:
    """The text.

    Raises:
        ConfigError: If it is none of the choices.
    """
    if text not in choices:
        raise ConfigError(f"'{key}': expected one of {', '.join(choices)}, got '{text:.40}'")
    return text
