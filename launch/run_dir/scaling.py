"""How many ranks somebody wishes a run's groups to have: two small files in its folder.

The run writes which of its groups can have others, and `penstock scale` what is wished. A wish
stays: a run that is resumed begins with the ranks of its plan, and then does as was wished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...dataflow.errors import ConfigError
from .atomic import write_json
from .run_files import field, parse_object, parsed

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
        ConfigError: If it has not said which it has, or the file is damaged.
    """
    groups = parsed(folder / _GROUPS, _groups)
    if groups is None:
        raise ConfigError(
            f"run '{folder.name}' has no {_GROUPS}: it has not come to its main stage yet, or an "
            "older version made it\n    try again once it takes steps"
        )
    return groups


def _groups(content: bytes) -> dict[str, ElasticGroup]:
    found = parse_object(content)
    return {
        name: ElasticGroup(field(group, "most", int), field(group, "why_not", str))
        for name, group in found.items()
    }


def write_wish(folder: Path, wish: Mapping[str, int]) -> None:
    """Wish for numbers of ranks by group, beside those that are wished already."""
    write_json(folder / _WISH, {**read_wish(folder), **wish})


def read_wish(folder: Path) -> dict[str, int]:
    """What is wished: nothing, as a rule.

    Raises:
        ConfigError: If the file is damaged.
    """
    try:
        return parsed(folder / _WISH, _wish) or {}
    except ConfigError as error:
        raise ConfigError(f"{error}; or delete it, and call `penstock scale` again") from error


def _wish(content: bytes) -> dict[str, int]:
    wish = parse_object(content)
    for name in wish:
        if field(wish, name, int) < 1:
            raise ValueError(f"'{name}' is {wish[name]}, and a group has at least one rank")
    return wish


def wish_version(folder: Path) -> int:
    """Another number each time that something has been wished; 0 if nothing has."""
    try:
        return (folder / _WISH).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
