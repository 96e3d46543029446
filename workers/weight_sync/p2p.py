"""A transfer plan carried out between processes: bucketed point-to-point over torch.distributed.

Every process has some of the plan's devices, usually one. A bucket is packed while the one before
it is under way; there is never a whole parameter or a whole model in between, only the slices of
two buckets. Large slices that lie in an engine's tensor as they travel are not packed: they are
sent from there, and received where they belong. What two devices of one process exchange is copied
in memory.

Every message carries the version, a stamp of the plan and a checksum of each slice, made by
whoever held the slice at first and forwarded by relays. A slice counts as held only if all three
are as expected. One that is not is refused: it stays out of the engine's tensor if it came through
a buffer, and may be in it if it was received there, and in both cases its parameter is partial for
`HeldWeights`, which was told before the first byte came. The rest of the transfer goes on, so that
nobody waits in vain, and the error comes at the end. Which parameters an engine then has whole, and
of which version, its `HeldWeights` say; without one, tensors must not be used after an error.

Two ends of one device in two processes on one GPU: see `transfer_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.resharding.box import Box
from ...planner.resharding.plan import TransferPlan
from .device_slices import (
    Message,
    Part,
    Tensors,
    dtype_of,
    plan_stamp,
    read_view,
    write_view,
)
from .p2p_buffers import Copy, Layout, Load, Parcel
from .p2p_link import Clock, Link, Op
from .p2p_route import waves_of
from .version_tracker import HeldWeights, WeightsError

__all__ = ["Delivered", "Ends", "Transfer", "execute"]

LARGE_BYTES = 2**18
"""A slice of this size gains more by going from tensor to tensor than a send of its own costs."""

_VOID = -1
"""Sent in place of the version by a relay that did not receive all of what it should pass on."""


@dataclass(frozen=True)
class Ends:
    """A device's tensors, by the names that the two shardings use.

    Attributes:
        source: The source engine's; empty if the source is not on this device.
        destination: The destination engine's; empty likewise.
        held: What the destination engine knows of its weights; told of every slice.
    """

    source: Tensors = field(default_factory=dict[str, Tensor])
    destination: Tensors = field(default_factory=dict[str, Tensor])
    held: HeldWeights | None = None


@dataclass
class Delivered:
    """What a transfer came to in one process.

    Attributes:
        received_bytes: Slices that came from other processes.
        sent_bytes: Slices that went to other processes.
        header_bytes: Versions, stamps and checksums received with them.
        moved_bytes: Copied between two devices of this process.
        copied_bytes: Copied on one device.
        staging_bytes: Size of the buffers, both waves together.
        seconds: Wall time.
    """

    received_bytes: int = 0
    sent_bytes: int = 0
    header_bytes: int = 0
    moved_bytes: int = 0
    copied_bytes: int = 0
    staging_bytes: int = 0
    seconds: float = 0.0


def execute(
    plan: TransferPlan,
    here: Mapping[int, Ends],
    process_of: Mapping[int, int],
    *,
    version: int,
    deadline_s: float,
    group: dist.ProcessGroup | None = None,
) -> Delivered:
    """Carry out a plan once; see `Transfer`, which keeps buffers and routes for the next time."""
    return Transfer(plan, here, process_of, group=group).run(version, deadline_s=deadline_s)


class Transfer:
    """One process's share of a plan, ready to be carried out again and again.

    Args:
        plan: The same in all processes.
        here: The devices of this process; their tensors must stay where they are.
        process_of: Device -> rank in the group, for all devices of the plan.
        group: Gloo, or NCCL with all tensors on CUDA devices; torch.distributed's default group
            if None. Not used, and need not exist, if one process has all devices.
        large_bytes: Slices of this size and more are sent one by one; the same in all processes.

    Raises:
        WeightsError: If the plan, the places and the tensors do not fit together.
    """

    def __init__(
        self,
        plan: TransferPlan,
        here: Mapping[int, Ends],
        process_of: Mapping[int, int],
        *,
        group: dist.ProcessGroup | None = None,
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        has_all = bool(here) and process_of.keys() <= here.keys()
        link = None if has_all else Link(group)
        process = next(iter(process_of.values())) if link is None else link.process
        waves = waves_of(plan, here, process_of, process)
        device = _device(here) if link is not None and link.is_batched else torch.device("cpu")
        dtype = dtype_of(plan)

        def read(part: Part) -> Tensor:
            ends = here[part.move.source]
            return read_view(part, ends.destination if part.move.round else ends.source)

        def write(part: Part) -> Tensor:
            return write_view(part, here[part.move.destination].destination, dtype)

        loads, staging_bytes = Layout(dtype, device, large_bytes, read, write).loads(waves)
        self._share = _Share(
            loads=loads,
            held={d: ends.held for d, ends in here.items() if ends.held is not None},
            link=link,
            stamp=plan_stamp(plan),
            has_relays=any(move.round for move in plan.moves),
            staging_bytes=staging_bytes,
        )

    def run(self, version: int, *, deadline_s: float) -> Delivered:
        """Carry the plan out; all processes must.

        Args:
            version: Of the source's weights, and what receivers expect.
            deadline_s: For the whole transfer.

        Raises:
            WeightsError: If slices were refused (named; the rest has been written), or a message
                did not come or go by the deadline. The group is of no use after the latter.
        """
        return _Run(self._share, version, Clock(deadline_s)).go()


@dataclass(frozen=True)
class _Share:
    """What stays the same from one run to the next.

    Attributes:
        loads: What this process does, wave by wave.
        held: What is known of the weights on its devices.
        link: To other processes; None if there are none.
        stamp: The plan's.
        has_relays: Whether any device passes on what it received.
        staging_bytes: Size of the buffers.
    """

    loads: Sequence[Load]
    held: Mapping[int, HeldWeights]
    link: Link | None
    stamp: int
    has_relays: bool
    staging_bytes: int


def _device(here: Mapping[int, Ends]) -> torch.device:
    """Where buffers lie if messages must be sent from there."""
    tensors = (
        t for ends in here.values() for t in (*ends.source.values(), *ends.destination.values())
    )
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


_Key = tuple[int, str, Box]
"""Device, parameter, box."""

_Flight = tuple[Load, Mapping[Op, dist.Work]]
"""A wave under way, and the handle of each operation."""


class _Run:
    """One carrying out of a transfer."""

    def __init__(self, share: _Share, version: int, clock: Clock) -> None:
        self._share = share
        self._version = version
        self._clock = clock
        # Checksums that relays forward, and slices that were refused.
        self._claimed: dict[_Key, int] = {}
        self._refused: dict[_Key, str] = {}
        self._done = Delivered(staging_bytes=share.staging_bytes)

    def go(self) -> Delivered:
        before: _Flight | None = None
        for load in self._share.loads:
            flight = (load, self._start(load))
            if before is not None:
                self._finish(*before)
            self._do_local(load)
            before = flight
        if before is not None:
            self._finish(*before)
        self._done.seconds = self._clock.elapsed_s
        if self._refused:
            first = next(iter(self._refused.values()))
            raise WeightsError(
                f"{first}. Of this transfer {len(self._refused)} slice(s) were refused; send it "
                "again"
            )
        return self._done

    def _start(self, load: Load) -> Mapping[Op, dist.Work]:
        """Post receives first, so that they run while this process packs."""
        link = self._share.link
        if link is None:
            return {}
        self._announce(load)
        ops = [*load.awaited]
        works = [] if link.is_batched else link.post(ops)
        for parcel in load.sends:
            for ready in self._pack(parcel):
                ops += ready
                if not link.is_batched:
                    works += link.post(ready)
        return dict(zip(ops, link.post(ops) if link.is_batched else works, strict=True))

    def _announce(self, load: Load) -> None:
        """Void what will be received in place: from here on it may be half written."""
        for parcel in load.receives:
            held = self._share.held.get(parcel.device)
            for slot in parcel.slots if held is not None else ():
                if held is not None and slot.is_direct:
                    held.writing(slot.part.param.name, slot.part.move.box, self._version)

    def _pack(self, parcel: Parcel) -> Iterator[Sequence[Op]]:
        """Make a message piece by piece; what of it can go, goes while the rest is made."""
        message, header = parcel.message, [self._version, self._share.stamp]
        for number, piece in enumerate(parcel.pieces, 1):
            for slot in piece.slots:
                if not slot.is_direct:
                    slot.packed.copy_(slot.place)
                key = (message.source, slot.part.param.name, slot.part.move.box)
                claimed = self._claimed.get(key) if message.round else None
                if message.round and key in self._refused:
                    header[0] = _VOID
                header.append(slot.checksum(self._version) if claimed is None else claimed)
            if number == len(parcel.pieces):
                parcel.header.copy_(torch.from_numpy(np.array(header)))
            yield piece.ops
        self._done.sent_bytes += message.num_bytes * len(parcel.pieces[-1].ops)

    def _do_local(self, load: Load) -> None:
        for move in load.moves:
            if not move.part.move.round or self._passes_on(move.part):
                self._done.moved_bytes += self._copy(move)
        for copy in load.copies:
            self._done.copied_bytes += self._copy(copy)

    def _copy(self, copy: Copy) -> int:
        """Returns bytes written."""
        if copy.is_there:
            self._wrote(copy.part)
            return 0
        self._write(copy.part, copy.read, copy.place)
        return copy.place.numel() * copy.place.element_size()

    def _passes_on(self, part: Part) -> bool:
        """Whether a slice that is moved on inside the process had arrived whole."""
        source = (part.move.source, part.param.name, part.move.box)
        target = (part.move.destination, part.param.name, part.move.box)
        if source in self._refused:
            self._refused[target] = self._refused[source]
            return False
        if source in self._claimed:
            self._claimed[target] = self._claimed[source]
        return True

    def _write(self, part: Part, values: Tensor, place: Tensor) -> None:
        """Put a part in place and say so, before and after."""
        held = self._share.held.get(part.move.destination)
        if held is not None:
            held.writing(part.param.name, part.move.box, self._version)
        place.copy_(values)
        self._wrote(part)

    def _wrote(self, part: Part) -> None:
        held = self._share.held.get(part.move.destination)
        if held is not None:
            held.wrote(part.param.name, part.move.box, self._version)

    def _finish(self, load: Load, works: Mapping[Op, dist.Work]) -> None:
        """Wait for a wave, receives first and in turn: each is checked while others arrive."""
        for parcel in load.receives:
            found: list[int] = []
            for piece in parcel.pieces:
                Link.wait(piece.ops[0], works[piece.ops[0]], self._clock)
                found += [slot.checksum(self._version) for slot in piece.slots]
            self._accept(parcel, found)
        for parcel in load.sends:
            for op in (op for piece in parcel.pieces for op in piece.ops):
                Link.wait(op, works[op], self._clock)

    def _accept(self, parcel: Parcel, found: Sequence[int]) -> None:
        """Write the slices of a message that are what they should be, and note which are not.

        Args:
            parcel: That has arrived.
            found: The checksums of what has arrived.
        """
        message = parcel.message
        version, stamp, *checksums = parcel.header.tolist()
        self._done.received_bytes += message.num_bytes
        self._done.header_bytes += 8 * len(parcel.header)
        wrong = self._wrong(message, version, stamp)
        for slot, claimed, checksum in zip(parcel.slots, checksums, found, strict=True):
            part = slot.part
            if self._share.has_relays:
                self._claimed[parcel.device, part.param.name, part.move.box] = claimed
            if wrong or checksum != claimed:
                self._refused[parcel.device, part.param.name, part.move.box] = (
                    f"{part} from device {message.source} to device {parcel.device} "
                    f"{wrong or 'has the wrong checksum'}"
                )
            elif slot.is_direct:
                self._wrote(part)
            else:
                self._write(part, slot.packed, slot.place)

    def _wrong(self, message: Message, version: int, stamp: int) -> str:
        """What is wrong with a whole message; nothing if it is empty."""
        if stamp != self._share.stamp:
            return "was packed by another plan; both sides must use the same"
        if version == _VOID:
            return f"had not arrived whole on device {message.source}, which was to pass it on"
        if version != self._version:
            return f"is of version {version}; expected version {self._version}"
        return ""
