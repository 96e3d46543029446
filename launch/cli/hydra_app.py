"""A command as a Hydra application: composing, sweeping, `--cfg job`, `--help`.

Hydra composes the YAML groups and the command line; the result crosses into plain data here and no
further. Keys on the command line need no `+`: whether a key exists is decided by the typed
configuration, which knows every key, and not by which ones a YAML file happens to mention.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.hydra_config import HydraConfig
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

from ...configs.references import CONFIGS, groups, see_working_directory, yaml_text
from ...dataflow.errors import ConfigError, nearest, no_exit
from .overrides import CommandLine, command_line, jobs_of, overrides, unreadable

Task = Callable[[dict[str, Any]], None]


class UserFiles(FileConfigSource):
    """Hydra's source of users' own configuration files, with the bounds of `yaml_text`."""

    def load_config(self, config_path: str) -> ConfigResult:
        yaml_text(Path(self.path) / self._normalize_file_name(config_path))
        return super().load_config(config_path)


def hydra_app(command: str, arguments: list[str], task: Task) -> None:
    """Run `task` on the composed configuration, or with `--multirun` on each combination."""
    if "-sc" in arguments:
        line = CommandLine((), tuple(arguments), command)
    else:
        with _our_messages():
            line = command_line(command, arguments)
    if line.is_sweep:
        _check_sweep(command, line)
    elif {"-c", "--cfg"} & {word.partition("=")[0] for word in line.options}:
        _check_only(command, composed(line.config, line.keys))

    failures: list[Exception] = []

    @hydra.main(version_base="1.3", config_path=f"pkg://{CONFIGS}", config_name=command)
    def app(made: DictConfig) -> None:
        # Kept and raised below: Hydra would add lines of its own. The first one ends a sweep.
        if not failures:
            try:
                with _our_messages():
                    plain = _plain(made)
                see_working_directory()  # tools, rewards and tasks name modules there
                with no_exit(ConfigError):
                    task(plain)
            except Exception as error:
                failures.append(error)

    with _hydra_process(command, line.words), _our_messages():
        app()
    if failures:
        raise failures[0]


def compose(command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Compose the words after a command into plain data, without running anything."""
    with _our_messages():
        line = command_line(command, arguments)
    return composed(line.config, line.keys)


def composed(config: str, keys: Sequence[str]) -> dict[str, Any]:
    """Compose the keys that `command_line` has read."""
    with _our_messages(), hydra.initialize_config_module(CONFIGS, version_base="1.3"):
        return _plain(hydra.compose(config, overrides(keys)))


def given_overrides() -> list[str]:
    return [word.lstrip("+") for word in HydraConfig.get().overrides.task]


def chosen(group: str) -> str:
    """The option of a group that the running job was composed with; "" if there is none."""
    return str(HydraConfig.get().runtime.choices.get(group) or "")


def _check_only(command: str, composed: Mapping[str, Any]) -> None:
    config = {key: value for key, value in composed.items() if key not in _OWN.get(command, ())}
    if command == "plan":
        from ..placement.plan_request import plan_request

        plan_request(config)
        return
    if command in ("profile", "export"):
        from ...configs.plan_schema import ProfileConfig
        from ...configs.schema import ExportConfig
        from ...configs.validate import validated

        validated(ProfileConfig if command == "profile" else ExportConfig, config)
        return
    from ..inputs.compose import run_config

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
    "dry_run": ("resume", "cluster"),
    "graph": ("resume", "format", "output"),
    "eval": ("resume", "run", "step", "output"),
    "plan": ("resume", "json", "html", "trace", "output"),
}


@contextmanager
def _hydra_process(command: str, words: list[str]) -> Generator[None]:
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"penstock-{command}", *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]


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
