"""What a process does in each wave, laid out once: buffers, views of tensors, operations.

Routes, buffers and tensors stay where they are from one transfer to the next, so that a transfer
of many small slices does not spend its time on finding them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .transfer_checksum import Checksum
from .transfer_link import Op
from .transfer_parts import Message, Part
from .transfer_route import Wave, aligned, buffer_bytes, header_words

__all__ = ["Copy", "Load", "Parcel", "Slot", "loads_of"]

Find = Callable[[Part], Tensor]
"""Where a part lies in an engine's tensor."""


class Slot(NamedTuple):
    """A part in a buffer.

    Attributes:
        part: Which.
        packed: Its place in the buffer, in the dtype and shape in which it travels.
        place: Its place in the engine's tensor.
        checksum: Of what is in the buffer.
    """

    part: Part
    packed: Tensor
    place: Tensor
    checksum: Checksum


class Parcel(NamedTuple):
    """A message in its buffer.

    Attributes:
        message: Which.
        device: That receives it; of a message to send, the one that packs it.
        header: i64[header_words], version, stamp and checksums.
        slots: Its parts.
        ops: One for every process that it is sent to, or the one by which it is received.
    """

    message: Message
    device: int
    header: Tensor
    slots: tuple[Slot, ...]
    ops: tuple[Op, ...]


class Copy(NamedTuple):
    """A part that does not leave the process."""

    part: Part
    read: Tensor
    place: Tensor


class Load(NamedTuple):
    """A wave."""

    receives: tuple[Parcel, ...]
    sends: tuple[Parcel, ...]
    moves: tuple[Copy, ...]
    copies: tuple[Copy, ...]


def loads_of(
    waves: Sequence[Wave], arenas: Sequence[Tensor], dtype: torch.dtype, read: Find, write: Find
) -> tuple[Load, ...]:
    """Lay out all waves; every other one in the same arena.

    Args:
        waves: What this process does.
        arenas: u8[bytes] each.
        dtype: Of elements on the way.
        read: Where a part is read.
        write: Where it is written.

    Raises:
        WeightsError: If the tensors are not as the plan says.
    """
    loads: list[Load] = []
    for index, wave in enumerate(waves):
        room = _Room(arenas[index % len(arenas)], dtype)
        receives = tuple(
            room.parcel(message, device, write, (process,), is_send=False)
            for message, device, process in wave.receives
        )
        sends = tuple(
            room.parcel(message, message.source, read, processes, is_send=True)
            for message, processes in wave.sends
        )
        moved = [part for move in wave.moves for part in move.message.parts]
        moves = tuple(Copy(part, read(part), write(part)) for part in moved)
        copies = tuple(Copy(part, read(part), write(part)) for part in wave.copies)
        loads.append(Load(receives, sends, moves, copies))
    return tuple(loads)


class _Room:
    """An arena, and how much of it is given away."""

    def __init__(self, arena: Tensor, dtype: torch.dtype) -> None:
        self._arena = arena
        self._dtype = dtype
        self._begin = 0

    def parcel(
        self, message: Message, device: int, find: Find, processes: tuple[int, ...], *,
        is_send: bool,
    ) -> Parcel:  # fmt: skip
        """A buffer for a message."""
        size, head = buffer_bytes(message), 8 * header_words(message)
        buffer = self._arena[self._begin : self._begin + size]
        self._begin += aligned(size)
        slots = tuple(
            Slot(part, data.view(self._dtype).view(part.shape), find(part), Checksum(part, data))
            for part, data in zip(message.parts, message.slices(buffer[head:]), strict=True)
        )
        story = f"bucket {message.bucket} of device {message.source}, with {message.parts[0]},"
        ops = tuple(Op(is_send, buffer, process, story) for process in processes)
        return Parcel(message, device, buffer[:head].view(torch.int64), slots, ops)
