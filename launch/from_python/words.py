"""What Python says of a run, as the words of a command line: values quoted, objects by name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ..cli.overrides import literal

_OPTIONS = ("--config-dir", "-cd")
"""Those of the command line that mean something here."""


_PLAIN = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_]\w*", re.ASCII | re.IGNORECASE)
"""A name that is read as a text without quotes."""


def as_words(command: str, words: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """The words of a command line that say the same.

    Args:
        command: The command's name, for messages: "run".
        words: As on the command line: "algorithm=ppo", or "--config-dir=FOLDER".
        keys: Key -> value. A mapping gives the keys below: `algorithm={"num_steps": 20}` is
            `algorithm.num_steps=20`. A function or a class is named by its module and its name.

    Returns:
        The words, and after them the keys.

    Raises:
        ConfigError: If a word is an option of the terminal's, or a value cannot be written.

    Example:
        >>> as_words("run", ["algorithm=grpo"], {"seed": 1, "algorithm": {"cfg": {"epochs": 2}}})
        ['algorithm=grpo', 'seed=1', 'algorithm.cfg.epochs=2']
    """
    for word in words:
        if not isinstance(word, str):  # pyright: ignore[reportUnnecessaryIsInstance] - user code
            raise ConfigError(
                f"penstock.{command}: expected words such as 'algorithm=ppo', got {word!r:.80}\n"
                "    give other values by their keys: seed=1"
            )
        if word.startswith("-") and word.partition("=")[0] not in _OPTIONS:
            raise ConfigError(
                f"penstock.{command}: '{word}' is an option of the terminal's\n"
                f"    {_instead(command, word)}"
            )
    said = list(words)
    for key, value in keys.items():
        try:
            said += _said(key, value)
        except RecursionError:
            raise ConfigError(f"'{key}' is nested too deeply, or contains itself") from None
    return said


def _instead(command: str, word: str) -> str:
    if word in ("-m", "--multirun"):
        return f"call penstock.{command} once for each combination: for seed in range(3): ..."
    if word == "--dry-run":
        return f"use it in a terminal, with the words of the run: penstock {command} {word} WORDS"
    return f"use it in a terminal: penstock {command} {word}"


def _said(key: str, value: Any) -> Iterator[str]:
    """A key's word, or those of the keys below it."""
    if isinstance(value, Mapping) and value:
        for name, inner in cast("Mapping[Any, Any]", value).items():
            yield from _said(f"{key}.{name}", inner)
    else:
        yield f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    """A value as Hydra reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        try:
            return repr(value)
        except ValueError:  # Python writes no more than 4300 digits
            raise ConfigError(f"'{key}': a number has too many digits") from None
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, Mapping):
        inner = cast("Mapping[Any, Any]", value).items()
        return f"{{{','.join(f'{_inner_key(key, n)}:{_text(key, one)}' for n, one in inner)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_text(key, one) for one in cast('Sequence[Any]', value))}]"
    if callable(value):
        return literal(_name(key, value))
    if hasattr(value, "__fspath__"):
        return literal(value.__fspath__())
    raise ConfigError(
        f"'{key}': expected a number, a text, a list, a mapping, a function or a class, got a "
        f"{type(value).__name__}"
    )


def _inner_key(key: str, name: Any) -> str:
    """Return the key of a mapping inside a list, which Hydra reads without quotes."""
    if isinstance(name, str) and _PLAIN.fullmatch(name):
        return name
    raise ConfigError(
        f"'{key}': expected names of letters, digits and '_' in a mapping inside a list, got "
        f"{name!r:.80}"
    )


def _name(key: str, value: Any) -> str:
    """Return the name by which a configuration finds a function or a class."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and getattr(sys.modules.get(module), name, None) is value:
        return f"{module}:{name}"
    raise ConfigError(
        f"'{key}': {name or repr(value)} cannot be found by its name\n    define it at the top of "
        "a module or of the notebook, and give what stands there under its name"
    )
