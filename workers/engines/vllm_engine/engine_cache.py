"""A vLLM engine that has served its run, cached for the next run in the same process.

Starting one takes seconds to minutes, most of it importing vLLM and building kernels; giving one
other weights takes as long as reading them.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .engine import EngineOptions, VllmEngine

_WHERE_FROM = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""What a config says of its file rather than of the model."""

_cached: dict[str, VllmEngine] = {}
"""At most one, as a process can have."""


def engine_key(config: Any, options: EngineOptions) -> str:
    """What two engines have in common that differ in their weights alone.

    Args:
        config: Hugging Face's, of the model.
        options: What the engine is started with.
    """
    model = {key: value for key, value in config.to_dict().items() if key not in _WHERE_FROM}
    described = json.dumps(model, sort_keys=True, default=str)
    return f"{described} {options}"


def keep(key: str, engine: VllmEngine) -> None:
    """Cache an engine, asleep, until one like it is asked for or another is started."""
    engine.sleep()
    _cached[key] = engine


def take(key: str) -> VllmEngine | None:
    """The engine that is cached under this key, awake, with the weights it had; None if none is.

    One that is cached under another key is closed: a process has one engine.

    Raises:
        RuntimeError: If that one is shared with other processes.
    """
    engine = _cached.pop(key, None)
    if _cached and torch.distributed.is_initialized():
        # It would end torch.distributed with it, and so the next engine's way to its peers.
        raise RuntimeError(
            "processes that share a vLLM engine were kept for a model that has changed since; end "
            "them with shutdown_ray() and start again"
        )
    while _cached:
        _cached.popitem()[1].close()
    if engine is not None:
        engine.wake()
    return engine
