"""A transfer plan carried out by packets, which a weight channel carries to their receivers.

`pack` runs where the source's tensors are and `unpack` where the destination's are; a `Packet` is
plain arrays, and tensors on a device if its channel leaves them there. Nothing is written before
everything is checked.

The plan follows from the two groups' layouts and is the same wherever it is computed. Devices of
the exporting group are numbered as its processes, those of a receiver behind them.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ...dataflow.errors import WorkerError
from ...dataflow.graph.role import Worker
from ...dataflow.runtime.messages import HeldLayout
from ...planner.inputs.model_shape import DTYPE_BYTES
from ...planner.resharding.plan_transfer import (
    Move,
    MovedParam,
    TransferPlan,
    plan_transfer,
    window,
)
from ...planner.resharding.sharding import Box, Sharding, volume, whole


class WeightsError(WorkerError):
    """Weights that are missing, damaged or of another version; names the parameter."""


def check_names(
    wanted: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]], *, exact: bool = True
) -> None:
    """Require weights of these names and shapes, and if `exact` no others."""
    missing = sorted(wanted.keys() - given.keys())
    unknown = sorted(given.keys() - wanted.keys()) if exact else []
    if missing or unknown:
        raise ValueError(
            f"weights do not fit: missing {missing or 'none'}, unknown {unknown or 'none'}; "
            "they must come from a model of the same architecture"
        )
    for name, shape in wanted.items():
        if list(given[name]) != list(shape):
            raise ValueError(
                f"weight '{name}': expected shape {list(shape)}, got {list(given[name])}"
            )


@dataclass
class HeldWeights:
    """The version of the weights that one device was sent: all of them, as `unpack` writes all."""

    device: int
    first: str  # The first parameter of which the device has any, for messages
    version: int | None = None  # None before any have come, and after a write that broke off

    @staticmethod
    def of(sharding: Sharding, device: int) -> HeldWeights:
        for param in sharding.params:
            if any(p.device == device and volume(p.box) for p in sharding.patterns[param.pattern]):
                return HeldWeights(device, param.name)
        return HeldWeights(device, sharding.params[0].name)

    def check(self, version: int) -> None:
        if self.version == version:
            return
        what = "was never received" if self.version is None else f"is of version {self.version}"
        raise WeightsError(
            f"cannot use the weights on device {self.device}: parameter '{self.first}' {what}; "
            f"version {version} is expected. Transfer version {version} to it, whole"
        )


Tensors = Mapping[str, Tensor]
"""An engine's own tensors on one device, by the names that its sharding uses."""


_Place = tuple[int, int, tuple[int, ...]]  # Of a message: bucket, source, destinations


class Part(NamedTuple):
    """One move of one parameter."""

    param: MovedParam
    move: Move

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.move.box)

    def __str__(self) -> str:
        return f"slice {self.move.box} of parameter '{self.param.name}'"


@dataclass(frozen=True)
class Message:
    """Parts that travel together."""

    bucket: int  # Of all parts
    source: int  # The device that packs them
    destinations: tuple[int, ...]  # The devices that each get all of them, ascending
    parts: tuple[Part, ...]  # In the order of the plan
    element_bytes: int  # Of one element on the way

    @cached_property
    def ends(self) -> tuple[int, ...]:
        sizes = (volume(part.move.box) * self.element_bytes for part in self.parts)
        return tuple(accumulate(sizes))

    @property
    def sizes(self) -> list[int]:
        return [end - begin for begin, end in zip((0, *self.ends), self.ends, strict=False)]

    @property
    def num_bytes(self) -> int:
        return self.ends[-1]

    def slices(self, payload: Tensor) -> Iterator[Tensor]:
        yield from payload.split(self.sizes)


def dtype_of(plan: TransferPlan) -> torch.dtype:
    return getattr(torch, plan.dtype)


def messages_of(plan: TransferPlan, devices: Sequence[int]) -> Mapping[int, tuple[Message, ...]]:
    """Device -> the messages it sends or receives, in the same order on all of them."""
    wanted = set(devices)
    # What goes to several devices alike is one message, so a receiver looks at all that its senders
    # send: else it would cut other messages than they do.
    partners = {m.source for m in plan.moves if m.destination in wanted} | wanted
    moves: dict[tuple[int, int, Box], list[Move]] = {}
    for move in plan.moves:
        if not move.is_copy and move.source in partners:
            moves.setdefault((move.source, move.group, move.box), []).append(move)
    together: dict[_Place, list[tuple[MovedParam, list[Move]]]] = {}
    for (source, group, _), alike in moves.items():
        to = tuple(sorted(move.destination for move in alike))
        if source in wanted or wanted.intersection(to):
            for index in plan.groups[group]:
                param = plan.params[index]
                together.setdefault((param.bucket, source, to), []).append((param, alike))
    found = defaultdict[int, list[Message]](list)
    # Each device has looked at other moves, so the order must not depend on them.
    for place in sorted(together):
        for device in wanted.intersection((place[1], *place[2])):
            # A receiver needs its own move, for the place; to the sender all of them are alike.
            parts = tuple(
                Part(param, next((m for m in alike if m.destination == device), alike[0]))
                for param, alike in together[place]
            )
            found[device].append(Message(*place, parts, DTYPE_BYTES[plan.dtype]))
    return {device: tuple(found[device]) for device in devices}


def read_view(part: Part, tensors: Tensors) -> Tensor:
    param, move = part
    return _view(
        part, tensors, param.source_tensor, param.source_dims, move.source_start, move.source
    )


def write_view(part: Part, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    param, move = part
    found = _view(part, tensors, param.destination_tensor, param.destination_dims,
                  move.destination_start, move.destination)  # fmt: skip
    if found.dtype != dtype:
        raise WeightsError(
            f"{part} goes to tensor '{param.destination_tensor}' on device {move.destination}, "
            f"which is {_name(found.dtype)}; the plan is for {_name(dtype)}. Describe the "
            "destination with the dtype it stores"
        )
    return found


def _view(
    part: Part, tensors: Tensors, name: str, dims: tuple[int, ...], start: tuple[int, ...],
    device: int,
) -> Tensor:  # fmt: skip
    if name not in tensors:
        raise WeightsError(
            f"{part} lies in tensor '{name}' on device {device}, and there is no such tensor; the "
            f"engine has {len(tensors)}"
        )
    # Parameters need gradients, and torch refuses to write in place to what does.
    tensor = tensors[name].detach()
    lengths = [part.shape[dim] for dim in dims]
    fits = len(tensor.shape) == len(dims) and all(
        begin + length <= size
        for begin, length, size in zip(start, lengths, tensor.shape, strict=True)
    )
    if not fits:
        raise WeightsError(
            f"{part} lies in tensor '{name}' on device {device}, from {list(start)} over "
            f"{lengths}; the tensor is only {list(tensor.shape)}. The sharding does not describe "
            "this engine"
        )
    # The engine may store the dimensions in another order than the model has them.
    found = tensor[window(part.move.box, dims, start)]
    return found.permute([dims.index(dim) for dim in range(len(dims))])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ROW = 4096
_WORDS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(message: Message, payload: Tensor, version: int) -> list[int]:
    if payload.device.type != "cpu":
        return checksums_of_sums(message, payload, version)
    return [
        checksum(part, data, version)
        for part, data in zip(message.parts, message.slices(payload), strict=True)
    ]


def checksum(part: Part, data: Tensor, version: int) -> int:
    """XXH3 over a part's bytes, seeded with its identity: several times faster than a CRC."""
    digest = xxhash.xxh3_64_digest(data.numpy().data, _seed(part, len(data), version))
    return int.from_bytes(digest, "little", signed=True)


def checksums_of_sums(message: Message, payload: Tensor, version: int) -> list[int]:
    """Return checksums of sums that are made on the payload's device and copied together."""
    # As integers: their sums are exact in whatever order a device adds them up.
    words = _WORDS[message.element_bytes]
    sums = [_sums(data.view(words)) for data in message.slices(payload)]
    on_host = torch.cat(sums).cpu().split([len(one) for one in sums])
    found: list[int] = []
    for part, size, one in zip(message.parts, message.sizes, on_host, strict=True):
        digest = xxhash.xxh3_64_digest(one.numpy().data, _seed(part, size, version))
        found.append(int.from_bytes(digest, "little", signed=True))
    return found


def _sums(words: Tensor) -> Tensor:
    rows = len(words) // _ROW
    table, rest = words[: rows * _ROW].view(rows, _ROW), words[rows * _ROW :]
    # Both: either alone misses words that change places along what it sums over.
    by_column, by_row = table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)
    return torch.cat([by_column, by_row, rest.to(torch.int64)])


def _seed(part: Part, num_bytes: int, version: int) -> int:
    # The right bytes at a wrong place, or of another version, must not pass either.
    identity = f"{part.param.name}\0{part.move.box}\0{num_bytes}".encode()
    stamp = version.to_bytes(8, "little", signed=True)
    return xxhash.xxh3_64_intdigest(stamp, xxhash.xxh3_64_intdigest(identity))


Bucket = Any
"""u8[bytes]: a numpy array in host memory, or a tensor on a device."""

Room = Callable[[int, torch.device], Tensor]
"""Maker of a bucket: from its bytes and the device of what goes into it to u8[bytes]."""

Packed = dict[tuple[str, tuple[tuple[str, Box], ...]], tuple[Bucket, list[int]]]
"""Buckets with their checksums, by dtype and by parameters and boxes in them."""


def host_room(num_bytes: int, device: torch.device) -> Tensor:
    """A `Room` in host memory, whatever the device."""
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Packet:
    """A message from one device to another: numbers and arrays only."""

    source: int  # Device that packed it
    destination: int  # Device that it is for
    version: int  # Of the weights
    checksums: NDArray[np.int64]  # i64[slices], one of each slice, in the order of the plan
    # u8[bytes] each, slices end to end; what goes to several devices alike is one array in all
    # their packets.
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)


def pack(
    plan: TransferPlan,
    device: int,
    tensors: Tensors,
    version: int,
    *,
    room: Room = host_room,
    packed: Packed | None = None,
) -> dict[int, Packet]:
    """Read what a device has to send out of its engine's tensors, converted to the plan's dtype."""
    packed = {} if packed is None else packed
    sent: dict[int, list[tuple[Bucket, list[int]]]] = {}
    for message in messages_of(plan, [device])[device]:
        if message.source != device:
            continue
        key = plan.dtype, tuple((part.param.name, part.move.box) for part in message.parts)
        if key not in packed:
            packed[key] = _packed(message, tensors, dtype_of(plan), version, room)
        for destination in message.destinations:
            sent.setdefault(destination, []).append(packed[key])
    return {
        destination: Packet(
            source=device,
            destination=destination,
            version=version,
            checksums=np.array([c for _, values in given for c in values], np.int64),
            buckets=tuple(bucket for bucket, _ in given),
        )
        for destination, given in sorted(sent.items())
    }


def _packed(
    message: Message, tensors: Tensors, dtype: torch.dtype, version: int, room: Room
) -> tuple[Bucket, list[int]]:
    read = [read_view(part, tensors) for part in message.parts]
    payload = room(message.num_bytes, read[0].device)
    for part, data, values in zip(message.parts, message.slices(payload), read, strict=True):
        data.view(dtype).view(part.shape).copy_(values)
    bucket = payload.numpy() if payload.device.type == "cpu" else payload
    return bucket, checksums(message, payload, version)


def unpack(
    plan: TransferPlan, device: int, packets: Sequence[Packet], tensors: Tensors, version: int
) -> int:
    """Write what a device receives into its engine's tensors: all of it or nothing."""
    ready = [
        (data, write_view(part, tensors, dtype_of(plan)))
        for part, data in _checked(plan, device, packets, version)
    ]
    for data, place in ready:
        place.copy_(data)
    return sum(packet.num_bytes for packet in packets)


def unpack_whole(
    plan: TransferPlan, device: int, packets: Sequence[Packet], version: int
) -> dict[str, Tensor]:
    """Assemble whole tensors from packets, by name; a box that is a whole tensor is not copied."""
    found: dict[str, Tensor] = {}
    for part, data in _checked(plan, device, packets, version):
        param = part.param
        if part.move.box == whole(param.shape):
            found[param.destination_tensor] = data
        else:
            if param.destination_tensor not in found:
                found[param.destination_tensor] = data.new_empty(param.shape)
            write_view(part, found, data.dtype).copy_(data)
    return found


def _checked(
    plan: TransferPlan, device: int, packets: Sequence[Packet], version: int
) -> list[tuple[Part, Tensor]]:
    expected: dict[int, list[Message]] = {}
    for message in messages_of(plan, [device])[device]:
        if message.source != device:
            expected.setdefault(message.source, []).append(message)
    for packet in packets:
        if packet.destination != device or packet.source not in expected:
            raise WeightsError(
                f"device {device} was given a packet from device {packet.source} for device "
                f"{packet.destination}; by the plan, devices {sorted(expected)} send to it"
            )
    given = {packet.source: packet for packet in packets}
    ready: list[tuple[Part, Tensor]] = []
    for source, messages in expected.items():
        packet, first = given.get(source), messages[0].parts[0]
        if packet is None:
            raise WeightsError(
                f"device {device} lacks {first}: no packet has come from device {source}. "
                "Unpack when all packets are there"
            )
        if packet.version != version:
            raise WeightsError(
                f"packet from device {source} to device {device}: {first} and all others are of "
                f"version {packet.version}; expected version {version}. Pack them again after the "
                "update"
            )
        ready += _slices(packet, messages, dtype_of(plan))
    return ready


def _slices(
    packet: Packet, messages: Sequence[Message], dtype: torch.dtype
) -> list[tuple[Part, Tensor]]:
    where = f"packet from device {packet.source} to device {packet.destination}"
    # Bound to parameter, box and version, so they also tell apart packets of two plans.
    given = iter(packet.checksums.tolist())
    ready: list[tuple[Part, Tensor]] = []
    for at, message in enumerate(messages):
        payload = _tensor(packet.buckets[at]) if at < len(packet.buckets) else torch.empty(0)
        if len(payload) != message.num_bytes:
            ends = zip(message.parts, message.ends, strict=True)
            part = next((p for p, end in ends if end > len(payload)), message.parts[-1])
            raise WeightsError(
                f"{where}: {part} is not whole: its bucket has {len(payload)} bytes and should "
                f"have {message.num_bytes}"
            )
        found = checksums(message, payload, packet.version)
        for part, data, one in zip(message.parts, message.slices(payload), found, strict=True):
            if one != next(given, None):
                raise WeightsError(f"{where}: {part} has the wrong checksum; send it again")
            ready.append((part, data.view(dtype).view(part.shape)))
    return ready


def _tensor(bucket: Bucket) -> Tensor:
    if isinstance(bucket, Tensor):
        return bucket
    with warnings.catch_warnings():
        # Arrays out of an object store are read-only, which torch warns of; they are only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bucket)  # pyright: ignore[reportUnknownMemberType]


class SliceTraffic:
    """The slices that one process sends and receives, and what it holds of them."""

    def __init__(self, process: int, senders: tuple[int, ...]) -> None:
        self._process = process
        self._senders = senders
        self._held: dict[str, HeldWeights] = {}

    def layout(self, worker: Worker) -> HeldLayout | None:
        layout = worker.weights_layout()
        if layout is None:
            return None
        return HeldLayout(_only(layout, self._senders), layout)

    def export(
        self,
        worker: Worker,
        receivers: Mapping[str, Sharding],
        version: int,
        room: Room = host_room,
    ) -> dict[tuple[str, int], Packet]:
        """The packet of this process for each process of the receivers, by (group, process)."""
        tensors = worker.local_tensors()
        if tensors is None:
            raise WorkerError(
                f"a {type(worker).__name__} cannot export its weights in slices; it needs "
                "weights_layout, local_tensors and weights_changed"
            )
        source = _only(worker.weights_layout(), self._senders)
        found: dict[tuple[str, int], Packet] = {}
        packed: Packed = {}
        for group, layout in receivers.items():
            plan, first = _plan(source, layout)
            made = pack(plan, self._process, tensors, version, room=room, packed=packed)
            found |= {(group, device - first): packet for device, packet in made.items()}
        return found

    def expect(self, role: str, worker: Worker) -> None:
        """From now on the role's weights come from outside: those it was built with are none."""
        if role not in self._held:
            self._held[role] = HeldWeights.of(worker.weights_layout(), self._process)

    def write(
        self, role: str, worker: Worker, source: Sharding, packets: Sequence[Packet], version: int
    ) -> None:
        """Write what has come into the worker's tensors: all of it or nothing."""
        layout: Sharding = worker.weights_layout()
        plan, first = _plan(source, layout)
        self.expect(role, worker)
        held, device = self._held[role], first + self._process
        before, held.version = held.version, None  # until all of it is there
        try:
            tensors = worker.local_tensors()
            if tensors is not None:
                unpack(plan, device, packets, tensors, version)
                worker.weights_changed()
            else:
                found = unpack_whole(plan, device, packets, version)
                given = {param.tensor: found[param.tensor] for param in layout.params}
                worker.receive(given, version)
        except WeightsError:  # nothing was written
            held.version = before
            raise
        held.version = version
        buckets = (bucket for packet in packets for bucket in packet.buckets)
        for at in {bucket.device for bucket in buckets if isinstance(bucket, Tensor)}:
            if at.type == "cuda":  # what is read must not be overwritten before
                torch.cuda.synchronize(at)

    def hold(self, role: str, worker: Worker, version: int) -> None:
        """Note that all weights have come by another way than packets."""
        self.expect(role, worker)
        self._held[role].version = version

    def check(self, role: str, version: int) -> None:
        held = self._held.get(role)
        if held is not None:
            held.check(version)


@lru_cache(maxsize=16)
def _plan(sent: Sharding, received: Sharding) -> tuple[TransferPlan, int]:
    first = max(sent.devices) + 1
    moved = received.on([first + device for device in received.devices])
    return plan_transfer(sent, moved), first


def _only(sharding: Sharding, devices: tuple[int, ...]) -> Sharding:
    patterns = tuple(
        tuple(piece for piece in pattern if piece.device in devices)
        for pattern in sharding.patterns
    )
    return replace(sharding, devices=tuple(sorted(devices)), patterns=patterns)
