"""Collecting a rank's weights in one of its processes, for hashes and exports.

Weights that are to be used elsewhere are not sent this way: transfer plans move every slice from
where it is to where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.box import volume
from ....planner.resharding.sharding import Sharding
from ..megatron_engine.layout import StoredPiece, pieces_on, stored_view

__all__ = ["gather_weights"]

_BUCKET = 1 << 26
"""Weights sent at once."""


def gather_weights(
    sharding: Sharding,
    tensors: Mapping[str, Tensor],
    context: WorkerContext,
    device: torch.device,
    *,
    lead: int,
) -> dict[str, Tensor]:
    """Whole parameters, on the CPU of one process; nothing elsewhere.

    Args:
        sharding: Of one rank's processes, which must all take part.
        tensors: This process's.
        context: Which one this is.
        device: Where tensors must lie to be sent.
        lead: The process that is to have them.
    """
    own = next(iter(tensors.values()))
    whole: dict[str, Tensor] = {}
    if context.process == lead:
        whole = {p.name: torch.empty(p.shape, dtype=own.dtype) for p in sharding.params}
    for process in sharding.devices:
        for pieces in _buckets([p for p in pieces_on(sharding, process) if p.first]):
            if process == lead == context.process:
                for piece in pieces:
                    _place(whole, piece, stored_view(tensors, piece))
            elif context.process == process:
                views = [stored_view(tensors, piece).reshape(-1) for piece in pieces]
                dist.send(torch.cat(views).detach().to(device), lead)
            elif context.process == lead:
                sizes = [volume(piece.box) for piece in pieces]
                received = torch.empty(sum(sizes), dtype=own.dtype, device=device)
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
