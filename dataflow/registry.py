"""Registries: parts by name, each imported when it is chosen or asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

Part = TypeVar("Part", covariant=True)


class Registry(Mapping[str, Part]):
    """Names and what they stand for; nothing is imported before it is looked up.

    Args:
        paths: Name -> "module:name", which is also how a configuration names a user's own part.

    Example:
        >>> Registry[type]({"path": "pathlib:Path"})["path"].__name__
        'Path'
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)

    def __getitem__(self, name: str) -> Part:
        return imported(self.paths[name])

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def on_demand(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package, given the names that it has from each of its modules.

    A module is imported when one of its names is first asked for.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
