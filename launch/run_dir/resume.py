"""Going on with a run: its configuration as it was written, but for what may change on the way.

Where a run goes on, how long it has patience, how fast it learns and how many steps it takes may be
given anew, on the command line. All but the patience is written into the run's folder, and
what changed is noted there (`change_config`). `config.yaml` itself is not for editing: a run whose
configuration has changed without a note could not say what it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...configs.references import load_yaml
from ...configs.validate import check_renamed
from ...dataflow.errors import ConfigError
from ...workers.data.task import PATIENCE
from .files import differences, plain
from .run_folder import RunFolder, open_run, record_of

# A resumed run may change where it runs: checkpoints are the same for every engine and layout; how
# long this process waits; and how it learns from there on, where ROLE stands for any role.
_ELSEWHERE = ("engine", "rollout", "executor", "placement")
_PATIENCE = (
    *(f"task.{name}" for name in PATIENCE),
    *(f"recovery.{name}" for name in ("max_restarts", "max_repeats", "pause_s")),
    "checkpoint.mirror",
    "progress",
)

_NUM_STEPS = "algorithm.num_steps"
_LEARNING = (_NUM_STEPS, "algorithm.optimizer.lr", "algorithm.roles.ROLE.optimizer.lr")
_MAY_CHANGE = (*_ELSEWHERE, *_PATIENCE, *_LEARNING)

_MOST_BYTES = 10_000_000  # largest config.yaml, in which every default is spelled out


@dataclass(frozen=True)
class Resumed:
    """A run to go on with, and its configuration."""

    folder: RunFolder
    config: dict[str, Any]
    moved: bool = False  # it goes on in another place
    noted: bool = False  # the configuration is written anew, with a note of what changed
    extended: bool = False  # it had finished, and takes further steps


def resumed_config(path: Path, composed: Mapping[str, Any], given: Sequence[str]) -> Resumed:
    """Return the run at `path` with the keys that the command line gives anew.

    `given` are its words, and `composed` what they come to. A section that is chosen anew,
    `executor=ray`, replaces the run's; a key below one, `executor.num_threads=2`, changes that key
    alone. None is taken away, `~executor.groups`.
    """
    folder = open_run(path)
    words = [word for word in given if not word.startswith("resume=")]
    keys = [word.partition("=")[0] for word in words]
    _check_words(path, words)
    found = stored_config(folder)
    record = record_of(folder)
    if record.fault is not None:
        raise ConfigError(f"run '{folder.id}': {record.fault}\n    start a new run")
    before = record.config or found
    num_steps = _value(before, _NUM_STEPS)
    roles = (
        "algorithm",
        *(f"algorithm.roles.{r}" for r in _value(before, "algorithm.roles") or {}),
    )
    totals = [f"{role}.optimizer.total_calls" for role in roles]
    # Schedules of learning rates that end with the run's last step follow it.
    following = [key for key in totals if num_steps and _value(before, key) == num_steps]
    changing = [*keys, *(following if _NUM_STEPS in keys else ())]
    _check_unedited(folder, before, found, changing)
    for key in sorted(keys, key=len, reverse=True):  # a whole section last
        if _learns(key) and _value(found, key) is None:
            raise ConfigError(
                f"resume={path} comes with {key}, which the run does not have\n    a role without "
                "an optimizer of its own has the algorithm's: algorithm.optimizer.lr=..."
            )
        copy_value(key.split("."), composed, found)
    extended = folder.summary.is_file()
    if extended and not (_NUM_STEPS in keys and _value(found, _NUM_STEPS) > num_steps):
        raise ConfigError(
            f"run '{folder.id}' has finished; its result is in {folder.summary}\n    start a new "
            f"run, or go on with more steps: penstock run resume={path} {_NUM_STEPS}=..."
        )
    for key in following:
        section, _, name = key.rpartition(".")
        _value(found, section)[name] = _value(found, _NUM_STEPS)
    moved = any(re.split("[.]", key)[0] in _ELSEWHERE for key in keys)
    return Resumed(folder, found, moved, moved or any(map(_learns, keys)), extended)


def _check_words(path: Path, words: Sequence[str]) -> None:
    others = [
        word
        for word in words
        if re.split("[.=]", word)[0] not in _ELSEWHERE
        and (key := word.partition("=")[0]) not in _PATIENCE
        and not _learns(key)
    ]
    gone = [word for word in others if word.startswith("~")]
    if gone:
        raise ConfigError(
            f"resume={path} comes with {', '.join(gone)}\n    keys of a run are not taken away; "
            "name the section anew, such as executor=ray, with all of its keys that are to differ "
            "from that option's own"
        )
    if others:
        raise ConfigError(
            f"resume={path} comes with {', '.join(others)}\n    a resumed run keeps its "
            f"configuration but for {', '.join(_MAY_CHANGE)}; leave the rest out, or start a new "
            "run"
        )


def stored_config(folder: RunFolder) -> dict[str, Any]:
    try:
        config: Any = load_yaml(folder.config, _MOST_BYTES)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"'{folder.config}' cannot be read: {error!s:.500}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"'{folder.config}' holds no configuration")
    check_renamed(config)
    return config


def _check_unedited(
    folder: RunFolder, recorded: Mapping[str, Any], found: Mapping[str, Any], given: Sequence[str]
) -> None:
    edited = {
        key: two
        for key, two in differences(recorded, plain(found)).items()
        if not any(key == one or key.startswith(f"{one}.") for one in given)
    }
    if edited:
        said = ", ".join(
            f"{key} is {now!r} and was {then!r}" for key, (then, now) in edited.items()
        )
        raise ConfigError(
            f"{folder.config} was edited after the run wrote it: {said}\n    bring it back as it "
            f"was; what may change ({', '.join(_MAY_CHANGE)}) is given on the command line, which "
            f"notes it in the run: penstock run resume={folder.path} KEY=VALUE"
        )


def _learns(key: str) -> bool:
    return re.sub(r"(?<=^algorithm\.roles\.)[^.]+", "ROLE", key) in _LEARNING


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def copy_value(path: Sequence[str], source: Any, target: Any) -> None:
    """Copy the value at a path; sections on the way are made if need be."""
    *sections, name = path
    for section in sections:
        source = source[section]
        target = target.setdefault(section, {})
    target[name] = source[name]
