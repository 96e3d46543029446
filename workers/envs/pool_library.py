"""The library EnvPool, asked for environments and for games alike."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from ...dataflow.errors import ConfigError, nearest


@contextmanager
def without_casts() -> Generator[None]:
    """Without Gymnasium's warning that bounds, which EnvPool gives as f64, become f32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        yield


def ask_envpool(
    kind: str,
    name: str,
    function: str,
    options: Mapping[str, Any],
    *,
    advice: str = "",
    **further: Any,
) -> Any:
    """Call a function of EnvPool for an environment or game."""
    try:
        pool = importlib.import_module("envpool")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"backend=envpool needs the package {error.name}, which is not installed\n"
            "    pip install penstock-rl[envpool]"
        ) from error
    known: list[str] = pool.list_all_envs()
    if name not in known:
        raise ConfigError(f"EnvPool has no {kind} '{name}'{nearest(name, known)}{advice}")
    try:
        with without_casts():
            return getattr(pool, function)(name, **options, **further)
    except Exception as error:  # of many kinds, assertions among them
        raise ConfigError(f"{kind} '{name}' cannot be made by EnvPool: {error}") from error
