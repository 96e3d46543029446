"""What is true of the channel from process to process alone; the rest is in `test_channels`."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from no_more_files import no_more_files
from penstock.workers.weight_sync import point_to_point
from penstock.workers.weight_sync.channel import ChannelEnd, Offer
from penstock.workers.weight_sync.packets import Packet
from penstock.workers.weight_sync.point_to_point import PointToPointChannel
from penstock.workers.weight_sync.version_tracker import WeightsError

HOST = "127.0.0.1"


def channel(group: str, process: int, deadline_s: float = 20.0) -> PointToPointChannel:
    def no_store(*_: object) -> Any:
        raise AssertionError("nothing goes through the store")

    return PointToPointChannel(ChannelEnd(group, process, HOST, deadline_s, no_store, no_store))


def packet(source: int, destination: int, sizes: tuple[int, ...] = (100_000, 0, 7)) -> Packet:
    rng = np.random.default_rng(source + 10 * destination)
    return Packet(
        plan=-(2**62) + source,
        source=source,
        destination=destination,
        version=5,
        params=rng.integers(0, 9, 4),
        checksums=rng.integers(-(2**63), 2**63 - 1, 4),
        buckets=tuple(rng.integers(0, 256, size, np.uint8) for size in sizes),
    )


def same(one: Packet | None, other: Packet) -> bool:
    assert one is not None
    arrays = [(p.params, p.checksums, *p.buckets) for p in (one, other)]
    numbers = [(p.plan, p.source, p.destination, p.version) for p in (one, other)]
    return numbers[0] == numbers[1] and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*arrays, strict=True)
    )


@pytest.fixture
def sender() -> Iterator[PointToPointChannel]:
    made = channel("train", 3)
    yield made
    made.close(20)


def test_a_packet_arrives_as_it_was_for_its_receiver_alone(sender: PointToPointChannel) -> None:
    made = {("rollout", process): packet(3, process) for process in (0, 1)}
    offer = sender.publish(made)
    for process in (1, 0, 1):
        assert same(channel("rollout", process).obtain(offer), made["rollout", process])
    assert channel("rollout", 2).obtain(offer) is None
    assert channel("judges", 0).obtain(offer) is None


def test_receivers_may_ask_at_the_same_time(sender: PointToPointChannel) -> None:
    made = {("rollout", process): packet(3, process, (5_000_000,)) for process in range(4)}
    offer, right = sender.publish(made), list[bool]()

    def ask(process: int) -> None:
        for _ in range(3):
            right.append(same(channel("rollout", process).obtain(offer), made["rollout", process]))

    threads = [threading.Thread(target=ask, args=(process,)) for process in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert right == [True] * 12


def test_what_was_forgotten_is_refused_and_the_rest_still_given(
    sender: PointToPointChannel,
) -> None:
    old, new = (sender.publish({("rollout", 0): packet(3, i)}) for i in range(2))
    sender.forget(old.number)
    receiver = channel("rollout", 0)
    with pytest.raises(
        WeightsError,
        match=r"^the weights of process 3 of group 'train' are no longer there; group 'rollout' "
        r"asked for offer 0$",
    ):
        receiver.obtain(old)
    assert same(receiver.obtain(new), packet(3, 1))


def test_a_sender_that_does_not_answer_is_not_waited_for_longer_than_the_deadline(
    sender: PointToPointChannel,
) -> None:
    offer = sender.publish({("rollout", 0): packet(3, 0)})
    with socket.create_server((HOST, 0)) as silent:
        receiver = channel("rollout", 0, deadline_s=0.5)
        with pytest.raises(
            WeightsError,
            match=r"^the weights of process 3 of group 'train' did not come; 0\.5\d* s had passed "
            r"of the 0\.5 s that they may take\. It said: timed out$",
        ):
            receiver.obtain(elsewhere(offer, silent))


def elsewhere(offer: Offer, listener: socket.socket) -> Offer:
    """The same offer, with another process at its address."""
    places = {
        receiver: place._replace(address=listener.getsockname())
        for receiver, place in offer.places.items()
    }
    return replace(offer, places=places)


def test_who_is_no_sender_is_not_believed(sender: PointToPointChannel) -> None:
    """A port may have gone to another program meanwhile."""
    offer = sender.publish({("rollout", 0): packet(3, 0)})
    with socket.create_server((HOST, 0)) as other:

        def answer() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100)
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WeightsError, match="It said: something else listens there$"):
            channel("rollout", 0).obtain(elsewhere(offer, other))
        thread.join(20)


def test_who_does_not_know_the_token_gets_nothing(
    sender: PointToPointChannel, caplog: pytest.LogCaptureFixture
) -> None:
    offer = sender.publish({("rollout", 0): packet(3, 0)})
    place = offer.places["rollout", 0]
    forged = replace(offer, places={("rollout", 0): place._replace(token=b"x" * 32)})
    with (
        caplog.at_level(logging.WARNING, "penstock.weights"),
        pytest.raises(WeightsError, match="did not come"),
    ):
        channel("rollout", 0).obtain(forged)
    sender.close(20)
    assert [record.getMessage() for record in caplog.records] == [
        "a connection is dropped that does not know the token"
    ]


def test_only_those_who_publish_listen_and_on_their_own_address_only() -> None:
    before = threading.active_count()
    one = channel("train", 0)
    assert threading.active_count() == before
    offer = one.publish({("rollout", 0): packet(0, 0)})
    assert offer.places["rollout", 0].address[0] == HOST
    assert threading.active_count() == before + 1
    one.close(20)
    assert threading.active_count() == before


def test_closing_does_not_wait_for_somebody_who_says_nothing(sender: PointToPointChannel) -> None:
    address = sender.publish({("rollout", 0): packet(3, 0)}).places["rollout", 0].address
    begin_s = time.monotonic()
    with socket.create_connection(address, 20):
        sender.close(20)
    assert time.monotonic() - begin_s < 10


def test_who_cannot_open_more_files_answers_when_it_can(
    sender: PointToPointChannel, caplog: pytest.LogCaptureFixture
) -> None:
    made = packet(3, 0)
    offer = sender.publish({("rollout", 0): made})
    end_s = time.monotonic() + 20
    with (
        no_more_files(spare=1),
        socket.create_connection(offer.places["rollout", 0].address, 20),
    ):
        while not caplog.records and time.monotonic() < end_s:
            time.sleep(0.01)
    assert same(channel("rollout", 0).obtain(offer), made)
    assert caplog.records[0].getMessage() == (
        "a request for weights could not be accepted: [Errno 24] Too many open files"
    )


def test_who_says_nothing_is_sent_away_and_holds_up_nobody(
    sender: PointToPointChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point_to_point, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(point_to_point, "_MOST_ANSWERED", 8)
    made = packet(3, 0)
    offer = sender.publish({("rollout", 0): made})
    address = offer.places["rollout", 0].address
    before = threading.active_count()
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(socket.create_connection(address, 20)) for _ in range(30)]
        strangers[0].sendall(b"half of a token")
        time.sleep(0.1)
        assert threading.active_count() <= before + 8
        assert same(channel("rollout", 0).obtain(offer), made)
        assert strangers[0].recv(1) == b""


@given(st.data())
def test_requests_of_any_bytes_get_a_packet_or_nothing(data: st.DataObject) -> None:
    sender = channel("train", 3)
    try:
        offer = sender.publish({("rollout", 0): packet(3, 0)})
        place = offer.places["rollout", 0]
        asked = place.token + np.array([place.number, place.slot]).tobytes()
        damaged = bytearray(asked)
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(asked) - 1))] = data.draw(st.integers(0, 255))
        whole = damaged[: data.draw(st.integers(0, len(asked)))]
        with socket.create_connection(place.address, 20) as connection:
            answer = b""
            with contextlib.suppress(OSError):  # it had not read all when it closed
                connection.sendall(whole)
                connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1 << 16):
                    answer += piece
        if whole[:32] != place.token or len(whole) < len(asked):
            assert answer == b""
        elif whole == asked:
            assert answer.startswith(b"weights\0")
        else:
            assert answer == b"gone".ljust(5 * 8, b"\0")
        assert same(channel("rollout", 0).obtain(offer), packet(3, 0))
    finally:
        sender.close(20)


@given(st.data())
def test_answers_of_any_bytes_give_a_packet_or_an_error(data: st.DataObject) -> None:
    """Whatever they are, no more memory is taken than the offer says."""
    made = packet(3, 0, (50, 0, 7))
    mark = data.draw(st.sampled_from([b"weights\0", b"gone\0\0\0\0", b"HTTP/1.1"]))
    answer = mark + data.draw(st.binary(max_size=300))
    sender = channel("train", 3)
    try:
        offer = sender.publish({("rollout", 0): made})
        with socket.create_server((HOST, 0)) as other:

            def reply() -> None:
                with other.accept()[0] as connection:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(OSError):
                        connection.recv(1000)

            thread = threading.Thread(target=reply)
            thread.start()
            try:
                found = channel("rollout", 0, 5.0).obtain(elsewhere(offer, other))
            except WeightsError:
                found = None
            thread.join(20)
        if found is not None:
            assert mark == b"weights\0"
            assert [len(bucket) for bucket in found.buckets] == [50, 0, 7]
            assert len(answer) >= 5 * 8 + 2 * 4 * 8 + 57
    finally:
        sender.close(20)
