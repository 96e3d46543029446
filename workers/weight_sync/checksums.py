"""What proves that bytes have arrived as they were sent: 64 bits for each part of a message.

Each is bound to the parameter's name, its box and the version, so neither bytes of another version
nor of another place pass for these.

In host memory it is XXH3 over the bytes. On a device hashing would take longer than the way: there
exact sums are made at the speed of memory, and those are hashed. The bytes are read as integers as
wide as the elements, in rows of 4,096. The sums of every row and of every column see each change of
one element, or of any elements of one row or one column, and any two that change places. Elements
that are altered at random in several rows and columns pass once in 2^64 times or less; someone who
alters them on purpose can make them pass. They are integers, so every device gives the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from .device_slices import Message, Part

_ROW = 4096
_WORDS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(message: Message, payload: Tensor, version: int) -> list[int]:
    """One of each part of a packed message.

    Args:
        message: What is in it.
        payload: u8[message.num_bytes], in host memory or on a device, which decides how.
        version: Of the weights that it is part of.
    """
    if payload.device.type != "cpu":
        return checksums_of_sums(message, payload, version)
    return [
        checksum(part, data, version)
        for part, data in zip(message.parts, message.slices(payload), strict=True)
    ]


def checksum(part: Part, data: Tensor, version: int) -> int:
    """XXH3 over a part's bytes, seeded with its identity: several times faster than a CRC.

    Args:
        part: What the bytes are.
        data: u8[n], contiguous, in host memory.
        version: Of the weights that they are part of.
    """
    digest = xxhash.xxh3_64_digest(data.numpy().data, _seed(part, len(data), version))
    return int.from_bytes(digest, "little", signed=True)


def checksums_of_sums(message: Message, payload: Tensor, version: int) -> list[int]:
    """The same over sums that are made where the payload is; they leave it together."""
    words = _WORDS[message.element_bytes]
    sums = [_sums(data.view(words)) for data in message.slices(payload)]
    on_host = torch.cat(sums).cpu().split([len(one) for one in sums])
    found: list[int] = []
    for part, size, one in zip(message.parts, message.sizes, on_host, strict=True):
        digest = xxhash.xxh3_64_digest(one.numpy().data, _seed(part, size, version))
        found.append(int.from_bytes(digest, "little", signed=True))
    return found


def _sums(words: Tensor) -> Tensor:
    """i64: of every column, of every row, and the words that are no whole row."""
    rows = len(words) // _ROW
    table, rest = words[: rows * _ROW].view(rows, _ROW), words[rows * _ROW :]
    by_column, by_row = table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)
    return torch.cat([by_column, by_row, rest.to(torch.int64)])


def _seed(part: Part, num_bytes: int, version: int) -> int:
    identity = f"{part.param.name}\0{part.move.box}\0{num_bytes}".encode()
    stamp = version.to_bytes(8, "little", signed=True)
    return xxhash.xxh3_64_intdigest(stamp, xxhash.xxh3_64_intdigest(identity))
