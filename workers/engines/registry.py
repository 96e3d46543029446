"""The engines that come with Penstock; `engine.py` says what one declares."""

from __future__ import annotations

from ...dataflow.errors import nearest
from ...dataflow.registry import Registry
from .engine import EngineKind
from .torch_engine.declaration import TORCH

_FOLDER = "penstock.workers.engines"

ENGINES = Registry[EngineKind](
    {
        "torch": f"{_FOLDER}.torch_engine.declaration:TORCH",
        "fsdp": f"{_FOLDER}.fsdp_engine.declaration:FSDP",
        "megatron": f"{_FOLDER}.megatron_engine.declaration:MEGATRON",
        "vllm": f"{_FOLDER}.vllm_engine.declaration:VLLM",
    }
)
"""Name -> engine."""

DEFAULT = TORCH
"""The engine that trains by default, and that `penstock profile` measures: it needs nothing that is
not installed anyway, and does everything in one process."""


def trainers() -> list[str]:
    """Engines that train and evaluate: options of `engine=`."""
    return [name for name, engine in ENGINES.items() if engine.trains]


def rollouts() -> list[str]:
    """Engines that have a policy which only generates: options of `rollout=`."""
    return [name for name, engine in ENGINES.items() if engine.rollout is not None]


def check_engine(name: str, *others: str) -> str:
    """The name, if an engine that trains has it, or it may be the user's own ("module:ENGINE")."""
    if ":" in name or name in others or (name in ENGINES and ENGINES[name].trains):
        return name
    raise _unknown(name, "trains", [*others, *trainers()])


def check_rollout(name: str, *others: str) -> str:
    """The same for an engine that generates."""
    if ":" in name or name in others or (name in ENGINES and ENGINES[name].rollout is not None):
        return name
    raise _unknown(name, "generates", [*others, *rollouts()])


def _unknown(name: str, does: str, names: list[str]) -> ValueError:
    return ValueError(
        f"'{name}' is no engine that {does}{nearest(name, names, '')}\n"
        f"    there are: {', '.join(names)}, or module:ENGINE for one of your own"
    )
