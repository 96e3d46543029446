"""The checksum of a slice: bound to what the slice is, and as fast as memory is."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from .device_slices import Part

__all__ = ["Checksum", "checksum"]

_ROW_WORDS = 1024


class Checksum:
    """64 bits over a part's bytes, its parameter's name, its box and its version.

    In host memory it is XXH3, seeded with the identity: several times faster there than sums or a
    CRC. On a GPU the bytes are read as rows of 1024 64-bit words, and the exact sums of every row
    and of every column (integers, modulo 2**64) are hashed together with the identity: any damage
    to one word changes a sum, and so do words or rows that change places, and only the sums leave
    the device. Both ends of a message have it in the same kind of memory.

    Args:
        part: What the bytes are.
        data: u8[n], contiguous; may hold other bytes at every call.
    """

    def __init__(self, part: Part, data: Tensor) -> None:
        identity = f"{part.param.name}\0{part.move.box}\0{len(data)}".encode()
        self._identity = xxhash.xxh3_64_intdigest(identity)
        self._data = data
        self._array: NDArray[np.uint8] | None = data.numpy() if data.device.type == "cpu" else None

    def __call__(self, version: int) -> int:
        """Of the bytes as they are now, as version `version` of the weights."""
        stamp = version.to_bytes(8, "little", signed=True)
        seed = xxhash.xxh3_64_intdigest(stamp, self._identity)
        if self._array is None:
            sums = b"".join(found.tobytes() for found in _sums(self._data))
            digest = xxhash.xxh3_64_digest(sums, seed)
        else:
            digest = xxhash.xxh3_64_digest(self._array.data, seed)
        return int.from_bytes(digest, "little", signed=True)


def checksum(part: Part, data: Tensor, version: int) -> int:
    """The checksum of u8[n], once."""
    return Checksum(part, data)(version)


def _sums(data: Tensor) -> tuple[NDArray[np.generic], ...]:
    """Of rows and columns, on the device, and the bytes after the last row."""
    # After a part of odd size words do not begin on a word's boundary: such are copied.
    if data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    rows = len(data) // (8 * _ROW_WORDS)
    end = rows * 8 * _ROW_WORDS
    rest = data[end:].cpu().numpy()
    if not rows:
        return (rest,)
    table = data[:end].view(torch.int64).view(rows, _ROW_WORDS)
    return table.sum(0).cpu().numpy(), table.sum(1).cpu().numpy(), rest
