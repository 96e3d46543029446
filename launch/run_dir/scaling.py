"""How many ranks somebody wishes a run's groups to have: two small files in its folder.

The run writes which of its groups can have others, and `penstock scale` what is wished. A wish
stays: a run that is resumed begins with the ranks of its plan, and then does as was wished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...dataflow.errors import ConfigError
from .atomic import write_json

_GROUPS, _WISH = "groups.json", "scale.json"


@dataclass(frozen=True)
class ElasticGroup:
    """A group of a run.

    Attributes:
        most: Ranks that it can have at most.
        why_not: Why it cannot have other ranks than it has; "" if it can.
    """

    most: int
    why_not: str = ""


def write_groups(folder: Path, groups: Mapping[str, ElasticGroup]) -> None:
    """Say in a run's folder which groups it has."""
    write_json(folder / _GROUPS, {name: asdict(group) for name, group in groups.items()})


def read_groups(folder: Path) -> dict[str, ElasticGroup]:
    """The groups of a run.

    Raises:
        ConfigError: If it has not said which it has.
    """
    file = folder / _GROUPS
    if not file.is_file():
        raise ConfigError(
            f"run '{folder.name}' has no {_GROUPS}: it has not come to its main stage yet, or an "
            "older version made it\n    try again once it takes steps"
        )
    return {name: ElasticGroup(**group) for name, group in json.loads(file.read_bytes()).items()}


def write_wish(folder: Path, wish: Mapping[str, int]) -> None:
    """Wish for numbers of ranks by group, beside those that are wished already."""
    write_json(folder / _WISH, {**read_wish(folder), **wish})


def read_wish(folder: Path) -> dict[str, int]:
    """What is wished: nothing, as a rule.

    Raises:
        ConfigError: If the file is damaged.
    """
    file = folder / _WISH
    try:
        found: dict[str, int] = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"{file} is damaged: {error}\n    delete it, and call `penstock scale` again"
        ) from error
    return found


def wish_version(folder: Path) -> int:
    """Another number each time that something has been wished; 0 if nothing has."""
    try:
        return (folder / _WISH).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
