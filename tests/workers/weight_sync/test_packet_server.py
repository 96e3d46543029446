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
from penstock.workers.weight_sync.packet_server import Mail, Route, Shelf, Store
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


def met(route: Route, folder: Path, deadline_s: float = 20.0) -> list[Mail]:
    """Both ends of a route, each made by a thread of its own because they wait for each other."""
    mails: dict[int, Mail] = {}

    def make(number: int) -> None:
        mails[number] = Mail(route, number, store_in(folder, route), deadline_s, 30.0)

    threads = [threading.Thread(target=make, args=(i,)) for i in range(route.num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [mails[number] for number in range(route.num_processes)]


def store_in(folder: Path, route: Route) -> Store:
    return dist.FileStore(str(folder / "store"), route.num_processes)  # pyright: ignore[reportPrivateImportUsage, reportReturnType]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[list[Mail], dict[int, Shelf]]]:
    mails = met(ROUTE, tmp_path)
    shelves = {process: Shelf() for process in ROUTE.from_processes}
    for process, shelf in shelves.items():
        mails[ROUTE.number("train", process)].serve(shelf)
    yield mails, shelves
    for mail in reversed(mails):  # takers first: those who give wait for them
        mail.close(20)


def test_everybody_gets_what_is_for_them_as_often_as_they_ask(
    ends: tuple[list[Mail], dict[int, Shelf]],
) -> None:
    mails, shelves = ends
    made = {(giver, taker): packet(giver, taker) for giver in (3, 2) for taker in (0, 1)}
    keys = {
        giver: shelf.put({("rollout", taker): made[giver, taker] for taker in (0, 1)})
        for giver, shelf in shelves.items()
    }
    for _ in range(2):
        for taker in (1, 0):
            mail = mails[ROUTE.number("rollout", taker)]
            for giver in (2, 3):
                assert same(mail.fetch(giver, keys[giver]), made[giver, taker])


def test_takers_may_ask_at_the_same_time(ends: tuple[list[Mail], dict[int, Shelf]]) -> None:
    mails, shelves = ends
    made = {taker: packet(3, taker, (5_000_000,)) for taker in (0, 1)}
    key = shelves[3].put({("rollout", taker): made[taker] for taker in (0, 1)})
    got: dict[int, list[Packet]] = {0: [], 1: []}

    def ask(taker: int) -> None:
        for _ in range(3):
            got[taker].append(mails[ROUTE.number("rollout", taker)].fetch(3, key))

    threads = [threading.Thread(target=ask, args=(taker,)) for taker in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [len(found) for found in got.values()] == [3, 3]
    assert all(same(one, made[taker]) for taker, found in got.items() for one in found)


def test_what_was_dropped_is_refused_and_the_rest_still_given(
    ends: tuple[list[Mail], dict[int, Shelf]],
) -> None:
    mails, shelves = ends
    old = shelves[3].put({("rollout", 0): packet(3, 0)})
    new = shelves[3].put({("rollout", 0): packet(3, 0)})
    shelves[3].drop(old)
    mail = mails[ROUTE.number("rollout", 0)]
    with pytest.raises(
        WeightsError,
        match=r"^process 3 of group 'train' no longer has the weights that group 'rollout' asked "
        r"it for$",
    ):
        mail.fetch(3, old)
    assert same(mail.fetch(3, new), packet(3, 0))
    assert len(shelves[3]) == 1


def test_a_giver_that_does_not_answer_is_not_waited_for_longer_than_the_deadline(
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
    for mail in mails:
        mail.close(0.1)
    assert time.monotonic() - begin < 10


_GIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_packet_server import ALONE, Shelf, Mail, packet, store_in
shelf = Shelf()
mail = Mail(ALONE, 0, store_in(Path(sys.argv[1]), ALONE), 20.0, 30.0)
assert shelf.put({("rollout", 0): packet(0, 0)}) == 1
mail.serve(shelf)
time.sleep(60)
"""


def test_a_giver_that_dies_is_named(tmp_path: Path) -> None:
    giver = subprocess.Popen(
        [sys.executable, "-c", _GIVER, str(tmp_path), str(Path(__file__).parent)]
    )
    try:
        mail = Mail(ALONE, 1, store_in(tmp_path, ALONE), 20.0, 30.0)
        assert same(mail.fetch(0, 1), packet(0, 0))
    finally:
        giver.kill()
        giver.wait(20)
    with pytest.raises(WeightsError, match=r"of process 0 of group 'train'.* It said: "):
        mail.fetch(0, 1)
    mail.close(0.1)


_TAKER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_packet_server import ALONE, Mail, store_in
mail = Mail(ALONE, 1, store_in(Path(sys.argv[1]), ALONE), 20.0, 30.0)
mail.fetch(0, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_waits_for_a_taker_that_has_died(tmp_path: Path) -> None:
    taker = subprocess.Popen(
        [sys.executable, "-c", _TAKER, str(tmp_path), str(Path(__file__).parent)]
    )
    try:
        shelf = Shelf()
        mail = Mail(ALONE, 0, store_in(tmp_path, ALONE), 20.0, 30.0)
        shelf.put({("rollout", 0): packet(0, 0)})
        begin = threading.active_count()
        mail.serve(shelf)
        assert threading.active_count() == begin + 1
        assert taker.wait(30) == -signal.SIGKILL
    finally:
        taker.kill()
        taker.wait(20)
    mail.close(20)
    assert threading.active_count() == begin


def test_others_that_do_not_come_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out"):
        Mail(ALONE, 0, store_in(tmp_path, ALONE), 20.0, 0.5)
