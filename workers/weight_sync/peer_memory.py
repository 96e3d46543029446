"""Reading the tensors of other processes of a machine where they lie.

The kernel copies from one process's memory straight into another's (`process_vm_readv`), so nothing
is packed, and neither side needs memory for what is on the way. Both belong to one user and see
each other's process numbers. Where a kernel or a container forbids it, `readable` says so, and the
caller sends instead.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

_MOST_RUNS = 1024  # that one system call takes
_RUN_BYTES = 1 << 20  # of the longest run: one call copies at most 2 GiB
_WIDTH = 8  # of a row of a table: an address and strides
_SET_PTRACER, _ANYBODY = 0x59616D61, 2**64 - 1  # of prctl


@dataclass(frozen=True)
class PeerMemory:
    """Memory of processes of torch.distributed's default group that others may read."""

    sources: frozenset[int]  # Processes that this one can read
    readers: frozenset[int]  # Processes that can read this one
    pids: Sequence[int]  # Process -> its number for the kernel
    tables: Sequence[NDArray[np.int64]]  # Process -> address and strides in bytes of each tensor

    def read(self, source: int, numbers: Iterable[int], places: Iterable[Tensor]) -> None:
        """Fill tensors of this process with those of a process, of the same shapes and dtype.

        Args:
            source: One of `sources`.
            numbers: Which of the tensors that it offers.
            places: Where each goes.

        Raises:
            OSError: If the process has ended.
        """
        table = self.tables[source]
        runs = [_runs(table[number], place) for number, place in zip(numbers, places, strict=True)]
        read_memory(self.pids[source], np.concatenate(runs))


def read_memory(pid: int, runs: NDArray[np.int64]) -> int:
    """Copy runs of another process's memory; returns the bytes that the kernel has copied: all.

    `runs` is i64[runs, 3]: the address there, the address here, and bytes.
    """
    copied = 0
    for start in range(0, len(runs), _MOST_RUNS):
        some = runs[start : start + _MOST_RUNS]
        there, here = (np.ascontiguousarray(some[:, [column, 2]]) for column in (0, 1))
        sides = [
            (ctypes.c_void_p(one.ctypes.data), ctypes.c_ulong(len(some))) for one in (here, there)
        ]
        read = _c_library().process_vm_readv
        read.restype = ctypes.c_ssize_t
        found = read(pid, *sides[0], *sides[1], ctypes.c_ulong(0))
        if found != some[:, 2].sum():
            number = ctypes.get_errno()
            raise OSError(number, f"memory of process {pid} cannot be read: {os.strerror(number)}")
        copied += found
    return copied


@contextmanager
def readable(offered: Sequence[Tensor] | None, most: int) -> Generator[PeerMemory]:
    """Have the processes of the default group read each other's tensors, as far as they can.

    All of them must come here at once, and none leaves before all have read.

    Args:
        offered: What others may read of this process, in host memory; None if they may not.
        most: The largest number of tensors that any process offers.
    """
    size, mark = dist.get_world_size(), torch.tensor([secrets.randbits(62)])
    machine = 0 if offered is None else _machine()
    table = torch.zeros(1 + most, _WIDTH, dtype=torch.int64)
    table[0, :4] = torch.tensor([machine, os.getpid(), mark.data_ptr(), int(mark)])
    for row, tensor in zip(table[1:].numpy(), offered or (), strict=False):
        row[0] = tensor.data_ptr()
        row[1 : 1 + tensor.ndim] = tensor.stride()
        row[1:] *= tensor.element_size()
    _admit_readers(_ANYBODY)
    try:
        tables = [torch.empty_like(table) for _ in range(size)]
        dist.all_gather(tables, table)
        heads = [one[0].tolist() for one in tables]
        own = torch.tensor([machine > 0 and _can_read(machine, *head[:4]) for head in heads])
        every = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(every, own)
        process = dist.get_rank()
        yield PeerMemory(
            frozenset(other for other in range(size) if own[other]),
            frozenset(other for other in range(size) if every[other][process]),
            [head[1] for head in heads],
            [one[1:].numpy() for one in tables],
        )
        dist.barrier()
    finally:
        _admit_readers(0)


def _can_read(machine: int, its_machine: int, pid: int, address: int, mark: int) -> bool:
    """Whether a process is here, may be read, and is the one that it says it is."""
    found = np.zeros(1, np.int64)
    with suppress(OSError):
        if machine == its_machine:
            read_memory(pid, np.array([[address, found.ctypes.data, found.nbytes]]))
    return int(found[0]) == mark


def _machine() -> int:
    """A number of the processes that know each other by their numbers; 0 if they are not read."""
    try:
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        assert _c_library().process_vm_readv
    except (OSError, AttributeError):  # another system than Linux
        return 0
    return 1 + (xxhash.xxh3_64_intdigest("\0".join(names).encode()) >> 2)


def _admit_readers(which: int) -> None:
    # Where Yama guards processes, each says who may read it; elsewhere this does nothing.
    if hasattr(_c_library(), "prctl"):
        rest = [ctypes.c_ulong(one) for one in (which, 0, 0, 0)]
        _c_library().prctl(_SET_PTRACER, *rest)


@lru_cache(maxsize=1)
def _c_library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _runs(row: NDArray[np.int64], place: Tensor) -> NDArray[np.int64]:
    """The runs of bytes, for `read_memory`, that lie together there and here."""
    shape, run = list(place.shape), place.element_size()
    here = [stride * run for stride in place.stride()]
    there = row[1 : 1 + len(shape)].tolist()
    while shape and (shape[-1] == 1 or here[-1] == there[-1] == run):
        run *= shape.pop()
        del here[-1], there[-1]
    starts = np.array([[row[0], place.data_ptr(), run]])
    for size, *strides in zip(shape, there, here, strict=True):
        steps = np.arange(size)[:, None] * np.array([[*strides, 0]])
        starts = (starts[:, None] + steps).reshape(-1, 3)
    parts = np.arange(0, run, _RUN_BYTES)[:, None] * np.array([[1, 1, 0]])
    found = (starts[:, None] + parts).reshape(-1, 3)
    found[:, 2] = np.tile(np.minimum(run - parts[:, 0], _RUN_BYTES), len(starts))
    return found
