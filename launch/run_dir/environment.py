"""What a run is run with: the version of every installed package, and the machine.

It is written into `run.json` when the run begins, for whoever compares two runs or repeats one.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, requires
from typing import Any

import psutil

_DISTRIBUTION, _FOR_ITS_TESTS = "penstock-rl", 'extra == "dev"'
_MOST_NAMED = 4
"""Packages that one line names."""


@dataclass(frozen=True)
class Environment:
    """What a run is run with.

    Attributes:
        versions: Package -> its version, `python` among them.
        hardware: `processor`, `instructions`, `num_cores`, `memory_bytes`, `num_cuda_devices` and
            `system`, of the machine on which the run was started.
    """

    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    hardware: Mapping[str, Any] = field(default_factory=dict[str, Any])


def environment_now(processor: str) -> Environment:
    """Of this process.

    Args:
        processor: What the machine's processor is called.
    """
    import torch  # here: reading a record needs none of it

    return Environment(
        _versions(),
        {
            "processor": processor,
            # Processors of one name may have others, and torch rounds by them.
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "num_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            # Counted without asking a device for anything, which would take memory of it.
            "num_cuda_devices": torch.cuda.device_count(),
            "system": platform.platform(),
        },
    )


def changed_versions(
    before: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, tuple[str | None, str | None]]:
    """The packages that are not as they were, by name, with both versions; None if it is absent.

    A record without versions, of a run older than these, differs from none.
    """
    if not before or not now:
        return {}
    names = sorted({*before, *now})
    return {
        name: (before.get(name), now.get(name))
        for name in names
        if before.get(name) != now.get(name)
    }


def versions_text(changed: Mapping[str, tuple[str | None, str | None]]) -> str:
    """`torch 2.12.0 -> 2.13.0, ray 2.50.0 -> none and 7 more`."""
    said = [f"{name} {then or 'none'} -> {now or 'none'}" for name, (then, now) in changed.items()]
    more = f" and {len(said) - _MOST_NAMED} more" if len(said) > _MOST_NAMED else ""
    return f"{', '.join(said[:_MOST_NAMED])}{more}"


def required(*, optional: bool = True) -> list[str]:
    """The packages that this one asks for, in its order; nothing where only its files lie.

    Args:
        optional: Whether those of its extras are among them, but for its own tests'.
    """
    try:
        listed = requires(_DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    left_out = _FOR_ITS_TESTS if optional else "extra =="
    names = [re.split(r"[^\w.-]", line)[0] for line in listed if left_out not in line]
    return [*dict.fromkeys(names)]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for one in distributions():
        name: str | None = one.metadata["Name"]
        if name:  # a folder that an interrupted installation left has none
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return dict(sorted(found.items()))
