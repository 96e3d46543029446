"""The channel from process to process, over TCP.

A packet stays with the process that made it. From its first offer on the process listens, and a
thread of its own answers each request, so that the process itself can train meanwhile. Receivers
connect anew for each packet: there is no connection to keep or to renew when one is started again.

    request: token | number of the offer, slot of the packet in it
    answer:  mark, plan, source, destination, version | parameters | checksums | buckets

All numbers are int64. How many there are is in the offer, so nothing that arrives decides how much
memory is taken. Whoever asks must send the token that is in the offer. It is sent as it is: who
could read it from the network could read the weights as well.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .channel import ChannelEnd, Offer, Receiver
from .packets import Packet, host_room
from .version_tracker import WeightsError

_TOKEN_BYTES = 32
_NUM_HEAD = 5
_FOUND, _GONE = (int.from_bytes(mark, "little") for mark in (b"weights", b"gone"))
"""The first word of an answer; anything else is from somebody who is no channel."""

_LOG = logging.getLogger("penstock.weights")

_PAUSE_S = 0.2
"""Before the next connection is accepted when one could not be."""

_PATIENCE_S = 10.0
"""How long whoever asks may take to say for what."""

_MOST_ANSWERED = 256
"""Requests that are answered at a time; others wait to be accepted."""

Words = NDArray[np.int64]


class _Place(NamedTuple):
    """Where a packet is.

    Attributes:
        address: Where its sender listens.
        token: What the sender wants to hear.
        number: Of the offer.
        slot: Of the packet in it.
        num_slices: Of the packet.
        bucket_bytes: Length of each of its buckets.
    """

    address: tuple[str, int]
    token: bytes
    number: int
    slot: int
    num_slices: int
    bucket_bytes: tuple[int, ...]


class PointToPointChannel:
    """See `WeightChannel`.

    Args:
        end: The process that it is in.
    """

    def __init__(self, end: ChannelEnd) -> None:
        self._end = end
        self._numbers = itertools.count()
        self._packets: dict[int, Sequence[Packet]] = {}
        self._server: _Server | None = None

    def room(self, num_bytes: int, device: torch.device) -> Tensor:
        """See `WeightChannel.room`."""
        return host_room(num_bytes, device)

    def publish(self, packets: Mapping[Receiver, Packet]) -> Offer:
        """See `WeightChannel.publish`."""
        if self._server is None:
            self._server = _Server(self._end, self._packets)
        number, server = next(self._numbers), self._server
        self._packets[number] = tuple(packets.values())
        places = {
            receiver: _Place(
                address=server.address,
                token=server.token,
                number=number,
                slot=slot,
                num_slices=len(packet.params),
                bucket_bytes=tuple(len(bucket) for bucket in packet.buckets),
            )
            for slot, (receiver, packet) in enumerate(packets.items())
        }
        return Offer(*self._end.name, number, places)

    def obtain(self, offer: Offer) -> Packet | None:
        """See `WeightChannel.obtain`."""
        place: _Place | None = offer.places.get(self._end.name)
        if place is None:
            return None
        begin_s, deadline_s = time.monotonic(), self._end.deadline_s
        try:
            with socket.create_connection(place.address, deadline_s) as connection:
                link = _Link(connection, begin_s + deadline_s)
                link.send(place.token, np.array([place.number, place.slot]))
                packet = _received(link, place)
        except OSError as error:
            spent_s = time.monotonic() - begin_s
            raise WeightsError(
                f"{offer} did not come; {spent_s:.3g} s had passed of the {deadline_s:g} s that "
                f"they may take. It said: {error}"
            ) from error
        if packet is None:
            raise WeightsError(
                f"{offer} are no longer there; group '{self._end.group}' asked for offer "
                f"{place.number}"
            )
        return packet

    def forget(self, number: int) -> None:
        """See `WeightChannel.forget`."""
        self._packets.pop(number, None)

    def close(self, timeout_s: float) -> None:
        """See `WeightChannel.close`; whoever is being answered loses the connection."""
        server, self._server = self._server, None
        if server is not None:
            server.close(timeout_s)


class _Link:
    """A connection, and the time on the monotonic clock by which all of it must be over."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._socket, self.end_s = connection, end_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *parts: bytes | Words | NDArray[np.uint8]) -> None:
        """Send all of them, one after another."""
        for part in parts:
            self._limit()
            self._socket.sendall(part if isinstance(part, bytes) else part.view(np.uint8).data)

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """u8[count], as they come."""
        found = np.empty(count, np.uint8)
        begin = 0
        while begin < count:
            self._limit()
            length = self._socket.recv_into(found.data[begin:])
            if not length:
                raise ConnectionError("the connection was closed")
            begin += length
        return found

    def words(self, count: int) -> Words:
        """i64[count], as they come."""
        return self.bytes(8 * count).view(np.int64)

    def _limit(self) -> None:
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)


def _send(link: _Link, packet: Packet | None) -> None:
    if packet is None:
        link.send(np.array([_GONE, *[0] * (_NUM_HEAD - 1)]))
        return
    head = [_FOUND, packet.plan, packet.source, packet.destination, packet.version]
    link.send(np.array(head), packet.params, packet.checksums, *packet.buckets)


def _received(link: _Link, place: _Place) -> Packet | None:
    """A packet; None if the sender has it no more."""
    mark, plan, source, destination, version = link.words(_NUM_HEAD).tolist()
    if mark == _GONE:
        return None
    if mark != _FOUND:
        raise ConnectionError("something else listens there")
    return Packet(
        plan=plan,
        source=source,
        destination=destination,
        version=version,
        params=link.words(place.num_slices),
        checksums=link.words(place.num_slices),
        buckets=tuple(link.bytes(length) for length in place.bucket_bytes),
    )


class _Server:
    """Listens at `address`, and answers each request that has its `token` by a thread."""

    def __init__(self, end: ChannelEnd, packets: Mapping[int, Sequence[Packet]]) -> None:
        self._packets = packets
        self._deadline_s = end.deadline_s
        self._listener = socket.create_server((end.host, 0), backlog=1024)
        self.address: tuple[str, int] = (end.host, self._listener.getsockname()[1])
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._is_closing = False
        self._answering: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(target=self._accept, name="penstock-weights", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Listen no more, and cut off whoever is being answered."""
        end_s = time.monotonic() + timeout_s
        self._is_closing = True
        with contextlib.suppress(OSError):  # It only wakes the thread that listens.
            socket.create_connection(self.address, timeout_s).close()
        self._thread.join(timeout_s)
        for thread, connection in list(self._answering.items()):
            with contextlib.suppress(OSError):  # The other end has closed it.
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(max(end_s - time.monotonic(), 0.001))

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closing:
                if len(self._answering) >= _MOST_ANSWERED:
                    time.sleep(_PAUSE_S)
                    continue
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    # Whoever asks may have gone again, or too many files are open for now.
                    self._pause(error)
                    continue
                if self._is_closing:
                    connection.close()
                    return
                thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
                self._answering[thread] = connection
                try:
                    thread.start()
                except RuntimeError as error:  # there are too many threads
                    del self._answering[thread]
                    connection.close()
                    self._pause(error)

    def _pause(self, error: Exception) -> None:
        _LOG.warning("a request for weights could not be accepted: %s", error)
        time.sleep(_PAUSE_S)

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                begin_s = time.monotonic()
                link = _Link(connection, begin_s + min(_PATIENCE_S, self._deadline_s))
                if not hmac.compare_digest(link.bytes(_TOKEN_BYTES).tobytes(), self.token):
                    _LOG.warning("a connection is dropped that does not know the token")
                    return
                number, slot = link.words(2).tolist()
                found = self._packets.get(number, ())
                link.end_s = begin_s + self._deadline_s
                _send(link, found[slot] if 0 <= slot < len(found) else None)
        except OSError as error:
            # Whoever has asked hears of it at the other end, or is dead.
            _LOG.info("weights were not taken: %s", error)
        finally:
            del self._answering[threading.current_thread()]
