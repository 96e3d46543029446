"""What a process does in each wave, laid out once: buffers, views of tensors, operations.

Routes, buffers and tensors stay where they are from one transfer to the next, so that a transfer
of many small slices does not spend its time on finding them.

A message goes in pieces, which follow from the plan alone: every large part is a piece of its own,
and the small parts are packed behind a header into one piece, the last. A large part that lies in
the engine's tensor as it travels is sent from there, or received there; all others pass through a
buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .checksum import Checksum
from .device_slices import Message, Part, same_memory
from .p2p_link import Op
from .p2p_route import Wave, header_words

__all__ = ["Copy", "Layout", "Load", "Parcel", "Piece", "Slot"]

_ALIGN = 64

Find = Callable[[Part], Tensor]
"""Where a part lies in an engine's tensor."""


class Slot(NamedTuple):
    """A part as it travels.

    Attributes:
        part: Which.
        packed: In the dtype and shape in which it travels: its place in a buffer, or `place`.
        place: Its place in the engine's tensor.
        checksum: Of what is in `packed`.
    """

    part: Part
    packed: Tensor
    place: Tensor
    checksum: Checksum

    @property
    def is_direct(self) -> bool:
        """Whether it is sent from, or received in, the engine's tensor."""
        return self.packed is self.place


class Piece(NamedTuple):
    """What is sent at once.

    Attributes:
        slots: One large part, or all small ones.
        ops: One for every process that it is sent to, or the one by which it is received.
    """

    slots: tuple[Slot, ...]
    ops: tuple[Op, ...]


class Parcel(NamedTuple):
    """A message in its buffers.

    Attributes:
        message: Which.
        device: That receives it; of a message to send, the one that packs it.
        header: i64[header_words], version, stamp and checksums in the order of `slots`; it goes
            with the last piece.
        pieces: In the order in which they go.
    """

    message: Message
    device: int
    header: Tensor
    pieces: tuple[Piece, ...]

    @property
    def slots(self) -> Iterator[Slot]:
        """All parts, in the order in which they go."""
        return (slot for piece in self.pieces for slot in piece.slots)


class Copy(NamedTuple):
    """A part that does not leave the process; `is_there` if both are the same memory."""

    part: Part
    read: Tensor
    place: Tensor
    is_there: bool


class Load(NamedTuple):
    """A wave; `awaited` are all receiving operations in the order in which they are sent."""

    awaited: tuple[Op, ...]
    receives: tuple[Parcel, ...]
    sends: tuple[Parcel, ...]
    moves: tuple[Copy, ...]
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Layout:
    """How messages lie in buffers and tensors.

    Attributes:
        dtype: Of elements on the way.
        device: Where buffers lie.
        large_bytes: Parts of this size and more are pieces of their own.
        read: Where a part is read.
        write: Where it is written.
    """

    dtype: torch.dtype
    device: torch.device
    large_bytes: int
    read: Find
    write: Find

    def loads(self, waves: Sequence[Wave]) -> tuple[tuple[Load, ...], int]:
        """Lay out all waves; every other one in the same buffer.

        Returns:
            The waves, and the bytes of both buffers together.

        Raises:
            WeightsError: If the tensors are not as the plan says.
        """
        drafts = [self._drafts(wave) for wave in waves]
        size = max((sum(draft.num_bytes for draft in wave) for wave in drafts), default=0)
        arenas = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        loads: list[Load] = []
        for number, (wave, listed) in enumerate(zip(waves, drafts, strict=True)):
            ends = [0]
            for draft in listed:
                ends.append(ends[-1] + draft.num_bytes)
            parcels = [
                draft.parcel(arenas[number % 2][begin:end], self.dtype)
                for draft, (begin, end) in zip(listed, pairwise(ends), strict=True)
            ]
            receives, sends = parcels[: len(wave.receives)], parcels[len(wave.receives) :]
            moved = [part for move in wave.moves for part in move.message.parts]
            copies = self._copies(wave.copies)
            awaited = tuple(_awaited(receives))
            loads.append(Load(awaited, tuple(receives), tuple(sends), self._copies(moved), copies))
        return tuple(loads), 2 * size

    def _drafts(self, wave: Wave) -> list[_Draft]:
        """Receives, then sends."""
        return [
            self._draft(message, device, (process,), self.write, is_send=False)
            for message, device, process in wave.receives
        ] + [
            self._draft(message, message.source, processes, self.read, is_send=True)
            for message, processes in wave.sends
        ]

    def _draft(
        self, message: Message, device: int, processes: tuple[int, ...], find: Find, *,
        is_send: bool,
    ) -> _Draft:  # fmt: skip
        large: list[_Found] = []
        small: list[_Found] = []
        for part, num_bytes in zip(message.parts, message.sizes, strict=True):
            place = find(part)
            is_large = num_bytes >= self.large_bytes
            is_direct = (
                is_large
                and place.is_contiguous()
                and place.dtype == self.dtype
                and place.device == self.device
            )
            (large if is_large else small).append(_Found(part, place, num_bytes, is_direct))
        return _Draft(message, device, processes, is_send, tuple(large), tuple(small))

    def _copies(self, parts: Sequence[Part]) -> tuple[Copy, ...]:
        found = ((part, self.read(part), self.write(part)) for part in parts)
        return tuple(Copy(*each, same_memory(each[1], each[2])) for each in found)


class _Found(NamedTuple):
    """A part, where it lies, and whether it can go from or to there as it is."""

    part: Part
    place: Tensor
    num_bytes: int
    is_direct: bool

    def slot(self, data: Tensor, dtype: torch.dtype) -> Slot:
        """In the buffer u8[num_bytes]."""
        packed = data.view(dtype).view(self.part.shape)
        return Slot(self.part, packed, self.place, Checksum(self.part, data))

    def direct(self) -> tuple[Slot, Tensor]:
        """In the engine's tensor, and its bytes."""
        data = self.place.view(-1).view(torch.uint8)
        return Slot(self.part, self.place, self.place, Checksum(self.part, data)), data


@dataclass(frozen=True)
class _Draft:
    """A message before it has buffers."""

    message: Message
    device: int
    processes: tuple[int, ...]
    is_send: bool
    large: tuple[_Found, ...]
    small: tuple[_Found, ...]

    @property
    def num_bytes(self) -> int:
        """Of the buffer."""
        return self._head_bytes + sum(
            _aligned(found.num_bytes) for found in self.large if not found.is_direct
        )

    @property
    def _head_bytes(self) -> int:
        small = sum(found.num_bytes for found in self.small)
        return _aligned(8 * header_words(self.message) + small)

    def parcel(self, buffer: Tensor, dtype: torch.dtype) -> Parcel:
        """In u8[num_bytes]."""
        pieces: list[Piece] = []
        begin = self._head_bytes
        for found in self.large:
            if found.is_direct:
                slot, data = found.direct()
            else:
                data = buffer[begin : begin + found.num_bytes]
                begin += _aligned(found.num_bytes)
                slot = found.slot(data, dtype)
            pieces.append(Piece((slot,), self._ops(data, found.part)))
        end = 8 * header_words(self.message)
        header = buffer[:end].view(torch.int64)
        slots: list[Slot] = []
        for found in self.small:
            slots.append(found.slot(buffer[end : end + found.num_bytes], dtype))
            end += found.num_bytes
        first = self.small[0].part if self.small else self.message.parts[0]
        pieces.append(Piece(tuple(slots), self._ops(buffer[:end], first)))
        return Parcel(self.message, self.device, header, tuple(pieces))

    def _ops(self, data: Tensor, part: Part) -> tuple[Op, ...]:
        story = f"bucket {self.message.bucket} of device {self.message.source}, with {part},"
        return tuple(Op(self.is_send, data, process, story) for process in self.processes)


def _awaited(parcels: Sequence[Parcel]) -> Iterator[Op]:
    """Several devices of a process get a message piece by piece, not one after another."""
    for _, alike in groupby(parcels, lambda parcel: parcel.message.place):
        for pieces in zip(*(parcel.pieces for parcel in alike), strict=True):
            for piece in pieces:
                yield from piece.ops


def _aligned(num_bytes: int) -> int:
    """The next multiple of 64."""
    return -(-num_bytes // _ALIGN) * _ALIGN
