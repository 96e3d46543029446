"""A process's weights as boxes of the checkpoint's parameters: read, filled and gathered.

What is sent between engines does not go this way: transfer plans move every slice from where it is
to where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.box import Box, volume
from ...planner.resharding.sharding import Sharding
from .checkpoint_files import TensorSource
from .network import Network

_BUCKET = 1 << 26
"""Weights sent at once."""


@dataclass(frozen=True)
class StoredPiece:
    """A box of a checkpoint's parameter in one process.

    Attributes:
        name: The parameter.
        box: The indices that are held.
        tensor: The engine's tensor it lies in.
        start: Where the box begins in the tensor.
        first: Whether this process is the first of all that hold the box, so that of several
            copies one is written.
    """

    name: str
    box: Box
    tensor: str
    start: tuple[int, ...]
    first: bool


def pieces_on(sharding: Sharding, device: int) -> Iterator[StoredPiece]:
    """Pieces that a device holds, in the order of the checkpoint."""
    for param in sharding.params:
        owners: dict[Box, int] = {}
        for piece in sharding.patterns[param.pattern]:
            owner = owners.setdefault(piece.box, piece.device)
            if piece.device == device:
                yield StoredPiece(param.name, piece.box, param.tensor, piece.start, owner == device)


def share_of(pieces: Sequence[StoredPiece], rank: int, num_ranks: int) -> Iterator[StoredPiece]:
    """A rank's share of pieces that all ranks hold: about equal numbers each."""
    total, before = sum(volume(piece.box) for piece in pieces), 0
    for piece in pieces:
        if before * num_ranks // max(total, 1) == rank:
            yield piece
        before += volume(piece.box)


def stored_view(tensors: Mapping[str, Tensor], piece: StoredPiece) -> Tensor:
    """The part of an engine's tensors that a piece is; the tensors' dimensions are the box's."""
    view = tensors[piece.tensor]
    for dim, (begin, (start, stop)) in enumerate(zip(piece.start, piece.box, strict=True)):
        view = view.narrow(dim, begin, stop - start)
    return view


class HoldsWeights(Protocol):
    """The part of a `Network` that `fill_weights` needs."""

    context: WorkerContext
    rank_layout: Sharding

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]: ...


def fill_weights(
    network: HoldsWeights,
    source: TensorSource,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    exact: bool = True,
    only: str = "",
    but: str | None = None,
) -> None:
    """Have a process's part of a model say what a source says."""
    wanted = {
        param.name: param.shape
        for param in network.rank_layout.params
        if param.name.startswith(only) and not (but and param.name.startswith(but))
    }
    filled = {"": None} if buffers is None else buffers
    _check_names(
        {prefix + name: shape for prefix in filled for name, shape in wanted.items()},
        source.shapes(),
        exact=exact,
    )
    with torch.no_grad():
        for prefix, buffer in filled.items():
            tensors = network.tensors(buffer)
            for piece in pieces_on(network.rank_layout, network.context.process):
                if piece.name in wanted:
                    box = source.read(prefix + piece.name, piece.box)
                    stored_view(tensors, piece).copy_(box)


def _check_names(
    wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], *, exact: bool
) -> None:
    missing = sorted(wanted.keys() - given.keys())
    unknown = sorted(given.keys() - wanted.keys()) if exact else []
    if missing or unknown:
        raise ValueError(
            f"weights do not fit: missing {missing or 'none'}, unknown {unknown or 'none'}; "
            "they must come from a model of the same architecture"
        )
    for name, shape in wanted.items():
        if tuple(given[name]) != shape:
            raise ValueError(
                f"weight '{name}': expected shape {list(shape)}, got {list(given[name])}"
            )


def gather_weights(network: Network, lead: int) -> dict[str, Tensor]:
    """Copies of whole parameters, on the CPU of one process; nothing elsewhere."""
    sharding, tensors = network.rank_layout, network.tensors()
    here = network.context.process
    own = next(iter(tensors.values()))
    whole: dict[str, Tensor] = {}
    if here == lead:
        whole = {p.name: torch.empty(p.shape, dtype=own.dtype) for p in sharding.params}
    for process in sharding.devices:
        for pieces in _buckets([p for p in pieces_on(sharding, process) if p.first]):
            if process == lead == here:
                for piece in pieces:
                    _place(whole, piece, stored_view(tensors, piece))
            elif here == process:
                views = [stored_view(tensors, piece).reshape(-1) for piece in pieces]
                dist.send(torch.cat(views).detach().to(network.device), lead)
            elif here == lead:
                sizes = [volume(piece.box) for piece in pieces]
                received = torch.empty(sum(sizes), dtype=own.dtype, device=network.device)
                dist.recv(received, process)
                for piece, part in zip(pieces, received.cpu().split(sizes), strict=True):
                    _place(whole, piece, part)
    return whole


def _place(whole: Mapping[str, Tensor], piece: StoredPiece, values: Tensor) -> None:
    part = whole[piece.name][tuple(slice(start, stop) for start, stop in piece.box)]
    part.copy_(values.detach().reshape(part.shape))


def _buckets(pieces: Sequence[StoredPiece]) -> Iterator[list[StoredPiece]]:
    bucket: list[StoredPiece] = []
    size = 0
    for piece in pieces:
        if bucket and size + volume(piece.box) > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(piece)
        size += volume(piece.box)
    if bucket:
        yield bucket
