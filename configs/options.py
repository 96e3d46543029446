"""The YAML files of this package: the groups there are, their options, and what an option says."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

__all__ = ["CONFIGS", "groups", "option_file", "options_of"]

CONFIGS = "penstock.configs"
"""The package in which they are."""


def groups() -> list[str]:
    """Names of the configuration groups."""
    return sorted(
        entry.name
        for entry in files(CONFIGS).iterdir()
        if entry.is_dir() and not entry.name.startswith("_")
    )


def options_of(group: str) -> list[str]:
    """The options of a configuration group."""
    names = (entry.name for entry in files(CONFIGS).joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def option_file(group: str, option: str) -> dict[str, Any]:
    """The keys of an option as its file has them, nothing resolved."""
    text = files(CONFIGS).joinpath(group, f"{option}.yaml").read_text()
    data: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return data
