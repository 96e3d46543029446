"""The engines there are, one line each; see `engine.py` for what an engine says of itself."""

from __future__ import annotations

from collections.abc import Mapping

from ...dataflow.errors import nearest
from .engine import Engine
from .fsdp_engine.declaration import FSDP
from .megatron_engine.declaration import MEGATRON
from .torch_engine.declaration import TORCH
from .vllm_engine.declaration import VLLM

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (TORCH, FSDP, MEGATRON, VLLM)}
"""Name -> engine."""

DEFAULT = TORCH
"""What trains if nothing is said, and what `penstock profile` measures: it needs nothing that is
not installed anyway, and does everything in one process."""


def trainers() -> list[str]:
    """Engines that train and evaluate: options of `engine=`."""
    return [name for name, engine in ENGINES.items() if engine.trains]


def rollouts() -> list[str]:
    """Engines that have a policy which only generates: options of `rollout=`."""
    return [name for name, engine in ENGINES.items() if engine.rollout is not None]


def check_engine(name: str, *others: str) -> str:
    """The name, if an engine that trains has it, or it may be somebody's own ("module:ENGINE").

    Args:
        name: What was configured.
        others: Further words that are allowed there.

    Raises:
        ValueError: If not; says what there is.
    """
    return _checked(name, "trains", [*others, *trainers()])


def check_rollout(name: str, *others: str) -> str:
    """The same for an engine that generates."""
    return _checked(name, "generates", [*others, *rollouts()])


def _checked(name: str, does: str, known: list[str]) -> str:
    if name in known or ":" in name:
        return name
    what = f"'{name}' is no engine that {does}"
    raise ValueError(
        f"{what}{nearest(name, known, '')}\n"
        f"    there are: {', '.join(known)}, or module:ENGINE for one of your own"
    )
