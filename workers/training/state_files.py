"""Tensors on their way into safetensors files, while their owner goes on.

    take     note which tensors they are; those of a GPU are copied to pinned host memory
    write    in another thread: file by file, hashed as it is written
    keep     before the owner changes them: copy what has not been read yet

On a CPU nothing is copied as long as nothing changes: rollouts read weights and leave the optimizer
alone, and usually all is written when training begins. What is written are the bytes that the
tensors had when they were taken, whichever way they go.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ...dataflow.errors import StateError
from ...dataflow.files import WrittenFile, write_hashed
from .host_memory import HostRoom, cut_pieces

_AT_ONCE = 8 << 20
"""Bytes that are read, hashed and written at once."""

_BLOCK_BYTES = 256 << 20
"""Size of a block of pinned memory: torch makes it in powers of two."""

_ROOM_S = 60.0
"""Longest wait of a change for the disk where there is no room for a copy."""

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls and orders them: the widest come first, so that all are aligned."""

Writes = Callable[[Path, Callable[[], bool]], Mapping[str, WrittenFile]]
"""Writes the files into a folder unless they are unwanted; returns what was written."""


@dataclass
class _Source:
    """Bytes of a tensor, u8[n] on the CPU."""

    data: Tensor  # The bytes
    live: Tensor | None = None  # The owner's tensor that they belong to; None if they are a copy
    version: int = 0  # How often that had been changed in place


@dataclass(frozen=True)
class _Held:
    """A tensor's content for a file; its own memory may be given up meanwhile."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    sources: list[_Source]


class StateFiles:
    """One state after another on its way into files."""

    def __init__(self) -> None:
        self.room = HostRoom(_BLOCK_BYTES)  # Where what a GPU has is copied to
        self._pieces: list[Tensor] = []
        self._lock = threading.Lock()
        self._left: dict[int, _Source] = {}
        self._ended = threading.Event()

    def take(self, files: Mapping[str, Mapping[str, Tensor]]) -> Writes:
        self.keep()  # of a state that was not written
        self.room.give_back(self._pieces)  # what was copied before is read no more
        every = [one for tensors in files.values() for one in tensors.values()]
        sizes = [one.nbytes for one in every if one.device.type != "cpu"]
        self._pieces = self.room.take(sum(sizes))
        parts = cut_pieces(self._pieces, sizes)
        taken = {
            name: {
                key: _Held(one.dtype, tuple(one.shape), one.nbytes, _sources(one, parts))
                for key, one in tensors.items()
            }
            for name, tensors in files.items()
        }
        for device in {one.device for one in every}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        read = (one for held in taken.values() for found in held.values() for one in found.sources)
        self._left = {id(one): one for one in read}
        self._ended.clear()

        def write(folder: Path, is_unwanted: Callable[[], bool]) -> Mapping[str, WrittenFile]:
            written: dict[str, WrittenFile] = {}
            try:
                for name, held in taken.items():
                    parts = self._parts(folder / name, held, is_unwanted)
                    written[name] = write_hashed(folder / name, parts)
            except _UnwantedError:
                return {}
            finally:
                with self._lock:
                    taken.clear()
                    self._left.clear()
                self._ended.set()
            return written

        return write

    @property
    def num_left(self) -> int:
        return len(self._left)

    def keep(self) -> None:
        """Copy what has been taken and not been written: it is about to change.

        Where there is no room for a copy this waits for the disk first.
        """
        left = [one for one in list(self._left.values()) if one.live is not None]
        if not left:
            return
        if sum(one.data.numel() for one in left) > psutil.virtual_memory().available // 2:
            self._ended.wait(_ROOM_S)
        with self._lock:
            for one in self._left.values():
                if one.live is not None:
                    _check(one)
                    one.data, one.live = one.data.clone(), None

    def _parts(
        self,
        path: Path,
        held: Mapping[str, _Held],
        is_unwanted: Callable[[], bool],
    ) -> Iterator[bytes | memoryview]:
        """A safetensors file, byte by byte as the library would write it."""
        order = list(_DTYPES)
        names = sorted(held, key=lambda key: (order.index(held[key].dtype), key))
        yield _header({name: held[name] for name in names})
        staging = torch.empty(_AT_ONCE, dtype=torch.uint8)
        for name in names:
            for source in held[name].sources:
                for begin in range(0, source.data.numel(), _AT_ONCE):
                    if is_unwanted():
                        raise _UnwantedError(path)
                    yield self._read(source, begin, staging)
                with self._lock:
                    # It is on its way whole: its owner may change it from now on.
                    self._left.pop(id(source), None)

    def _read(self, source: _Source, begin: int, staging: Tensor) -> memoryview:
        with self._lock:
            part = source.data[begin : begin + _AT_ONCE]
            if source.live is None:
                return memoryview(part.numpy().data)
            # The disk may hang while it takes a part, and the owner must not hang with it.
            # Not by numpy: a storage that it has seen can be offloaded no more.
            ctypes.memmove(staging.data_ptr(), part.data_ptr(), len(part))
            _check(source)
        return memoryview(staging[: len(part)].numpy().data)


def _sources(tensor: Tensor, pinned: Iterator[list[Tensor]]) -> list[_Source]:
    found = tensor.detach()
    if tensor.device.type != "cpu":
        data, parts = found.contiguous().reshape(-1).view(torch.uint8), next(pinned)
        for part, own in zip(parts, data.split([len(part) for part in parts]), strict=True):
            part.copy_(own, non_blocking=True)  # is there once the device has been synchronized
        return [_Source(part) for part in parts]
    # Tensors of inference mode do not count their changes, so they could not be checked.
    if not found.is_contiguous() or found.is_inference():
        copy = found.clone(memory_format=torch.contiguous_format)
        return [_Source(copy.reshape(-1).view(torch.uint8))]
    data = found.reshape(-1).view(torch.uint8)
    return [_Source(data, tensor, tensor._version)]  # pyright: ignore[reportPrivateUsage] - there is no other name for it


class _UnwantedError(Exception):
    """The file that is being written is not wanted any more."""


def _check(source: _Source) -> None:
    live = source.live
    if live is not None and live._version != source.version:  # pyright: ignore[reportPrivateUsage] - see `_sources`
        raise StateError(
            f"a tensor {list(live.shape)} was changed while its checkpoint was being written; "
            "what changes it must call StateFiles.keep before"
        )


def _header(tensors: Mapping[str, _Held]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, held in tensors.items():
        begin, end = end, end + held.num_bytes
        dtype = _DTYPES[held.dtype]
        entries[name] = {"dtype": dtype, "shape": list(held.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # Data begins at a multiple of eight bytes, as the library has it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
