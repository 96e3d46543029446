"""Weights that are not those that are needed, and numbers that are none: refused by name.

Values of weights are looked at once after they are loaded and once after every train call, before
anybody gets them. That is one pass over them, which costs less than a hundredth of the call that
trained them. Gradients cost nothing: their norm is known anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...dataflow.errors import ConfigError, WorkerError
from ...dataflow.runtime.call_context import current_step

_SHOWN = 3
_LARGEST_NORM = 1e12


def refuse_faults(place: Path, owner: str, faults: Mapping[str, Iterable[str]]) -> None:
    lines = [f"    {what}: {some(names)}" for what, names in faults.items() if names]
    if lines:
        raise ConfigError(
            f"the weights in '{place}' are not those of {owner}:\n"
            + "\n".join(lines)
            + "\n    copy or save them again, all of them, with the configuration they were made by"
        )


def not_mapped(file: Path, error: MemoryError | RuntimeError) -> ConfigError:
    """Return the error for a file of weights that the system does not map into memory."""
    return ConfigError(
        f"'{file}' of {file.stat().st_size / 2**30:.1f} GiB does not fit into memory: {error}\n"
        "    give a smaller model, a machine with more memory, or the process a higher limit "
        "(ulimit -v)"
    )


def take_tensors(
    file: Path, owner: str, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> None:
    """Copy saved tensors by name into others: all of them, or none."""
    shared = [name for name in wanted if name in saved]
    shapes = {name: (list(saved[name].shape), list(wanted[name].shape)) for name in shared}
    faults = {
        "missing": [name for name in wanted if name not in saved],
        "unexpected": [name for name in saved if name not in wanted],
        "of another shape": [
            f"{name} {there}, expected {here}"
            for name, (there, here) in shapes.items()
            if there != here
        ],
        "of a type that is no floating point": [
            f"{name} {str(saved[name].dtype).removeprefix('torch.')}"
            for name in shared
            if not saved[name].is_floating_point()
        ],
        "not finite": not_finite({name: saved[name] for name in shared}),
    }
    refuse_faults(file, owner, faults)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(saved[name])


def unusable(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of weights that nothing can be computed with: nan, infinite, or of a norm above 1e12.

    A gated feed-forward multiplies three weights, so from there on its numbers are beyond float32;
    norms of trained weights stay below 1e6.
    """
    parts = [tensor.detach() for tensor in tensors.values()]
    if float(torch.nn.utils.get_total_norm(parts)) <= _LARGEST_NORM:
        return []
    norms = {
        name: float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32))
        for name, tensor in tensors.items()
    }
    return [name for name, norm in norms.items() if not norm <= _LARGEST_NORM]


def not_finite(columns: Mapping[str, Tensor]) -> list[str]:
    """Names of columns with a nan or an infinity; columns of integers have none."""
    return [name for name, column in columns.items() if not bool(column.isfinite().all())]


def some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def check_outputs(role: str, what: str, found: Tensor, weights: Mapping[str, Tensor]) -> None:
    """Refuse what a model says if there is a nan or an infinity in it."""
    if bool(found.isfinite().all()):
        return
    rows = int((~found.isfinite()).reshape(len(found), -1).any(dim=1).sum())
    names = unusable(weights)
    cause = f"its weights are not finite: {some(names)}" if names else "its weights are finite"
    raise WorkerError(
        f"step {current_step()}: {what} of '{role}' are not finite in {rows} of {len(found)} "
        f"rows; {cause}\n    go on from the last checkpoint with a lower optimizer.lr, or in "
        "dtype float32"
    )


def stopped(role: str, step: int, what: str, findings: Sequence[str]) -> WorkerError:
    others = f"\n    not finite: {'; '.join(findings)}" if findings else ""
    return WorkerError(
        f"step {step}: '{role}' cannot be trained on: {what}{others}\n    nothing of this step is "
        "published or saved; go on from the last checkpoint with a lower optimizer.lr, or correct "
        "what made the numbers"
    )
