"""Going on with a run: its configuration as it was written, on other processes if asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...dataflow.errors import ConfigError
from ...workers.data.task import PATIENCE
from .run_folder import open_run

__all__ = ["resumed_config"]

_ELSEWHERE = ("engine", "rollout", "executor", "placement")
"""What a resumed run may change: checkpoints are the same for every engine and layout."""

_PATIENCE = tuple(f"task.{name}" for name in PATIENCE)
"""And further keys."""


def resumed_config(
    path: Path, composed: Mapping[str, Any], given: Sequence[str]
) -> tuple[dict[str, Any], bool]:
    """The configuration of the run to resume, and whether it goes on in another place.

    Args:
        path: The run's folder.
        composed: What the command line comes to.
        given: Its words, `key=value`. A section that is chosen anew, `executor=ray`, replaces the
            run's; a key below one, `executor.num_threads=2`, changes that key alone. None is
            taken away, `~executor.groups`.

    Raises:
        ConfigError: If there is no run, it has finished, or other keys are given.
    """
    folder = open_run(path)
    words = [word for word in given if not word.startswith("resume=")]
    keys = [word.partition("=")[0] for word in words]
    others = [
        word
        for word in words
        if re.split("[.=]", word)[0] not in _ELSEWHERE and word.partition("=")[0] not in _PATIENCE
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
            f"configuration but for {', '.join((*_ELSEWHERE, *_PATIENCE))}; leave the rest out, or "
            "start a new run"
        )
    if folder.summary.is_file():
        raise ConfigError(
            f"run '{folder.id}' has finished; its result is in {folder.summary}\n"
            "    start a new run"
        )
    try:
        config: Any = yaml.safe_load(folder.config.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"'{folder.config}' cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"'{folder.config}' holds no configuration")
    for key in sorted(keys, key=len, reverse=True):  # a whole section last
        _copy(key.split("."), composed, config)
    return config, not {*keys} <= {*_PATIENCE}


def _copy(path: Sequence[str], source: Any, target: Any) -> None:
    """Take over the value at a path; sections on the way are made if need be."""
    *sections, name = path
    for section in sections:
        source = source[section]
        target = target.setdefault(section, {})
    target[name] = source[name]
