"""The same bits from a CUDA device each time, where that is asked for.

Without it two runs of the same step differ by rounding: the gradient of attention's queries is
added up in whatever order blocks end, and so are sums by index. Everything else that this engine
does to train or evaluate is ordered.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic as _memory

__all__ = ["prepare_same_bits", "same_bits"]

_MEMORY: Any = _memory


def prepare_same_bits() -> None:
    """Have cuBLAS use workspaces that give the same bits; whoever has set the variable is obeyed.

    It must be set before the first matrix product of a process.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def same_bits(on: bool) -> Generator[None]:
    """Where only operations run that give the same bits each time; others raise, by name.

    Args:
        on: False changes nothing.

    Raises:
        RuntimeError: From an operation, in here, that has no such kernel.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = _MEMORY.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _MEMORY.fill_uninitialized_memory = False  # nothing reads what was not written
    try:
        yield
    finally:
        _MEMORY.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
