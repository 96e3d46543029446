"""A transfer plan carried out between processes: bucketed point-to-point over torch.distributed.

Every process has some of the plan's devices, usually one. A bucket is packed while the one before
it is under way; there is never a whole parameter or a whole model in between, only the slices of
two buckets. What two devices of one process exchange is copied in memory.

Every message carries the version, a stamp of the plan and a checksum of each slice, made by
whoever held the slice at first and forwarded by relays. A slice is written only if all three are as
expected; the rest of the transfer goes on, so that nobody waits in vain, and the error comes at the
end. Which parameters an engine then has whole, and of which version, its `HeldWeights` say.

Two ends of one device in two processes on one GPU: see `transfer_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..planner.box import Box
from ..planner.transfer_plan import TransferPlan
from .held_weights import HeldWeights, WeightsError
from .transfer_link import Clock, Link, Op
from .transfer_parts import (
    Message,
    Part,
    Tensors,
    checksum,
    dtype_of,
    plan_stamp,
    read_view,
    same_memory,
    write_view,
)
from .transfer_route import Receive, Send, Wave, aligned, buffer_bytes, header_words, waves_of

__all__ = ["Delivered", "Ends", "Transfer", "execute"]

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
    ) -> None:
        has_all = bool(here) and process_of.keys() <= here.keys()
        link = None if has_all else Link(group)
        process = next(iter(process_of.values())) if link is None else link.process
        waves = waves_of(plan, here, process_of, process)
        size = max((wave.staging_bytes for wave in waves), default=0)
        device = _device(here) if link is not None and link.is_batched else torch.device("cpu")
        self._share = _Share(
            here=here,
            waves=waves,
            link=link,
            dtype=dtype_of(plan),
            stamp=plan_stamp(plan),
            has_relays=any(move.round for move in plan.moves),
            arenas=tuple(torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)),
        )
        self._share.check()

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
        here: Tensors of this process's devices.
        waves: What it does.
        link: To other processes; None if there are none.
        dtype: Of elements on the way.
        stamp: The plan's.
        has_relays: Whether any device passes on what it received.
        arenas: u8[bytes], buffers of even and of odd waves.
    """

    here: Mapping[int, Ends]
    waves: Sequence[Wave]
    link: Link | None
    dtype: torch.dtype
    stamp: int
    has_relays: bool
    arenas: Sequence[Tensor]

    def check(self) -> None:
        """Make every view once, so that what does not fit is found before anything is sent."""
        for wave in self.waves:
            here = [part for receive in wave.moves for part in receive.message.parts]
            for part in [p for send in wave.sends for p in send.message.parts] + here + wave.copies:
                self.read(part)
            arriving = [part for receive in wave.receives for part in receive.message.parts]
            for part in arriving + here + wave.copies:
                self.write(part)

    def read(self, part: Part) -> Tensor:
        """Where a part is read."""
        ends = self.here[part.move.source]
        return read_view(part, ends.destination if part.move.round else ends.source)

    def write(self, part: Part) -> Tensor:
        """Where a part is written."""
        return write_view(part, self.here[part.move.destination].destination, self.dtype)


def _device(here: Mapping[int, Ends]) -> torch.device:
    """Where buffers lie if messages must be sent from there."""
    tensors = (
        t for ends in here.values() for t in (*ends.source.values(), *ends.destination.values())
    )
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


@dataclass
class _Flight:
    """A wave under way; receives come first among its operations."""

    receives: list[tuple[Receive, Tensor]]
    ops: list[Op]
    works: list[dist.Work]


_Key = tuple[int, str, Box]
"""Device, parameter, box."""


class _Run:
    """One carrying out of a transfer."""

    def __init__(self, share: _Share, version: int, clock: Clock) -> None:
        self._share = share
        self._version = version
        self._clock = clock
        # Checksums that relays forward, and slices that were refused.
        self._claimed: dict[_Key, int] = {}
        self._refused: dict[_Key, str] = {}
        self._done = Delivered(staging_bytes=sum(len(arena) for arena in share.arenas))

    def go(self) -> Delivered:
        before: _Flight | None = None
        for index, wave in enumerate(self._share.waves):
            flight = self._start(wave, self._share.arenas[index % 2])
            self._do_local(wave)
            if before is not None:
                self._finish(before)
            before = flight
        if before is not None:
            self._finish(before)
        self._done.seconds = self._clock.elapsed_s
        if self._refused:
            first = next(iter(self._refused.values()))
            raise WeightsError(
                f"{first}. Of this transfer {len(self._refused)} slice(s) were refused; send it "
                "again"
            )
        return self._done

    def _start(self, wave: Wave, arena: Tensor) -> _Flight:
        """Post receives first, so that they run while this process packs."""
        flight, begin = _Flight([], [], []), 0
        for receive in wave.receives:
            buffer, begin = _room(arena, begin, receive.message)
            flight.receives.append((receive, buffer))
            flight.ops.append(Op(False, buffer, receive.process, _story(receive.message)))
        link = self._share.link
        if link is None:
            return flight
        if not link.is_batched:
            flight.works += link.post(flight.ops)
        for send in wave.sends:
            buffer, begin = _room(arena, begin, send.message)
            self._pack(send, buffer)
            ops = [Op(True, buffer, to, _story(send.message)) for to in send.processes]
            flight.ops += ops
            if not link.is_batched:
                flight.works += link.post(ops)
        if link.is_batched:
            flight.works = link.post(flight.ops)
        return flight

    def _pack(self, send: Send, buffer: Tensor) -> None:
        message, version = send.message, self._version
        head = 8 * header_words(message)
        header = [version, self._share.stamp]
        for part, data in zip(message.parts, message.slices(buffer[head:]), strict=True):
            data.view(self._share.dtype).view(part.shape).copy_(self._share.read(part))
            key = (message.source, part.param.name, part.move.box)
            claimed = self._claimed.get(key) if message.round else None
            header.append(checksum(part, data, version) if claimed is None else claimed)
            if message.round and key in self._refused:
                header[0] = _VOID
        buffer[:head].view(torch.int64).copy_(torch.tensor(header))
        self._done.sent_bytes += message.num_bytes * len(send.processes)

    def _do_local(self, wave: Wave) -> None:
        for receive in wave.moves:
            for part in receive.message.parts:
                source = (part.move.source, part.param.name, part.move.box)
                target = (receive.device, part.param.name, part.move.box)
                if part.move.round and source in self._refused:
                    self._refused[target] = self._refused[source]
                    continue
                if part.move.round and source in self._claimed:
                    self._claimed[target] = self._claimed[source]
                self._done.moved_bytes += self._write(part, self._share.read(part))
        for part in wave.copies:
            self._done.copied_bytes += self._write(part, self._share.read(part))

    def _write(self, part: Part, values: Tensor) -> int:
        """Put a part in place and say so; returns bytes written."""
        place, held = self._share.write(part), self._share.here[part.move.destination].held
        if held is not None:
            held.writing(part.param.name, self._version)
        is_there = same_memory(values, place)
        if not is_there:
            place.copy_(values)
        if held is not None:
            held.wrote(part.param.name, part.move.box, self._version)
        return 0 if is_there else place.numel() * place.element_size()

    def _finish(self, flight: _Flight) -> None:
        """Wait for a wave, receives first and in turn: each is checked while others arrive."""
        works = list(zip(flight.ops, flight.works, strict=True))
        for (receive, buffer), (op, work) in zip(flight.receives, works, strict=False):
            Link.wait(op, work, self._clock)
            self._accept(receive, buffer)
        for op, work in works[len(flight.receives) :]:
            Link.wait(op, work, self._clock)

    def _accept(self, receive: Receive, buffer: Tensor) -> None:
        """Write the slices of a message that are what they should be."""
        message, device = receive.message, receive.device
        head = 8 * header_words(message)
        version, stamp, *checksums = buffer[:head].view(torch.int64).tolist()
        self._done.received_bytes += message.num_bytes
        self._done.header_bytes += head
        wrong = self._wrong(message, version, stamp)
        slices = message.slices(buffer[head:])
        for part, data, claimed in zip(message.parts, slices, checksums, strict=True):
            key = (device, part.param.name, part.move.box)
            if self._share.has_relays:
                self._claimed[key] = claimed
            if not wrong and checksum(part, data, version) == claimed:
                self._write(part, data.view(self._share.dtype).view(part.shape))
            else:
                self._refused[key] = (
                    f"{part} from device {message.source} to device {device} "
                    f"{wrong or 'has the wrong checksum'}"
                )

    def _wrong(self, message: Message, version: int, stamp: int) -> str:
        """What is wrong with a whole message; nothing if it is empty."""
        if stamp != self._share.stamp:
            return "was packed by another plan; both sides must use the same"
        if version == _VOID:
            return f"had not arrived whole on device {message.source}, which was to pass it on"
        if version != self._version:
            return f"is of version {version}; expected version {self._version}"
        return ""


def _room(arena: Tensor, begin: int, message: Message) -> tuple[Tensor, int]:
    """A buffer for a message, and where the next one begins."""
    size = buffer_bytes(message)
    return arena[begin : begin + size], begin + aligned(size)


def _story(message: Message) -> str:
    """What a message is, for errors."""
    return f"bucket {message.bucket} of device {message.source}, with {message.parts[0]},"
