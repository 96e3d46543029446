"""Between the host and a device: what a sleeping worker keeps, and transfers that do not wait.

A plain `tensor.to("cuda")` waits until the device has done all that it was given before, and so do
`tensor.cpu()`, `x[mask]` and `bool(x)`. What decides where tokens lie comes from the host anyway:
`sent` remembers it, so that indices are made there and go one way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import psutil
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...dataflow.errors import WorkerError
from ...planner.formatting import bytes_text, percent_text


class HostRoom:
    """Host memory that sleeping workers are kept in, in pieces that are made once and used again.

    There is as much as has ever been in use at a time; it grows and is not given back. A GPU copies
    to and from pinned memory several times faster than to and from other memory, and pinning it
    takes longer than copying, so that what will be needed is made ahead, in a thread.
    """

    def __init__(self, piece_bytes: int = 64 << 20, *, pinned: bool = True) -> None:
        self.piece_bytes, self._pinned = piece_bytes, pinned
        self._free: list[Tensor] = []
        self.num_bytes = 0  # Of all pieces, in use or not
        self._ahead_bytes = 0  # Up to which the thread makes pieces
        self._lock = threading.Lock()

    def make_ahead(self, num_bytes: int) -> threading.Thread:
        """Make pieces for that many more bytes while the caller goes on.

        Raises:
            WorkerError: If the host has no room for them, as `take` does.
        """
        more = -(-num_bytes // self.piece_bytes) * self.piece_bytes
        self._check(more)
        self._ahead_bytes = max(self._ahead_bytes, self.num_bytes) + more
        thread = threading.Thread(target=self._make, daemon=True)
        thread.start()
        return thread

    def _make(self) -> None:
        while self.num_bytes < self._ahead_bytes:
            try:
                self._free.append(self._new())
            except RuntimeError:  # `take` asks again, and raises it where it is needed
                self._ahead_bytes = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        """Pieces, u8 each, of that many bytes or more; not handed out again until `give_back`."""
        number = -(-num_bytes // self.piece_bytes)
        self._check((number - len(self._free)) * self.piece_bytes)
        found: list[Tensor] = []
        while len(found) < number:
            try:
                found.append(self._free.pop())
            except IndexError:
                found.append(self._new())
        return found

    def _new(self) -> Tensor:
        made = torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        with self._lock:
            self.num_bytes += self.piece_bytes
        return made

    def _check(self, more: int) -> None:
        memory = psutil.virtual_memory()
        most = int(_MOST_OF_HOST * memory.total) - self.num_bytes
        if more > 0 and more > min(most, memory.available):
            raise WorkerError(
                f"what sleeps in this process needs {bytes_text(self.num_bytes + more)} of pinned "
                f"memory of the host, which has {bytes_text(memory.total)} "
                f"({bytes_text(memory.available)} free)\n    at most {percent_text(_MOST_OF_HOST)} "
                "of it may be pinned, and what is free\n    place training and generation on "
                "devices of their own, divide the model among more processes, or train adapters "
                "(model.lora.rank)"
            )

    def give_back(self, pieces: Sequence[Tensor]) -> None:
        self._free += pieces


_MOST_OF_HOST = 0.8
"""Share of the host's memory that a process pins at most: the system cannot page it out."""
_PINNED = HostRoom()
"""This process's room, empty until something on a GPU sleeps."""
MEMORY_TO_SPARE: WeakSet[Any] = WeakSet()
"""Objects with memory that only makes their next call faster. They `give_up` once others sleep."""


def pin_ahead(num_bytes: int) -> None:
    """Make room for what will sleep in this process besides what already does."""
    _PINNED.make_ahead(num_bytes)


class HostCopy:
    """Contents of a device's tensors, kept on the host; their memory there is given up.

    The tensors stay what they are, and so do all views of them: only the memory under them goes and
    comes back, at another place. They must not be read meanwhile. Those that are `void` will be
    written before they are read: they are not copied, and hold anything afterwards.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        device: str = "cuda",
        *,
        void: Iterable[Tensor] = (),
        room: HostRoom | None = None,
    ) -> None:
        for one in [*MEMORY_TO_SPARE] if device == "cuda" else []:
            one.give_up()
        storages = _storages(tensors, device)
        lost = _storages(void, device).keys()
        self._room = _PINNED if room is None and device == "cuda" else room
        self._void = [(storages[key], storages[key].nbytes()) for key in storages.keys() & lost]
        kept = [storage for key, storage in storages.items() if key not in lost]
        self._kept = [(storage, storage.nbytes()) for storage in kept]
        # The part of it that was copied
        self.num_copied_bytes = sum(size for _, size in self._kept)
        self.num_bytes = self.num_copied_bytes + sum(size for _, size in self._void)  # Given up
        if self._room is not None:
            self._pieces = self._room.take(self.num_copied_bytes)
        else:
            self._pieces = [torch.empty(self.num_copied_bytes, dtype=torch.uint8)]
        self._is_async = device == "cuda"
        for storage, _ in self._void:
            storage.resize_(0)
        with torch.no_grad():  # all copies are under way at once
            for (storage, _), parts in zip(self._kept, self._parts(), strict=True):
                for place, part in zip(_cut(storage, parts), parts, strict=True):
                    part.copy_(place, non_blocking=self._is_async)
                if not self._is_async:
                    storage.resize_(0)
            if self._is_async and self._kept:
                torch.cuda.synchronize(self._kept[0][0].device)
                for storage, _ in self._kept:
                    storage.resize_(0)
        if storages and device == "cuda":
            torch.cuda.empty_cache()  # else only this process could use what is free

    def restore(self) -> None:
        """Put everything back, bit for bit; what was void holds anything."""
        for storage, size in self._void:
            storage.resize_(size)
            prefer_huge_pages(_bytes(storage))
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

    def _parts(self) -> Iterator[list[Tensor]]:
        return cut_pieces(self._pieces, [size for _, size in self._kept])


def dropped(tensors: Collection[Tensor]) -> HostCopy:
    """Give up the memory of tensors that will be written before they are read again."""
    return HostCopy(tensors, next(iter(tensors)).device.type, void=tensors)


def copy_in(
    pairs: Iterable[tuple[Tensor, Tensor]],
    device: str = "cuda",
    room: HostRoom | None = None,
    mark: Callable[[], Any] = lambda: torch.cuda.current_stream().record_event(),
) -> None:
    """Write the second of each pair into the first, `place.copy_(data)`.

    What comes to a GPU from host memory that is not pinned goes through two pinned pieces, one of
    which is filled while the other is sent: several times as fast.
    """
    room, pieces, sent_off = room or _PINNED, list[Tensor](), deque[Any]()
    try:
        _copy_in(pairs, device, room, mark, pieces, sent_off)
    finally:
        for event in sent_off:
            event.synchronize()  # before others write to the pieces
        room.give_back(pieces)


def _copy_in(
    pairs: Iterable[tuple[Tensor, Tensor]],
    device: str,
    room: HostRoom,
    mark: Callable[[], Any],
    pieces: list[Tensor],
    sent_off: deque[Any],
) -> None:
    for place, data in pairs:
        fits = (place.shape, place.dtype) == (data.shape, data.dtype)
        fits = fits and place.is_contiguous() and data.is_contiguous()
        if place.device.type != device or data.device.type != "cpu" or not (fits and data.numel()):
            place.copy_(data)
            continue
        if not pieces:
            pieces += room.take(2 * room.piece_bytes)
        there, here = (x.reshape(-1).view(torch.uint8) for x in (place, data))
        parts = (x.split(room.piece_bytes) for x in (there, here))
        for to, part in zip(*parts, strict=True):
            if len(sent_off) == 2:
                sent_off.popleft().synchronize()
            pieces.reverse()
            staged = pieces[0][: len(part)].copy_(part)
            to.copy_(staged, non_blocking=True)
            sent_off.append(mark())


def cut_pieces(pieces: Sequence[Tensor], sizes: Iterable[int]) -> Iterator[list[Tensor]]:
    """For each size the parts of pieces that so many bytes lie in, one after another."""
    left, rest = iter(pieces), torch.empty(0, dtype=torch.uint8)
    for size in sizes:
        parts: list[Tensor] = []
        while size:
            rest = rest if len(rest) else next(left)
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
    return _bytes(storage).split([len(part) for part in parts])


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def give_back_freed(device: torch.device) -> None:
    """Give the memory that a call on the CPU has freed back to the system.

    The C library keeps what is freed between other allocations. What one call left there would lie
    beside what the next one needs: a quarter of a gigabyte of a small language model.
    """
    if device.type == "cpu":
        with suppress(OSError, TypeError, AttributeError):  # no C library of that kind, as on macOS
            ctypes.CDLL(None).malloc_trim(0)


def prefer_huge_pages(tensor: Tensor) -> None:
    """Have a tensor's memory on the CPU be mapped 2 MiB at a time when it is first written.

    That takes half the time of pages of 4 KiB. Where the system has no such pages, nothing changes.
    """
    begin = tensor.data_ptr() + -tensor.data_ptr() % mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - begin
    if tensor.device.type == "cpu" and num_bytes > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        advice = ctypes.c_int(mmap.MADV_HUGEPAGE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), advice)


def keep_few_kernels() -> None:
    """Have oneDNN keep fewer compiled matrix products than the 1,024 it keeps by default.

    Each takes a quarter of a megabyte, and batches differ in size. It reads the variable before its
    first product in a process; a value that is set already stays.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")


_HOST: Any = WeakTensorKeyDictionary()
"""A tensor that was sent -> what it was made from, as long as it lives."""


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; the same one if it is there. Neither may be written to afterwards."""
    if tensor.device == device:
        return tensor
    if tensor.device.type != "cpu":
        return tensor.to(device)
    # A copy from other memory than pinned one waits, whatever `non_blocking` says.
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    there = source.to(device, non_blocking=True)
    _HOST[there] = tensor
    return there


def on_host(tensor: Tensor) -> Tensor:
    """A tensor in host memory: itself, what it was sent from, or else a copy that is waited for."""
    if tensor.device.type == "cpu":
        return tensor
    known: Tensor | None = _HOST.get(tensor)
    return tensor.cpu() if known is None else known


def derived(tensor: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """`compute(tensor)`, made on the host and known there if the tensor was sent from there."""
    if tensor.device.type == "cpu" or tensor not in _HOST:
        return compute(tensor)
    return sent(compute(_HOST[tensor]), tensor.device)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x[mask]`, differentiable, and known on the host if `x` and `mask` are."""
    if mask.device.type == "cpu":
        return x[mask]
    if x in _HOST:
        return sent(_HOST[x][on_host(mask)], x.device)
    return x.flatten(0, 1).index_select(0, _places(mask))


def spread(values: Tensor, mask: Tensor, zero: Tensor) -> Tensor:
    """`zero` with values where `mask` is True, in their order, differentiable."""
    if mask.device.type == "cpu":
        more = [1] * (values.ndim - 1)
        return zero.masked_scatter(mask.view(*mask.shape, *more), values)
    flat = zero.flatten(0, mask.ndim - 1)
    return flat.index_copy(0, _places(mask), values).view(zero.shape)


def _places(mask: Tensor) -> Tensor:
    """i64[n]: where a mask, read row by row, is True."""
    return sent(torch.nonzero(on_host(mask).flatten())[:, 0], mask.device)
