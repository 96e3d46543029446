"""A command as a Hydra application: its words, composing, sweeping, `--cfg job`, `--help`.

Every command and every sweep reads its words here, so that a key, an escape and a folder of one's
own configurations mean the same everywhere. Hydra composes the YAML groups and the command line;
the result crosses into plain data here and no further. Keys on the command line need no `+`:
whether a key exists is decided by the typed configuration, which knows every key, and not by which
ones a YAML file happens to mention.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from ...configs.references import CONFIGS, groups, options_of, see_working_directory, yaml_text
from ...dataflow.errors import ConfigError, nearest, no_exit
from ...workers.models.hub import is_hub_id

# most characters of a word: Hydra's grammar takes many seconds for a longer one
_MOST_CHARACTERS = 10_000
# most jobs of a sweep over every combination: all are composed before the first is run
_MOST_JOBS = 10_000

_FOLDER = "--config-dir"
_TASK = ("algorithm=", "task=")  # keys with which `profile` measures a task, and no machine
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
        for folder in parsed.config_dir:
            if not Path(folder).is_dir():
                raise ConfigError(f"{_FOLDER}: there is no folder '{folder}'")
        places = [f"file://{Path(folder).absolute()}" for folder in parsed.config_dir]
        places = ",".join(map(quoted, (*places, *_search_path(keys))))
        others = [key for key in keys if not key.startswith(_SEARCH_PATH)]
        keys = [f"{_SEARCH_PATH}[{places}]", *others]
    keys = [_listed(key, keys) for key in keys]
    options = list(arguments)
    for key in parsed.overrides:
        options.remove(key)
    return CommandLine(tuple(keys), tuple(_without_folders(options)), parsed.config_name or command)


def overrides(keys: Sequence[str]) -> list[str]:
    """Spell keys for Hydra: no `+` is needed, and `model=org/name` is an option and its key."""
    own = _own_options("model", keys)
    words = [word for key in keys for word in _spelled_out(key, own)]
    return [f"++{word}" if _is_forced(word) else word for word in words]


def with_escapes(word: str) -> str:
    r"""Replace `\n`, `\t` and `\r` in the value of `key=value` by the characters they name.

    Twice the backslash stands for itself in front of these letters (`\\n`); in front of all others
    it is left to Hydra, so that regular expressions stay as they are. A value without quotes gets
    them, since Hydra reads such characters nowhere else.
    """

    def character(escape: re.Match[str]) -> str:
        backslashes, letter = len(escape[1]), escape[2]
        return "\\" * (backslashes // 2) + (_ESCAPED[letter] if backslashes % 2 else letter)

    def read(part: re.Match[str]) -> str:
        text = _ESCAPE.sub(character, part[0])
        return text if part[0][0] in "'\"" or text == part[0] else quoted(text)

    key, equals, value = word.partition("=")
    return f"{key}{equals}{_VALUE_PART.sub(read, value)}"


def literal(text: str) -> str:
    """Quote a text so that `with_escapes` and Hydra read it back unchanged."""
    return quoted(_ESCAPE.sub(r"\1\1\2", text))


def quoted(text: str) -> str:
    """Quote a text for Hydra: a backslash in front of a quote, or at the end, is doubled."""
    inner = re.sub(r"(\\*)(')", r"\1\1\\\2", text)
    trailing = len(inner) - len(inner.rstrip("\\"))
    return f"'{inner}{chr(92) * trailing}'"


def read_override(word: str) -> Override:
    try:
        (override,) = OverridesParser.create().parse_overrides([word])
        value, number = override.value(), 0.0
        if isinstance(value, RangeSweep):
            ends = (float(one or 0) for one in (value.start, value.stop, value.step))
            start, stop, step = ends
            if not step:
                raise ValueError("the step of a range is 0")
            number = (stop - start) / step
    except OverrideParseException as error:
        raise unreadable(error) from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"'{word.lstrip('+'):.80}' cannot be read: {error}") from error
    if not number <= _MOST_JOBS:
        raise ConfigError(
            f"'{word.lstrip('+'):.80}': expected a range of at most {_MOST_JOBS} values"
        )
    return override


def unreadable(error: OverrideParseException) -> ConfigError:
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


def _own_options(group: str, keys: Sequence[str]) -> set[str]:
    places = [Path(place.removeprefix("file://")) for place in _search_path(keys)]
    return {file.stem for place in places for file in place.glob(f"{group}/*.yaml")}


def _listed(word: str, keys: Sequence[str]) -> str:
    if "glob(" not in word or not isinstance(found := read_override(word).value(), Glob):
        return word
    group = word.partition("=")[0]
    known = {*options_of(group), *_own_options(group, keys)} if group in groups() else set[str]()
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


def _is_forced(word: str) -> bool:
    key = word.partition("=")[0]
    return bool(_KEY.match(word)) and key not in groups() and key.split(".")[0] != "hydra"


# --- the application

_Made = TypeVar("_Made")


class UserFiles(FileConfigSource):
    """Hydra's source of users' own configuration files, with the bounds of `yaml_text`."""

    def load_config(self, config_path: str) -> ConfigResult:
        yaml_text(Path(self.path) / self._normalize_file_name(config_path))
        return super().load_config(config_path)


def hydra_app(
    command: str, arguments: list[str], task: Callable[[dict[str, Any]], _Made]
) -> list[_Made]:
    """Run `task` on the composed configuration, or with `--multirun` on each combination."""
    if command == "plan":
        arguments = ["json=-" if word == "--json" else word for word in arguments]
    if command == "profile" and any(word.startswith(_TASK) for word in arguments):
        arguments = ["--config-name", "profile_task", *arguments]  # which has a run's keys
    if "-sc" in arguments:
        line = CommandLine((), tuple(arguments), command)
    else:
        with _our_messages():
            line = command_line(command, arguments)
    if line.is_sweep:
        _check_sweep(command, line)
    elif {"-c", "--cfg"} & {word.partition("=")[0] for word in line.options}:
        _check_only(command, composed(line.config, line.keys))

    made: list[_Made] = []
    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=f"pkg://{CONFIGS}", config_name=command)
    def app(found: DictConfig) -> None:
        # Kept and raised below: Hydra would add lines of its own. The first one ends a sweep.
        if not failures:
            try:
                with _our_messages():
                    plain = _plain(found)
                see_working_directory()  # tools, rewards and tasks name modules there
                with no_exit(ConfigError):
                    made.append(task(plain))
            except Exception as error:
                failures.append(error)

    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"penstock-{command}", *overrides(line.keys), *line.options]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _our_messages():
            app()
    finally:
        sys.argv = before[0]
        del os.environ["HYDRA_FULL_ERROR"]
        if before[1] is not None:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
    if failures:
        raise failures[0]
    return made


def compose(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    with _our_messages():
        line = command_line(command, arguments)
    return composed(line.config, line.keys)


def composed(config: str, keys: Sequence[str]) -> dict[str, Any]:
    with _our_messages(), hydra.initialize_config_module(CONFIGS, version_base="1.3"):
        return _plain(hydra.compose(config, overrides(keys)))


def given_overrides() -> list[str]:
    return [word.lstrip("+") for word in HydraConfig.get().overrides.task]


def chosen(group: str) -> str:
    """The option of a group that the running job was composed with; "" if there is none."""
    return str(HydraConfig.get().runtime.choices.get(group) or "")


def _check_only(command: str, composed: Mapping[str, Any]) -> None:
    if command == "profile" and "algorithm" in composed:
        command = "profile_task"
    config = {key: value for key, value in composed.items() if key not in _OWN.get(command, ())}
    if command == "plan":
        from ..placement.plan_request import plan_request

        plan_request(config)
    elif command in ("profile", "export"):
        from ...configs.schema import ExportConfig, ProfileConfig
        from ...configs.validate import validated

        validated(ProfileConfig if command == "profile" else ExportConfig, config)
    else:
        from ..inputs.run import run_config

        run_config(config)


def _check_sweep(command: str, line: CommandLine) -> None:
    if any(word.lstrip("+").startswith("resume=") for word in line.keys):
        raise ConfigError("resume= continues one run\n    leave --multirun out")
    if any("hydra/sweeper=" in key for key in line.keys):
        return  # one that looks for jobs itself
    with _our_messages():
        jobs = jobs_of(line)
    for job in jobs:
        try:
            _check_only(command, composed(line.config, job))
        except ConfigError as error:
            own = " ".join(word.lstrip("+") for word in job if not word.startswith("hydra"))
            raise ConfigError(f"of the jobs of --multirun, {own}:\n{error}") from error


def refuse_resume(composed: dict[str, Any], command: str) -> None:
    """Take the key `resume` out of a composition of another command, which has none to follow."""
    if composed.pop("resume", None) is not None:
        raise ConfigError(
            f"penstock {command} has no key 'resume'\n    give the keys of the run, which are in "
            "its config.yaml"
        )


# keys of a command that are no part of a run's configuration
_OWN = {
    "run": ("resume",),
    "profile_task": ("resume", "output", "seconds"),
    "dry_run": ("resume", "cluster"),
    "graph": ("resume", "format", "output"),
    "eval": ("resume", "run", "step", "output"),
    "plan": ("resume", "json", "html", "trace", "output"),
}


@contextmanager
def _our_messages() -> Generator[None]:
    Plugins.instance()  # registers Hydra's sources, one of which is replaced here
    SourcesRegistry.instance().types[UserFiles.scheme()] = UserFiles
    try:
        yield
    except MissingConfigException as error:
        raise ConfigError(_unknown_option(error)) from error
    except OverrideParseException as error:
        raise unreadable(error) from error
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or str(error)
        raise ConfigError(f"'{key}' has no value yet\n    give it: {key}=...") from error
    except InterpolationKeyError as error:
        key, said = getattr(error, "full_key", None) or "a key", str(error).partition("\n")[0]
        raise ConfigError(
            f"'{key}' takes its value from another key, which the chosen options lack: {said}\n"
            f"    choose an algorithm, a task and a model that go together, or give it: {key}=..."
        ) from error
    except (ConfigCompositionException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        said = [line for line in f"{error}\n{cause or ''}".splitlines() if line.strip()]
        raise ConfigError("\n    ".join(said).replace("++", "")) from error
    except HydraException as error:
        raise ConfigError(str(error)) from error
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"a YAML file cannot be read: {said:.500}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"a YAML file of --config-dir is not UTF-8: {error}") from error
    except RecursionError as error:
        raise ConfigError(
            "a value is nested too deeply, or contains itself; write it out in fewer levels"
        ) from error
    except (TypeError, AttributeError, ValueError) as error:
        # Hydra's, of a value of a kind it did not expect.
        if str(error).startswith("Config group override"):
            said = "a group was given null; leave it out, or choose an option"
        else:
            said = f"what was typed cannot be composed: {str(error).partition(chr(10))[0]}"
        raise ConfigError(said) from error


def _unknown_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").partition("/")
    if group not in groups():  # one of Hydra's own, which stand below others
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = [str(name) for name in error.options or ()]
    if not group or not options:
        return str(error).splitlines()[0]
    hint = nearest(option, options)
    others = ", or org/name of a hub, or the path of a folder" if group == "model" else ""
    return (
        f"there is no {group} '{option}'{hint}\n    {group} is one of: {', '.join(options)}{others}"
    )


def _plain(composed: DictConfig) -> dict[str, Any]:
    data: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    if "experiment" in data:
        raise ConfigError(
            "the keys of the experiment's file are below 'experiment'\n"
            "    let the file begin with the line: # @package _global_"
        )
    return data
