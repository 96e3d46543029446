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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor

from ...planner.resharding.box import Box, intersection, volume, whole

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


class WholeTensors:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All parameters."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """A view."""
        return self._tensors[name][_slices(box)]


class FileTensors:
    """Boxes in safetensors files, of which only what is asked for is read.

    Args:
        files: A parameter may be spread over several; boxes must not overlap.
        boxed: Whether keys carry boxes, as in format 2; else every tensor is whole.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a key has no box, or the boxes of a parameter do not fill it.
    """

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
        """All parameters."""
        return self._shapes

    def read(self, name: str, box: Box) -> Tensor:
        """A box, put together from whatever boxes were written."""
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
    """Name of a box in a file of format 2."""
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def _parsed(key: str, file: Path) -> tuple[str, Box]:
    found = _KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"'{file}' has a tensor '{key}'; expected a name such as 'w[0:4,0:8]'")
    spans = [span.split(":") for span in found[2].split(",") if span]
    return found[1], tuple((int(start), int(stop)) for start, stop in spans)


def state_file(kind: str, process: int | None) -> str:
    """Where "weights" or "optimizer" lie: all of them, or what one process of several wrote."""
    return f"{kind}.safetensors" if process is None else f"{kind}-{process:05d}.safetensors"


def read_state_json(folder: Path) -> dict[str, Any]:
    """The `state.json` of a saved state."""
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    if state.get("format") not in _FORMATS:
        raise ValueError(
            f"'{folder / 'state.json'}' has format {state.get('format')}; "
            f"this version reads formats {', '.join(map(str, _FORMATS))}"
        )
    return state


def open_state(folder: Path, state: Mapping[str, Any], kind: str) -> TensorSource:
    """The "weights" or "optimizer" part of a saved state, whoever wrote it."""
    if state["format"] == 1:
        return FileTensors([folder / f"{kind}.safetensors"], boxed=False)
    return FileTensors([folder / name for name in state[kind]], boxed=True)


def read_whole(source: TensorSource) -> dict[str, Tensor]:
    """All parameters of a source."""
    return {name: source.read(name, whole(shape)) for name, shape in source.shapes().items()}
