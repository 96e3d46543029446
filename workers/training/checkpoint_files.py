"""Weights and optimizer states in files, as boxes of logical parameters.

Two formats, which every engine reads:

- 1: `weights.safetensors` and `optimizer.safetensors` hold whole parameters.
- 2: each process writes its boxes to `weights-00003.safetensors` and so on; a tensor's key is its
  parameter and box, "model.norm.weight[0:64]". No box is written twice.

A state's `state.json` gives the format, and the files of format 2. Of an optimizer's state a
parameter is called "first/model.norm.weight". A reader asks for any box of any parameter, whatever
the boxes were when it was written.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor

from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.sharding import Box, Sharding, intersection, volume, whole
from ..weight_sync.packets import check_names

_KEY = re.compile(r"(.+)\[([0-9:,]*)\]")
_FORMATS = (1, 2)


class TensorSource(Protocol):
    """Parameters of which any box can be read."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All parameters."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a parameter, on the CPU."""
        ...


class WholeTensorSource:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][_slices(box)]


class FileTensors:
    """Boxes in safetensors files, of which only what is asked for is read."""

    def __init__(self, files: Sequence[Path], *, boxed: bool) -> None:
        self._held: dict[str, list[tuple[Box, Path, str]]] = defaultdict(list)
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"'{file}' does not exist; expected a safetensors file there"
                )
            with safetensors.safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - no mapping, it has only this method
                    shape = opened.get_slice(key).get_shape()
                    name, box = _parsed(key, file) if boxed else (key, whole(shape))
                    self._held[name].append((box, file, key))
        self._shapes = {
            name: tuple(max(box[dim][1] for box, _, _ in held) for dim in range(len(held[0][0])))
            for name, held in self._held.items()
        }
        for name, held in self._held.items():
            shape = self._shapes[name]
            filled = sum(volume(box) for box, _, _ in held)
            if filled != volume(whole(shape)):
                raise ValueError(
                    f"'{files[0].parent}' has {filled} of {volume(whole(shape))} numbers of "
                    f"'{name}' {list(shape)}; a process's file is missing or was written twice"
                )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, box: Box) -> Tensor:
        result: Tensor | None = None
        for held, file, key in self._held[name]:
            shared = intersection(held, box)
            if shared is None:
                continue
            inside = tuple((a - h, b - h) for (a, b), (h, _) in zip(shared, held, strict=True))
            with safetensors.safe_open(file, "pt") as opened:
                part: Tensor = opened.get_slice(key)[_slices(inside)]
            if shared == box:
                return part
            if result is None:
                result = part.new_empty([stop - start for start, stop in box])
            at = tuple((a - b, z - b) for (a, z), (b, _) in zip(shared, box, strict=True))
            result[_slices(at)] = part
        return torch.empty(0) if result is None else result


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def box_key(name: str, box: Box) -> str:
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def _parsed(key: str, file: Path) -> tuple[str, Box]:
    found = _KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"'{file}' has a tensor '{key}'; expected a name such as 'w[0:4,0:8]'")
    spans = [span.split(":") for span in found[2].split(",") if span]
    return found[1], tuple((int(start), int(stop)) for start, stop in spans)


def state_file(kind: str, process: int | None) -> str:
    """File of "weights" or "optimizer": of all of them, or of what one process of several wrote."""
    return f"{kind}.safetensors" if process is None else f"{kind}-{process:05d}.safetensors"


def read_state_json(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    if state.get("format") not in _FORMATS:
        raise ValueError(
            f"'{folder / 'state.json'}' has format {state.get('format')}; "
            f"this version reads formats {', '.join(map(str, _FORMATS))}"
        )
    return state


def open_state(folder: Path, state: Mapping[str, Any], kind: str) -> TensorSource:
    """The "weights" or "optimizer" part of a saved state, from any engine."""
    if state["format"] == 1:
        return FileTensors([folder / f"{kind}.safetensors"], boxed=False)
    return FileTensors([folder / name for name in state[kind]], boxed=True)


def read_whole(source: TensorSource) -> dict[str, Tensor]:
    return {name: source.read(name, whole(shape)) for name, shape in source.shapes().items()}


_BUCKET = 1 << 26
"""Weights sent at once."""


@dataclass(frozen=True)
class StoredPiece:
    """A box of a checkpoint's parameter in one process."""

    name: str  # The parameter
    box: Box  # The indices that are held
    tensor: str  # The engine's tensor it lies in
    start: tuple[int, ...]  # Where the box begins in the tensor
    # Whether this process is the first of all that hold the box, so that of several copies one is
    # written
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
    check_names(
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


def gather_weights(network: HoldsWeights, lead: int) -> dict[str, Tensor]:
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
                dist.send(torch.cat(views).detach(), lead)
            elif here == lead:
                sizes = [volume(piece.box) for piece in pieces]
                received = torch.empty(sum(sizes), dtype=own.dtype, device=own.device)
                dist.recv(received, process)
                for piece, part in zip(pieces, received.cpu().split(sizes), strict=True):
                    _place(whole, piece, part)
    return whole


def _place(whole: Mapping[str, Tensor], piece: StoredPiece, values: Tensor) -> None:
    part = whole[piece.name][_slices(piece.box)]
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
