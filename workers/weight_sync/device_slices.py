"""What a transfer plan asks of one device: which slices to read, to write and to copy.

A *part* is one move of one parameter. Parts of one bucket that go from one device to the same
devices form a *message*: they are packed once, next to each other, in the order of the plan.
Sender and receiver derive the same messages from the plan.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...planner.inputs.model_shape import DTYPE_BYTES
from ...planner.resharding.box import Box, volume
from ...planner.resharding.plan import Move, MovedParam, TransferPlan, window
from .version_tracker import WeightsError

Tensors = Mapping[str, Tensor]
"""An engine's own tensors on one device, by the names that its sharding uses."""


_Place = tuple[int, int, tuple[int, ...]]
"""Of a message: bucket, source, destinations."""


class Part(NamedTuple):
    """One move of one parameter."""

    param: MovedParam
    move: Move

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box, in the order of the logical parameter's dimensions."""
        return tuple(stop - start for start, stop in self.move.box)

    def __str__(self) -> str:
        return f"slice {self.move.box} of parameter '{self.param.name}'"


@dataclass(frozen=True)
class Message:
    """Parts that travel together.

    Attributes:
        bucket: Of all parts.
        source: The device that packs them.
        destinations: The devices that each get all of them, ascending.
        parts: In the order of the plan.
        element_bytes: Of one element on the way.
    """

    bucket: int
    source: int
    destinations: tuple[int, ...]
    parts: tuple[Part, ...]
    element_bytes: int

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each part's bytes end in the packed message."""
        sizes = (volume(part.move.box) * self.element_bytes for part in self.parts)
        return tuple(accumulate(sizes))

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [end - begin for begin, end in zip((0, *self.ends), self.ends, strict=False)]

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return self.ends[-1]

    def slices(self, payload: Tensor) -> Iterator[Tensor]:
        """The bytes of each part, as views of u8[num_bytes]."""
        yield from payload.split(self.sizes)


def dtype_of(plan: TransferPlan) -> torch.dtype:
    """The dtype in which elements travel."""
    return getattr(torch, plan.dtype)


def plan_stamp(plan: TransferPlan) -> int:
    """A number that two different plans hardly share."""
    what = (plan.params, plan.groups, plan.moves, plan.dtype)
    return zlib.crc32(repr(what).encode())


def messages_of(plan: TransferPlan, devices: Sequence[int]) -> Mapping[int, tuple[Message, ...]]:
    """Device -> the messages it sends or receives, in the same order on all of them.

    Args:
        plan: The plan.
        devices: Whose messages are wanted; those of other devices are not worked out.
    """
    wanted = set(devices)
    partners = {m.source for m in plan.moves if m.destination in wanted} | wanted
    moves: dict[tuple[int, int, Box], list[Move]] = {}
    for move in plan.moves:
        if not move.is_copy and move.source in partners:
            moves.setdefault((move.source, move.group, move.box), []).append(move)
    together: dict[_Place, list[tuple[MovedParam, list[Move]]]] = {}
    for (source, group, _), alike in moves.items():
        to = tuple(sorted(move.destination for move in alike))
        if source in wanted or wanted.intersection(to):
            for index in plan.groups[group]:
                param = plan.params[index]
                together.setdefault((param.bucket, source, to), []).append((param, alike))
    found = defaultdict[int, list[Message]](list)
    for place in sorted(together):
        for device in wanted.intersection((place[1], *place[2])):
            found[device].append(_message(place, together[place], device, DTYPE_BYTES[plan.dtype]))
    return {device: tuple(found[device]) for device in devices}


def _message(
    place: _Place, alike: Sequence[tuple[MovedParam, list[Move]]], device: int, element_bytes: int
) -> Message:
    """With the moves to `device`, if it is one of the destinations."""
    parts = (
        Part(param, next((m for m in moves if m.destination == device), moves[0]))
        for param, moves in alike
    )
    return Message(*place, tuple(parts), element_bytes)


def read_view(part: Part, tensors: Tensors) -> Tensor:
    """Where a part lies on the device that sends it: logical order of dimensions, its own dtype.

    Raises:
        WeightsError: If the tensor is not there or too small.
    """
    param, move = part
    return _view(
        part, tensors, param.source_tensor, param.source_dims, move.source_start, move.source
    )


def write_view(part: Part, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """Where a part is to lie on the device that receives it.

    Raises:
        WeightsError: If the tensor is not there, too small, or of another dtype than the plan's.
    """
    param, move = part
    found = _view(part, tensors, param.destination_tensor, param.destination_dims,
                  move.destination_start, move.destination)  # fmt: skip
    if found.dtype != dtype:
        raise WeightsError(
            f"{part} goes to tensor '{param.destination_tensor}' on device {move.destination}, "
            f"which is {_name(found.dtype)}; the plan is for {_name(dtype)}. Describe the "
            "destination with the dtype it stores"
        )
    return found


def _view(
    part: Part, tensors: Tensors, name: str, dims: tuple[int, ...], start: tuple[int, ...],
    device: int,
) -> Tensor:  # fmt: skip
    if name not in tensors:
        raise WeightsError(
            f"{part} lies in tensor '{name}' on device {device}, and there is no such tensor; the "
            f"engine has {len(tensors)}"
        )
    tensor = tensors[name].detach()
    lengths = [part.shape[dim] for dim in dims]
    fits = len(tensor.shape) == len(dims) and all(
        begin + length <= size
        for begin, length, size in zip(start, lengths, tensor.shape, strict=True)
    )
    if not fits:
        raise WeightsError(
            f"{part} lies in tensor '{name}' on device {device}, from {list(start)} over "
            f"{lengths}; the tensor is only {list(tensor.shape)}. The sharding does not describe "
            "this engine"
        )
    found = tensor[window(part.move.box, dims, start)]
    return found.permute([dims.index(dim) for dim in range(len(dims))])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
