"""The channel between processes on one GPU: buckets stay in its memory, and are read there.

A sender packs into memory that receivers open by CUDA IPC, so nothing goes through the host but a
few numbers per slice, which lie in the executor's object store. The memory is used again once an
offer is forgotten: in a run there are two pieces for each bucket, of the version that copies have
and of the next. They stay when the worker sleeps; a receiver that wakes reads them.

    sender:    room -> pack -> publish ........................... forget -> room for the next
    receiver:                           obtain -> check -> copy

Before a receiver looks at a bucket it reads in the sender's ledger whether the offer still stands.
The ledger lies in memory of the host that is gone with the sender, so what a dead process had is
not read. Tensors in host memory are shared in the same way; that is for tests without a GPU.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import (
    rebuild_cuda_tensor,  # pyright: ignore[reportUnknownVariableType]
    reduce_tensor,  # pyright: ignore[reportUnknownVariableType]
)

from .channel import ChannelEnd, ObjectStoreChannel, Offer, Receiver
from .packets import Bucket, Packet, WeightsError

_DEVICE = 6  # Index of the device's number among the arguments of `rebuild_cuda_tensor`


class SharedFile:
    """An anonymous file, which other processes open by its path; gone with its process."""

    def __init__(self, num_bytes: int) -> None:
        self.number = os.memfd_create("penstock-weights")  # Its descriptor
        os.ftruncate(self.number, num_bytes)

    @property
    def path(self) -> str:
        """Path by which this process and others open the file."""
        return f"/proc/{os.getpid()}/fd/{self.number}"

    def close(self) -> None:
        """Close the file; it lives on while a process has it mapped."""
        os.close(self.number)


@dataclass(frozen=True)
class HostMemory:
    """Memory of the host that other processes can open."""

    path: str
    num_bytes: int  # Its length


@dataclass(frozen=True)
class CudaMemory:
    """Memory of a GPU that other processes can open."""

    gpu: str  # The GPU's own identifier, the same in all processes
    num_bytes: int  # Its length
    # Arguments of torch's `rebuild_cuda_tensor`: handles, sizes and offsets.
    arguments: tuple[Any, ...]


Memory = HostMemory | CudaMemory
"""The handle by which another process opens memory."""


def share_memory(num_bytes: int, device: torch.device) -> tuple[Tensor, Memory, SharedFile | None]:
    """Make memory on a device that other processes can open."""
    if device.type == "cuda":
        made = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        arguments: tuple[Any, ...] = reduce_tensor(made)[1]  # pyright: ignore[reportUnknownVariableType]
        return made, CudaMemory(_identifier(made.device), num_bytes, arguments), None
    file = SharedFile(num_bytes)
    return _mapped(file.path, num_bytes), HostMemory(file.path, num_bytes), file


def open_memory(memory: Memory) -> Tensor:
    """Open another process's memory, u8[num_bytes]; it is only to be read."""
    if isinstance(memory, HostMemory):
        return _mapped(memory.path, memory.num_bytes)
    seen = {_identifier(torch.device("cuda", at)): at for at in range(torch.cuda.device_count())}
    if memory.gpu not in seen:
        raise RuntimeError(
            f"they lie on GPU {memory.gpu}, and this process sees {', '.join(seen) or 'none'}; "
            "both must be on one GPU, or executor.transport another"
        )
    arguments = list(memory.arguments)
    # Processes that see different GPUs number the same one differently.
    arguments[_DEVICE] = seen[memory.gpu]
    return rebuild_cuda_tensor(*arguments)


def _mapped(path: str, num_bytes: int) -> Tensor:
    if not os.path.exists(path):  # torch's message would say less
        raise FileNotFoundError(f"{path} is not there: its process has ended")
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def _identifier(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


_WORD = 8  # Bytes of a number in the ledger
_NOBODY = -1


@dataclass(eq=False)
class _Piece:
    """A piece of memory for a bucket."""

    data: Tensor  # u8[bytes]
    memory: Memory  # What others open it by
    file: SharedFile | None  # What it lies in, if anything
    slot: int  # Its place in the ledger

    @property
    def kind(self) -> tuple[torch.device, int]:
        return self.data.device, len(self.data)


@dataclass(frozen=True)
class _Place:
    """The place of a bucket in shared memory."""

    memory: Memory  # Which begins with it; opened once by each receiver
    num_bytes: int  # Of the bucket
    slot: int  # Of the piece, in the sender's ledger
    machine: str  # The sender's
    ledger: str  # Path of its ledger there
    mark: int  # What the ledger begins with


class _Ledger:
    """A sender's file that has for each piece of its memory the number of its offer."""

    def __init__(self) -> None:
        self._file = SharedFile(_WORD)
        self.path = self._file.path
        # A path may be used again by another process; seven bytes, as the words in the file are
        # signed.
        self.mark = int.from_bytes(os.urandom(_WORD - 1), "little")
        self.write(0, self.mark)

    def write(self, slot: int, number: int) -> None:
        os.pwrite(self._file.number, number.to_bytes(_WORD, "little", signed=True), _WORD * slot)

    def close(self) -> None:
        # Receivers may have it open: what they read from then on is no mark.
        os.ftruncate(self._file.number, 0)
        self._file.close()


def _ledger_says(place: _Place) -> int:
    file = os.open(place.ledger, os.O_RDONLY)
    try:
        mark, number = (os.pread(file, _WORD, _WORD * slot) for slot in (0, place.slot))
    finally:
        os.close(file)
    if int.from_bytes(mark, "little") != place.mark:
        raise FileNotFoundError("the process that had them has ended")
    return int.from_bytes(number, "little", signed=True)


@dataclass
class _Opened:
    """Memory of one sender that a receiver has opened: slot -> tensor, for one ledger mark."""

    mark: int
    pieces: dict[int, Tensor] = field(default_factory=dict[int, Tensor])


class SharedDeviceChannel:
    """A channel that leaves buckets in the memory of a GPU that both groups take turns on."""

    def __init__(self, end: ChannelEnd) -> None:
        self._store = ObjectStoreChannel(end)
        self._ledger: _Ledger | None = None
        self._num_pieces = 0
        self._free: list[_Piece] = []
        self._handed: list[_Piece] = []
        self._offered: dict[int, list[_Piece]] = {}
        self._opened: dict[Receiver, _Opened] = {}

    def room(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._piece(num_bytes, device).data[:num_bytes]

    @property
    def num_bytes(self) -> int:
        offered = (piece for pieces in self._offered.values() for piece in pieces)
        return sum(len(piece.data) for piece in (*self._free, *self._handed, *offered))

    def _piece(self, num_bytes: int, device: torch.device) -> _Piece:
        # Memory without a byte cannot be mapped.
        kind = device, max(num_bytes, 1)
        piece = next((piece for piece in self._free if piece.kind == kind), None)
        if piece is None:
            self._num_pieces += 1
            piece = _Piece(*share_memory(kind[1], device), self._num_pieces)
        else:
            self._free.remove(piece)
        self._handed.append(piece)
        return piece

    def publish(self, packets: Mapping[Receiver, Packet]) -> Offer:
        ledger = self._ledger = self._ledger or _Ledger()
        places: dict[int, _Place] = {}
        used: list[_Piece] = []
        for bucket in (bucket for packet in packets.values() for bucket in packet.buckets):
            if id(bucket) not in places:
                piece = self._packed_in(bucket)
                places[id(bucket)] = _Place(
                    piece.memory, len(bucket), piece.slot, platform.node(), ledger.path, ledger.mark
                )
                used.append(piece)
        for device in {piece.data.device for piece in used}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # what is offered has been written
        offer = self._store.publish(
            {
                receiver: replace(packet, buckets=tuple(places[id(b)] for b in packet.buckets))
                for receiver, packet in packets.items()
            }
        )
        # The ledger is written last: until then a receiver refuses the offer.
        self._offered[offer.number] = used
        for piece in used:
            ledger.write(piece.slot, offer.number)
        # Buckets are alike from version to version, so pieces of other sizes will not be used
        # again.
        kinds = {piece.kind for piece in used}
        left = [piece for piece in (*self._free, *self._handed) if piece not in used]
        self._free = [piece for piece in left if piece.kind in kinds]
        self._handed = []
        _close([piece for piece in left if piece.kind not in kinds])
        return offer

    def _packed_in(self, bucket: Bucket) -> _Piece:
        data = bucket if isinstance(bucket, Tensor) else torch.from_numpy(bucket)  # pyright: ignore[reportUnknownMemberType]
        for piece in self._handed:
            # Packed into memory that `room` gave: nothing is left to copy.
            if piece.data.data_ptr() == data.data_ptr() and len(data) <= len(piece.data):
                return piece
        piece = self._piece(len(data), data.device)
        piece.data[: len(data)].copy_(data)
        return piece

    def obtain(self, offer: Offer) -> Packet | None:
        packet = self._store.obtain(offer)
        if packet is None:
            return None
        try:
            buckets = tuple(self._open(offer, place) for place in packet.buckets)
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{offer} cannot be read where they are: {error}") from error
        return replace(packet, buckets=buckets)

    def _open(self, offer: Offer, place: _Place) -> Tensor:
        if place.machine != platform.node():
            raise RuntimeError(
                f"they are in memory of machine '{place.machine}', and this process is on "
                f"'{platform.node()}'; leave executor.transport out"
            )
        if _ledger_says(place) != offer.number:
            raise RuntimeError("they are no longer there")
        sender = offer.group, offer.process
        opened = self._opened.get(sender)
        # Another mark is another process, whose slots are other memory.
        if opened is None or opened.mark != place.mark:
            opened = self._opened[sender] = _Opened(place.mark)
        if place.slot not in opened.pieces:
            opened.pieces[place.slot] = open_memory(place.memory)
        return opened.pieces[place.slot][: place.num_bytes]

    def forget(self, number: int) -> None:
        pieces = self._offered.pop(number, [])
        for piece in pieces:
            assert self._ledger is not None, "there are offers"
            self._ledger.write(piece.slot, _NOBODY)
        self._free += pieces

    def close(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()
        _close([*self._free, *self._handed, *(p for some in self._offered.values() for p in some)])
        self._free, self._handed = [], []
        self._offered.clear()
        self._opened.clear()


def _close(pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        if piece.file is not None:
            piece.file.close()
