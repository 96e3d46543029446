"""Weights that processes give each other when they are asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from penstock.workers.weight_sync.packet_server import Outbox, PacketServer, Route, Store
from penstock.workers.weight_sync.packets import Packet
from penstock.workers.weight_sync.version_tracker import WeightsError

ROUTE = Route("train", "rollout", from_processes=(3, 2), to_processes=(0, 1))
ALONE = Route("train", "rollout", (0,), (0,))


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


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


def same(one: Packet, other: Packet) -> bool:
    arrays = [(p.params, p.checksums, *p.buckets) for p in (one, other)]
    numbers = [(p.plan, p.source, p.destination, p.version) for p in (one, other)]
    return numbers[0] == numbers[1] and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*arrays, strict=True)
    )


def met(route: Route, folder: Path, deadline_s: float = 20.0) -> list[PacketServer]:
    """Both ends of a route, each made by a thread of its own because they wait for each other."""
    mails: dict[int, PacketServer] = {}

    def make(number: int) -> None:
        mails[number] = PacketServer(route, number, store_in(folder, route), deadline_s, 30.0)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(route.num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [mails[number] for number in range(route.num_processes)]


def store_in(folder: Path, route: Route) -> Store:
    return dist.FileStore(str(folder / "store"), route.num_processes)  # pyright: ignore[reportPrivateImportUsage, reportReturnType]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[list[PacketServer], dict[int, Outbox]]]:
    mails = met(ROUTE, tmp_path)
    shelves = {process: Outbox() for process in ROUTE.from_processes}
    for process, outbox in shelves.items():
        mails[ROUTE.number("train", process)].serve(outbox)
    yield mails, shelves
    for packet_server in reversed(mails):  # receivers first: those who give wait for them
        packet_server.close(20)


def test_everybody_gets_what_is_for_them_as_often_as_they_ask(
    ends: tuple[list[PacketServer], dict[int, Outbox]],
) -> None:
    mails, shelves = ends
    made = {
        (sender, receiver): packet(sender, receiver) for sender in (3, 2) for receiver in (0, 1)
    }
    keys = {
        sender: outbox.put({("rollout", receiver): made[sender, receiver] for receiver in (0, 1)})
        for sender, outbox in shelves.items()
    }
    for _ in range(2):
        for receiver in (1, 0):
            packet_server = mails[ROUTE.number("rollout", receiver)]
            for sender in (2, 3):
                assert same(packet_server.fetch(sender, keys[sender]), made[sender, receiver])


def test_receivers_may_ask_at_the_same_time(
    ends: tuple[list[PacketServer], dict[int, Outbox]],
) -> None:
    mails, shelves = ends
    made = {receiver: packet(3, receiver, (5_000_000,)) for receiver in (0, 1)}
    key = shelves[3].put({("rollout", receiver): made[receiver] for receiver in (0, 1)})
    got: dict[int, list[Packet]] = {0: [], 1: []}

    def ask(receiver: int) -> None:
        for _ in range(3):
            got[receiver].append(mails[ROUTE.number("rollout", receiver)].fetch(3, key))

    threads = [threading.Thread(target=ask, args=(receiver,)) for receiver in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(found) for found in got.values()] == [3, 3]
    assert all(same(one, made[receiver]) for receiver, found in got.items() for one in found)


def test_what_was_dropped_is_refused_and_the_rest_still_given(
    ends: tuple[list[PacketServer], dict[int, Outbox]],
) -> None:
    mails, shelves = ends
    old = shelves[3].put({("rollout", 0): packet(3, 0)})
    new = shelves[3].put({("rollout", 0): packet(3, 0)})
    shelves[3].drop(old)
    packet_server = mails[ROUTE.number("rollout", 0)]
    with pytest.raises(
        WeightsError,
        match=r"^process 3 of group 'train' no longer has the weights that group 'rollout' asked "
        r"it for$",
    ):
        packet_server.fetch(3, old)
    assert same(packet_server.fetch(3, new), packet(3, 0))
    assert len(shelves[3]) == 1


def test_a_sender_that_does_not_answer_is_not_waited_for_longer_than_the_deadline(
    tmp_path: Path,
) -> None:
    mails = met(ALONE, tmp_path, deadline_s=0.5)
    begin = time.monotonic()
    with pytest.raises(
        WeightsError,
        match=r"^the weights of process 0 of group 'train' did not come from process 0; 0\.5\d* s "
        r"had passed of the 0\.5 s that the transfer may take\. It said: ",
    ):
        mails[1].fetch(0, 1)
    for packet_server in mails:
        packet_server.close(0.1)
    assert time.monotonic() - begin < 10


_SENDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_packet_server import ALONE, Outbox, PacketServer, packet, store_in
outbox = Outbox()
packet_server = PacketServer(ALONE, 0, store_in(Path(sys.argv[1]), ALONE), 20.0, 30.0)
assert outbox.put({("rollout", 0): packet(0, 0)}) == 1
packet_server.serve(outbox)
time.sleep(60)
"""


def test_a_sender_that_dies_is_named(tmp_path: Path) -> None:
    sender = subprocess.Popen(
        [sys.executable, "-c", _SENDER, str(tmp_path), str(Path(__file__).parent)]
    )
    try:
        packet_server = PacketServer(ALONE, 1, store_in(tmp_path, ALONE), 20.0, 30.0)
        assert same(packet_server.fetch(0, 1), packet(0, 0))
    finally:
        sender.kill()
        sender.wait(20)
    with pytest.raises(WeightsError, match=r"of process 0 of group 'train'.* It said: "):
        packet_server.fetch(0, 1)
    packet_server.close(0.1)


_RECEIVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_packet_server import ALONE, PacketServer, store_in
packet_server = PacketServer(ALONE, 1, store_in(Path(sys.argv[1]), ALONE), 20.0, 30.0)
packet_server.fetch(0, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_waits_for_a_receiver_that_has_died(tmp_path: Path) -> None:
    receiver = subprocess.Popen(
        [sys.executable, "-c", _RECEIVER, str(tmp_path), str(Path(__file__).parent)]
    )
    try:
        outbox = Outbox()
        packet_server = PacketServer(ALONE, 0, store_in(tmp_path, ALONE), 20.0, 30.0)
        outbox.put({("rollout", 0): packet(0, 0)})
        begin = threading.active_count()
        packet_server.serve(outbox)
        assert threading.active_count() == begin + 1
        assert receiver.wait(30) == -signal.SIGKILL
    finally:
        receiver.kill()
        receiver.wait(20)
    packet_server.close(20)
    assert threading.active_count() == begin


def test_others_that_do_not_come_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        PacketServer(ALONE, 0, store_in(tmp_path, ALONE), 20.0, 0.5)
