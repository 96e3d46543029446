"""Read the words of a command line into Hydra's overrides.

Every command and every sweep reads its words here, so that a key, an escape and a folder of one's
own configurations mean the same everywhere.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.errors import OverrideParseException

from ...configs.references import groups, options_of
from ...dataflow.errors import ConfigError
from ...workers.models.hub import is_hub_id

# most characters of a word: Hydra's grammar takes many seconds for a longer one
_MOST_CHARACTERS = 10_000
# most jobs of a sweep over every combination: all are composed before the first is run
_MOST_JOBS = 10_000

_FOLDER = "--config-dir"
_SEARCH_PATH = "hydra.searchpath="
_KEY = re.compile(r"^[A-Za-z_][\w.]*=")
# A part of a value: a text in quotes, or characters up to a separator
_VALUE_PART = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s'"()\[\]{}:=,]+""", re.DOTALL)
_ESCAPE = re.compile(r"(\\+)([ntr])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass(frozen=True)
class CommandLine:
    """The words after a command, sorted into keys and options."""

    keys: tuple[str, ...]  # `key=value`, `+key=value` and `~key`, with escapes read
    options: tuple[str, ...]  # all others, such as `--multirun`
    config: str  # name of the primary configuration

    @property
    def words(self) -> list[str]:
        return [*overrides(self.keys), *self.options]

    @property
    def is_sweep(self) -> bool:
        return not {"-m", "--multirun"}.isdisjoint(self.options)


def command_line(command: str, arguments: Sequence[str]) -> CommandLine:
    """Sort the words after a command into keys and options.

    Folders of `--config-dir` become part of Hydra's search path, of which the first that has a file
    counts.
    """
    for word in arguments:
        if len(word) > _MOST_CHARACTERS:
            raise ConfigError(
                f"'{word[:40]}...' has {len(word)} characters; at most {_MOST_CHARACTERS} can be "
                "given on the command line\n    write long values in a YAML file: --config-dir"
            )
    if "--version" in arguments:
        return CommandLine((), tuple(arguments), command)
    parsed = _parser(command).parse_intermixed_args(arguments)
    if parsed.config_path is not None:
        raise ConfigError(
            "--config-path would replace penstock's own configurations\n"
            f"    add yours to them: {_FOLDER} {parsed.config_path}"
        )
    keys = [with_escapes(key) for key in cast("list[str]", parsed.overrides)]
    if parsed.config_dir:
        keys = _with_folders(keys, parsed.config_dir)
    places = _places(keys)
    keys = [_listed(key, places) for key in keys]
    options = list(arguments)
    for key in parsed.overrides:
        options.remove(key)
    return CommandLine(tuple(keys), tuple(_without_folders(options)), parsed.config_name or command)


def overrides(keys: Sequence[str]) -> list[str]:
    """Spell keys for Hydra: no `+` is needed, and `model=org/name` is an option and its key."""
    own = _own_options("model", _places(keys))
    return [_forced(word) for key in keys for word in _spelled_out(key, own)]


def with_escapes(word: str) -> str:
    r"""Replace `\n`, `\t` and `\r` in the value of `key=value` by the characters they name.

    Twice the backslash stands for itself in front of these letters (`\\n`); in front of all others
    it is left to Hydra, so that regular expressions stay as they are. A value without quotes gets
    them, since Hydra reads such characters nowhere else.
    """
    key, equals, value = word.partition("=")
    return f"{key}{equals}{_VALUE_PART.sub(_with_escapes, value)}"


def _with_escapes(part: re.Match[str]) -> str:
    text = part[0]
    read = _ESCAPE.sub(_character, text)
    if text[0] in "'\"" or read == text:
        return read
    return quoted(read)


def _character(escape: re.Match[str]) -> str:
    backslashes, letter = len(escape[1]), escape[2]
    return "\\" * (backslashes // 2) + (_ESCAPED[letter] if backslashes % 2 else letter)


def literal(text: str) -> str:
    """Quote a text so that `with_escapes` and Hydra read it back unchanged."""
    return quoted(_ESCAPE.sub(r"\1\1\2", text))


def quoted(text: str) -> str:
    """Quote a text for Hydra: a backslash in front of a quote, or at the end, is doubled."""
    inner = re.sub(r"(\\*)(')", r"\1\1\\\2", text)
    trailing = len(inner) - len(inner.rstrip("\\"))
    return f"'{inner}{chr(92) * trailing}'"


def read_override(word: str) -> Override:
    """Parse a key with its value or values by Hydra's grammar."""
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
        value = override.value()
        number = _length(value) if isinstance(value, RangeSweep) else 0
    except OverrideParseException as error:
        raise unreadable(error) from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"'{word.lstrip('+'):.80}' cannot be read: {error}") from error
    if not number <= _MOST_JOBS:
        raise ConfigError(
            f"'{word.lstrip('+'):.80}': expected a range of at most {_MOST_JOBS} values"
        )
    return override


def _length(values: RangeSweep) -> float:
    start, stop, step = (float(one or 0) for one in (values.start, values.stop, values.step))
    if not step:
        raise ValueError("the step of a range is 0")
    return (stop - start) / step


def unreadable(error: OverrideParseException) -> ConfigError:
    """Return a `ConfigError` for what Hydra's grammar refuses."""
    word = error.override.lstrip("+")
    return ConfigError(
        f"'{word}' cannot be read: {error.message.splitlines()[0]}\n"
        "    write key=value; quote values with blanks, commas or braces: 'key=\"a, b\"'"
    )


def jobs_of(line: CommandLine) -> list[list[str]]:
    """Return the overrides of every combination that a sweep asks for."""
    found = [read_override(word) for word in overrides(line.keys)]
    numbers = [len([*one.sweep_iterator()]) for one in found if one.is_discrete_sweep()]
    if not 0 < math.prod(numbers) <= _MOST_JOBS:
        raise ConfigError(
            f"--multirun: the values make {math.prod(numbers)} combinations; expected 1 to "
            f"{_MOST_JOBS}\n    give fewer values, or let Optuna choose among them: sweep.trials=20"
        )
    return [job for batch in BasicSweeper.split_arguments(found, None) for job in batch]


def _parser(command: str) -> Any:
    parser: Any = get_args_parser()
    known = [name for one in parser._actions for name in one.option_strings]
    # Hydra's own action keeps the last folder alone.
    several = argparse.ArgumentParser().add_argument(_FOLDER, "-cd", action="append")
    parser._option_string_actions |= dict.fromkeys(several.option_strings, several)

    def refuse(reason: str) -> NoReturn:
        keys = "; keys have no dashes: key=value" if "unrecognized arguments: --" in reason else ""
        raise ConfigError(
            f"penstock {command}: {reason}{keys}\n    options are: {', '.join([*known, '--debug'])}"
        )

    parser.error = refuse
    return parser


def _without_folders(options: Sequence[str]) -> list[str]:
    kept: list[str] = []
    words = iter(options)
    for word in words:
        name, equals, _ = word.partition("=")
        if name == "-cd" or (len(name) > len("--config-") and _FOLDER.startswith(name)):
            if not equals:
                next(words)
        else:
            kept.append(word)
    return kept


def _with_folders(keys: Sequence[str], folders: Sequence[str]) -> list[str]:
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{_FOLDER}: there is no folder '{folder}'")
    places = [*(f"file://{Path(folder).absolute()}" for folder in folders), *_search_path(keys)]
    others = [key for key in keys if not key.startswith(_SEARCH_PATH)]
    return [f"{_SEARCH_PATH}[{','.join(map(quoted, places))}]", *others]


def _search_path(keys: Sequence[str]) -> list[str]:
    for key in keys:
        if key.startswith(_SEARCH_PATH):
            value: Any = read_override(key).value()
            if isinstance(value, list) and all(isinstance(one, str) for one in value):
                return cast("list[str]", value)
            raise ConfigError(
                f"'hydra.searchpath': expected a list of folders, got '{value}'\n"
                "    hydra.searchpath=[FOLDER], or --config-dir FOLDER"
            )
    return []


def _places(keys: Sequence[str]) -> list[Path]:
    return [Path(place.removeprefix("file://")) for place in _search_path(keys)]


def _own_options(group: str, places: Sequence[Path]) -> set[str]:
    return {file.stem for place in places for file in place.glob(f"{group}/*.yaml")}


def _listed(word: str, places: Sequence[Path]) -> str:
    if "glob(" not in word or not isinstance(found := read_override(word).value(), Glob):
        return word
    group = word.partition("=")[0]
    known = {*options_of(group), *_own_options(group, places)} if group in groups() else set[str]()
    meant = found.filter(sorted(known))
    if not meant:
        raise ConfigError(
            f"'{word:.80}' matches no option of a group\n    groups are: {', '.join(groups())}"
        )
    return f"{group}={','.join(meant)}"


def _spelled_out(word: str, own: set[str]) -> list[str]:
    key, _, name = word.partition("=")
    if key != "model" or name in options_of("model") or name in own:
        return [word]
    path = Path(name).expanduser()
    is_path = "/" in name and (path.is_dir() or name[0] in "/.~")
    if is_path or (path / "config.json").is_file():
        kind, value = "folder", str(path)
    elif is_hub_id(name):
        kind, value = "hub", name
    else:
        return [word]
    return [f"model={kind}", f"model.{kind}={quoted(value)}"]


def _forced(word: str) -> str:
    if not _KEY.match(word):
        return word
    key = word.partition("=")[0]
    return word if key in groups() or key.split(".")[0] == "hydra" else f"++{word}"
