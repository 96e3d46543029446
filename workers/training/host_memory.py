"""Memory of the host: what a sleeping worker keeps there, and what a call has freed of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


class HostRoom:
    """Host memory that sleeping workers are kept in, in pieces that are made once and used again.

    There is as much as has ever been in use at a time; it grows and is not given back. A GPU copies
    to and from pinned memory several times faster than to and from other memory, and pinning it
    takes longer than copying.

    Args:
        piece_bytes: Of each piece. The allocator of pinned memory rounds up to powers of two.
        pinned: Whether a GPU is to read and write it.

    Attributes:
        num_bytes: Of all pieces, in use or not.
    """

    def __init__(self, piece_bytes: int = 64 << 20, *, pinned: bool = True) -> None:
        self._piece_bytes, self._pinned = piece_bytes, pinned
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        """Pieces, u8 each, of that many bytes or more; nobody else has them until `give_back`."""
        found: list[Tensor] = []
        for _ in range(-(-num_bytes // self._piece_bytes)):
            if not self._free:
                piece = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=self._pinned)
                self._free.append(piece)
                self.num_bytes += self._piece_bytes
            found.append(self._free.pop())
        return found

    def give_back(self, pieces: Sequence[Tensor]) -> None:
        """Give back pieces that `take` gave."""
        self._free += pieces


_PINNED = HostRoom()
"""This process's room, empty until something on a GPU sleeps."""


class HostCopy:
    """Contents of a device's tensors, kept on the host; their memory there is given up.

    The tensors stay what they are, and so do all views of them: only the memory under them goes and
    comes back, at another place. Nobody may look at them meanwhile.

    Args:
        tensors: Some may share memory. Those in host memory are left alone.
        device: The kind of device to be freed.
        void: Those of `tensors` that will be written before they are read. They are not copied, and
            hold anything afterwards.
        room: Where the copies lie; the process's pinned memory for a GPU, and new memory for a CPU,
            on which nothing is gained by keeping it.

    Attributes:
        num_bytes: Given up.
        num_copied_bytes: The part of it that was copied.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        device: str = "cuda",
        *,
        void: Iterable[Tensor] = (),
        room: HostRoom | None = None,
    ) -> None:
        storages = _storages(tensors, device)
        lost = _storages(void, device).keys()
        self._room = _PINNED if room is None and device == "cuda" else room
        self._void = [(storages[key], storages[key].nbytes()) for key in storages.keys() & lost]
        kept = [storage for key, storage in storages.items() if key not in lost]
        self._kept = [(storage, storage.nbytes()) for storage in kept]
        self.num_copied_bytes = sum(size for _, size in self._kept)
        self.num_bytes = self.num_copied_bytes + sum(size for _, size in self._void)
        self._pieces = self._new_pieces()
        self._is_async = device == "cuda"
        for storage, _ in self._void:
            storage.resize_(0)
        with torch.no_grad():
            self._save()
        if storages and device == "cuda":
            torch.cuda.empty_cache()  # else only this process could use what is free

    def restore(self) -> None:
        """Put everything back, bit for bit; what was void holds anything."""
        for storage, size in self._void:
            storage.resize_(size)
        with torch.no_grad():
            for (storage, size), parts in zip(self._kept, self._parts(), strict=True):
                storage.resize_(size)
                for place, part in zip(_cut(storage, parts), parts, strict=True):
                    place.copy_(part, non_blocking=self._is_async)
        if self._is_async and self._kept:
            torch.cuda.synchronize(self._kept[0][0].device)  # before others write to the pieces
        if self._room is not None:
            self._room.give_back(self._pieces)
        self._kept, self._void, self._pieces = [], [], []

    def _new_pieces(self) -> list[Tensor]:
        if self._room is not None:
            return self._room.take(self.num_copied_bytes)
        return [torch.empty(self.num_copied_bytes, dtype=torch.uint8)]

    def _save(self) -> None:
        """Copy what is kept, all of it under way at once, and give up its memory."""
        for (storage, _), parts in zip(self._kept, self._parts(), strict=True):
            for place, part in zip(_cut(storage, parts), parts, strict=True):
                part.copy_(place, non_blocking=self._is_async)
            if not self._is_async:
                storage.resize_(0)
        if self._is_async and self._kept:
            torch.cuda.synchronize(self._kept[0][0].device)
            for storage, _ in self._kept:
                storage.resize_(0)

    def _parts(self) -> Iterator[list[Tensor]]:
        """For each storage the parts of pieces that its bytes lie in, one after another."""
        pieces, rest = iter(self._pieces), torch.empty(0, dtype=torch.uint8)
        for _, size in self._kept:
            parts: list[Tensor] = []
            while size:
                rest = rest if len(rest) else next(pieces)
                parts.append(rest[:size])
                size -= len(parts[-1])
                rest = rest[len(parts[-1]) :]
            yield parts


def _storages(tensors: Iterable[Tensor], device: str) -> dict[int, torch.UntypedStorage]:
    """The memory under tensors on a kind of device, each once, by its identity."""
    return {
        tensor.untyped_storage()._cdata: tensor.untyped_storage()  # pyright: ignore[reportPrivateUsage] - its identity
        for tensor in tensors
        if tensor.device.type == device and tensor.untyped_storage().nbytes()
    }


def _cut(storage: torch.UntypedStorage, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """A storage's bytes in parts as long as these."""
    every = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return every.split([len(part) for part in parts])


def give_back_freed(device: torch.device) -> None:
    """Give the memory that a call on the CPU has freed back to the system.

    The C library keeps what is freed between other allocations. What one call left there would lie
    beside what the next one needs: a quarter of a gigabyte of a small language model.
    """
    if device.type == "cpu":
        trim = _trim()
        if trim is not None:
            trim(0)


def keep_few_kernels() -> None:
    """Have oneDNN keep fewer compiled matrix products than the 1,024 it keeps by default.

    Each takes a quarter of a megabyte, and batches differ in size. It reads the variable before its
    first product in a process; whoever has set it is obeyed.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")


@cache
def _trim() -> Any:
    """The C library's `malloc_trim`; None where it has none, as on macOS."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
