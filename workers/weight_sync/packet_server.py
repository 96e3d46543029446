"""Packets of weights between the processes of two groups, by torch.distributed, point to point.

A packet stays with the process that made it, and threads give it to whoever asks: the receiver
may be busy with older weights for long, or is started again and asks once more. Each pair of
groups has a process group of its own, the senders first, so that neither side's other messages
are in the way. Packets lie in host memory, and travel bucket by bucket over gloo.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .p2p_link import Clock, Link, Op
from .packets import Packet
from .version_tracker import WeightsError

__all__ = ["OutboxEntry", "PacketServer", "Route", "Outbox", "Store"]

_UNBOUNDED = timedelta(days=3650)
"""For the thread that waits for requests, as a server does; every answer has a deadline."""

_Posted = tuple[Op, dist.Work]

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage] - torch documents it

_LOG = logging.getLogger("penstock.weights")


@dataclass(frozen=True)
class Route:
    """Between which groups, and which of their processes.

    Attributes:
        senders: The group that gives.
        receivers: The group that takes.
        from_processes: Those of rank 0 of the senders, which export for all.
        to_processes: All of the receivers.
    """

    senders: str
    receivers: str
    from_processes: tuple[int, ...]
    to_processes: tuple[int, ...]

    @property
    def num_processes(self) -> int:
        """Of both groups."""
        return len(self.from_processes) + len(self.to_processes)

    def number(self, group: str, process: int) -> int:
        """A process's number on the route: senders come first."""
        if group == self.senders:
            return self.from_processes.index(process)
        return len(self.from_processes) + self.to_processes.index(process)


@dataclass(frozen=True)
class OutboxEntry:
    """What a process has ready for others: all that the controller sees of it.

    Attributes:
        group: Of the process.
        process: Its number there.
        key: Of the packets, in this process.
        receivers: (group, process) of all for whom there is one.
    """

    group: str
    process: int
    key: int
    receivers: frozenset[tuple[str, int]]


class Outbox:
    """The packets that a process has ready, until nobody can ask for them any more."""

    def __init__(self) -> None:
        self._packets: dict[int, Mapping[tuple[str, int], Packet]] = {}
        self._keys = itertools.count(1)

    def put(self, packets: Mapping[tuple[str, int], Packet]) -> int:
        """Keep packets, by receiver; the key to ask for them."""
        key = next(self._keys)
        self._packets[key] = packets
        return key

    def find(self, key: int, receiver: tuple[str, int]) -> Packet | None:
        """The packet of a receiver; None if it is not there, or no more."""
        return self._packets.get(key, {}).get(receiver)

    def drop(self, key: int) -> None:
        """Nobody will ask for these again."""
        self._packets.pop(key, None)

    def __len__(self) -> int:
        return len(self._packets)


class PacketServer:
    """A process's end of a route.

    Args:
        route: Which.
        number: The process's number on it.
        store: Where all processes of the route meet.
        deadline_s: How long a packet may take, from the request on.
        start_s: How long the others may take to come.

    Raises:
        RuntimeError: If they do not come.
    """

    def __init__(
        self, route: Route, number: int, store: Store, deadline_s: float, start_s: float
    ) -> None:
        self._route = route
        self._deadline_s = deadline_s
        self._threads: list[threading.Thread] = []
        # Of one backend, without the registration that only members of the default group can have.
        self._group: Any = dist.ProcessGroupGloo(
            store, number, route.num_processes, timedelta(seconds=start_s)
        )

    def serve(self, outbox: Outbox) -> None:
        """Give packets to whoever asks, by a thread for each receiver that ends when it is gone."""
        first = len(self._route.from_processes)
        for number in range(first, self._route.num_processes):
            thread = threading.Thread(target=self._serve, args=(outbox, number), daemon=True)
            thread.start()
            self._threads.append(thread)

    def fetch(self, process: int, key: int) -> Packet:
        """Ask a sender for the packet that it has for this process.

        Args:
            process: Of the sender, in its group.
            key: What it called its packets.

        Raises:
            WeightsError: If it has none, or does not answer by the deadline.
        """
        clock = Clock(self._deadline_s)
        number = self._route.number(self._route.senders, process)
        whose = f"the weights of process {process} of group '{self._route.senders}'"
        asked = self._send([torch.tensor([key])], number, f"a request for {whose}")
        (head,) = self._receive([_HEAD_SIZE], torch.int64, number, whose, clock)
        self._wait(asked, clock)
        found, plan, source, destination, version, num_slices, num_buckets = head.tolist()
        if not found:
            raise WeightsError(
                f"process {process} of group '{self._route.senders}' no longer has the weights "
                f"that group '{self._route.receivers}' asked it for"
            )
        sizes = [num_slices, num_slices, num_buckets]
        params, checksums, lengths = self._receive(sizes, torch.int64, number, whose, clock)
        buckets = self._receive(lengths.tolist(), torch.uint8, number, whose, clock)
        return Packet(
            plan=plan,
            source=source,
            destination=destination,
            version=version,
            params=params.numpy(),
            checksums=checksums.numpy(),
            buckets=tuple(bucket.numpy() for bucket in buckets),
        )

    def close(self, timeout_s: float) -> None:
        """Leave the route: receivers say that they ask no more, senders wait for all of them.

        Args:
            timeout_s: After which the other side is left as it is.
        """
        clock = Clock(timeout_s)
        for thread in self._threads:
            thread.join(clock.left.total_seconds())
        if not self._threads:
            for number in range(len(self._route.from_processes)):
                try:
                    self._wait(self._send([torch.tensor([_NO_MORE])], number, "a good-bye"), clock)
                except WeightsError as error:
                    _LOG.info("group '%s' is gone already: %s", self._route.senders, error)
        self._group = None

    def _serve(self, outbox: Outbox, number: int) -> None:
        """Until the receiver has left, or died."""
        group, request = self._group, torch.zeros(1, dtype=torch.int64)
        while True:
            try:
                group.recv([request], number, 0).wait(_UNBOUNDED)
            except RuntimeError as error:
                # Whoever has given it work hears that it is dead.
                _LOG.info("%s asks no more: %s", self._receiver(number), error)
                return
            if int(request) == _NO_MORE:
                return
            try:
                self._answer(outbox, int(request), number)
            except WeightsError:
                _LOG.exception("%s gets no more weights from here", self._receiver(number))
                return

    def _receiver(self, number: int) -> str:
        process = self._route.to_processes[number - len(self._route.from_processes)]
        return f"process {process} of group '{self._route.receivers}'"

    def _answer(self, outbox: Outbox, key: int, number: int) -> None:
        clock = Clock(self._deadline_s)
        process = self._route.to_processes[number - len(self._route.from_processes)]
        packet = outbox.find(key, (self._route.receivers, process))
        nothing = [torch.zeros(_HEAD_SIZE, dtype=torch.int64)]
        buffers = nothing if packet is None else _buffers(packet)
        self._wait(self._send(buffers, number, f"an answer to {self._receiver(number)}"), clock)

    def _send(self, buffers: Sequence[Tensor], number: int, story: str) -> list[_Posted]:
        return self._post([Op(True, buffer, number, story) for buffer in buffers])

    def _receive(
        self, sizes: Sequence[int], dtype: torch.dtype, number: int, story: str, clock: Clock
    ) -> list[Tensor]:
        buffers = [torch.empty(size, dtype=dtype) for size in sizes]
        self._wait(self._post([Op(False, buffer, number, story) for buffer in buffers]), clock)
        return buffers

    def _post(self, ops: Sequence[Op]) -> list[_Posted]:
        posted: list[_Posted] = []
        for op in ops:
            start = self._group.send if op.is_send else self._group.recv
            try:
                posted.append((op, start([op.buffer], op.process, 0)))
            except RuntimeError as error:
                raise WeightsError(
                    f"{op.story}: the connection to number {op.process} of the route from group "
                    f"'{self._route.senders}' to '{self._route.receivers}' is lost. "
                    f"It said: {error}"
                ) from error
        return posted

    @staticmethod
    def _wait(posted: Sequence[_Posted], clock: Clock) -> None:
        for op, work in posted:
            Link.wait(op, work, clock)


_HEAD_SIZE = 7
_NO_MORE = 0


def _buffers(packet: Packet) -> list[Tensor]:
    """A packet as it travels."""
    head = [1, packet.plan, packet.source, packet.destination, packet.version]
    lengths = [len(bucket) for bucket in packet.buckets]
    return [
        torch.tensor([*head, len(packet.params), len(lengths)]),
        torch.from_numpy(packet.params),
        torch.from_numpy(packet.checksums),
        torch.tensor(lengths),
        *(torch.from_numpy(bucket) for bucket in packet.buckets),
    ]
