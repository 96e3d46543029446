"""Columns between nodes: packed, without padding, in chunks of rows.

Inside a call a ragged column is a padded dense tensor, because that is what maths is written on.
Between calls it is `Packed`: the values of all rows one after another, and the rows' lengths.
Packing drops whatever stood at padded positions, so nothing can depend on it; unpacking pads as the
spec says. Both copy, so nobody who works on a dense tensor in place can change what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import WorkerError
from ..graph.axes import DType, Spec


@dataclass(frozen=True)
class Packed:
    """One column on the wire."""

    values: Tensor  # The column itself if it is not ragged; else all rows' entries end to end
    lengths: Tensor | None = None  # i64[rows] for a ragged column, None otherwise

    @property
    def num_rows(self) -> int:
        """Rows in this piece; 1 for a scalar."""
        rows = self.values if self.lengths is None else self.lengths
        return rows.shape[0] if rows.dim() else 1

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        lengths = 0 if self.lengths is None else self.lengths.nbytes
        return self.values.nbytes + lengths


def lengths_of(ids: Tensor) -> Tensor:
    """Row lengths i64[rows] of a dense integer column, padded with -1 at the end of its rows."""
    return (ids >= 0).sum(dim=1)


def pack(name: str, dense: Tensor, spec: Spec, lengths: Tensor | None) -> Packed:
    """Turn a dense column into what travels."""
    if dense.dtype != spec.dtype.torch or dense.dim() != len(spec.axes):
        raise WorkerError(
            f"'{name}' should be {spec}, but the call returned {_shown(dense)}; make it "
            f"{spec.dtype.torch} with {len(spec.axes)} axes"
        )
    if spec.ragged_axis is None:
        return Packed(dense.detach().clone())
    if lengths is None:
        raise WorkerError(
            f"'{name}' is {spec}, but nothing says how long its rows are; return an i64 column "
            "over the same axes beside it, padded with -1"
        )
    longest = int(lengths.max()) if len(lengths) else 0
    if dense.shape[0] != len(lengths) or dense.shape[1] < longest:
        others = dense.shape[0] != len(lengths)
        fix = "; an op that drops or adds rows says @op(..., makes_rows=True)" if others else ""
        raise WorkerError(
            f"'{name}' is {spec}, with {len(lengths)} rows of up to {longest} "
            f"{spec.axes[1].name}s, but the call returned {_shown(dense)}{fix}"
        )
    return Packed(dense.detach()[_inside(lengths, dense.shape[1])], lengths)


def _inside(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def unpack(packed: Packed, dtype: DType) -> Tensor:
    """The dense tensor, new: `[rows, longest row, ...]`, padded as the dtype says."""
    if packed.lengths is None:
        return packed.values.clone()
    lengths = packed.lengths
    width = int(lengths.max()) if len(lengths) else 0
    shape = (len(lengths), width, *packed.values.shape[1:])
    dense = torch.full(shape, dtype.padding, dtype=packed.values.dtype, device=lengths.device)
    dense[_inside(lengths, width)] = packed.values
    return dense


def concatenate(pieces: Sequence[Packed]) -> Packed:
    """The pieces' rows one after another. A single piece is returned as it is."""
    if len(pieces) == 1:
        return pieces[0]
    values = torch.cat([piece.values for piece in pieces])
    lengths = [piece.lengths for piece in pieces if piece.lengths is not None]
    return Packed(values, torch.cat(lengths) if lengths else None)


def split(packed: Packed, num_rows: Iterable[int]) -> list[Packed]:
    """Cut into pieces of the given numbers of rows, in order; they must add up."""
    sizes = list(num_rows)
    if packed.lengths is None:
        return [Packed(part) for part in torch.split(packed.values, sizes)]
    lengths = torch.split(packed.lengths, sizes)
    values = torch.split(packed.values, [int(part.sum()) for part in lengths])
    return [Packed(value, length) for value, length in zip(values, lengths, strict=True)]
