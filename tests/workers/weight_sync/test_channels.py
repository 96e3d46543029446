"""What every weight channel must do, between real processes.

Whatever goes wrong, a receiver ends with the weights of the version it asked for, bit for bit, or
with a `WeightsError` by the deadline; then it still has what it had, and refuses to use it as the
new version. A new channel is run through all of this by its line in the registry.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
from penstock.workers.executors.process_backend import CallFailed, ProcessBackend, Ref
from penstock.workers.weight_sync.channel import CHANNELS, Offer, Transport
from penstock.workers.weight_sync.packets import WeightsError

from ..executors.backends import OnRay, OnSpawned
from .channel_peer import FAULTS, Peer
from .whole_peer import MODEL_BYTES, RECEIVERS, WholePeer

pytestmark = pytest.mark.slow

DEADLINE_S = 3.0
SLACK_S = 10.0
"""How much later than the deadline a busy machine may notice it."""
START_S = 100.0
LARGE = 2**26

GROUPS = {name: DeviceGroup(name, num_ranks=2) for name in ("train", "rollout")}


class Peers:
    """Two processes that send and two that receive, and what they can be asked."""

    def __init__(self, backend: ProcessBackend, transport: Transport) -> None:
        self.backend, self.transport = backend, transport
        self._devices = backend.reserve(list(GROUPS.values()), START_S)
        self._all: list[Any] = []
        self.senders = [self.start("train", process) for process in (0, 1)]
        self.receivers = [self.start("rollout", process) for process in (0, 1)]

    def start(self, group: str, process: int) -> Any:
        arguments = group, process, self.transport, DEADLINE_S
        started = self.backend.spawn(Peer, arguments, GROUPS[group], process, self._devices)
        self._all.append(started)
        return started

    def call(self, process: Any, method: str, *arguments: Any) -> Ref:
        (ref,) = self.backend.call(process, method, arguments)
        return ref

    def result(self, ref: Ref, timeout_s: float = START_S) -> Any:
        (found,) = self.backend.get([ref], timeout_s)
        return found

    def ask(self, process: Any, method: str, *arguments: Any) -> Any:
        return self.result(self.call(process, method, *arguments))

    def failed(self, ref: Ref) -> bool:
        try:
            self.result(ref, 0.0)
        except CallFailed:
            return True
        return False

    def publish(self, version: int, fault: str = "") -> list[Offer]:
        """By both senders; the first of them may be wrong in what it has for receiver 0."""
        first, other = self.senders
        return [self.ask(first, "publish", version, fault), self.ask(other, "publish", version)]

    def signal(self, process: Any, number: signal.Signals) -> None:
        os.kill(self.ask(process, "pid"), number)

    def close(self) -> None:
        for process in self._all:
            self.backend.kill(process)
        for group in GROUPS:
            self._devices.release(group)


@pytest.fixture(scope="module")
def on_spawned() -> Iterator[ProcessBackend]:
    one = OnSpawned()
    yield one.backend
    one.backend.close()


@pytest.fixture(scope="module")
def on_ray() -> Iterator[ProcessBackend]:
    connect_ray()
    yield OnRay().connect()
    shutdown_ray()


@pytest.fixture(scope="module", params=CHANNELS)
def peers(request: pytest.FixtureRequest, on_spawned: ProcessBackend) -> Iterator[Peers]:
    """For tests after which all four still run."""
    yield from made(on_spawned, request.param)


@pytest.fixture(params=CHANNELS)
def mortals(request: pytest.FixtureRequest, on_spawned: ProcessBackend) -> Iterator[Peers]:
    """For tests after which they do not."""
    yield from made(on_spawned, request.param)


@pytest.fixture
def mortals_on_ray(on_ray: ProcessBackend) -> Iterator[Peers]:
    yield from made(on_ray, "object_store")


@pytest.fixture
def listeners(on_spawned: ProcessBackend) -> Iterator[Peers]:
    """Whose offers are gone for certain once they are forgotten."""
    yield from made(on_spawned, "cuda_ipc")


def made(backend: ProcessBackend, transport: Transport) -> Iterator[Peers]:
    peers = Peers(backend, transport)
    yield peers
    peers.close()


def refusal(peers: Peers, call: Ref) -> str:
    """What a receiver says that could not be given the weights."""
    with pytest.raises(CallFailed) as caught:
        peers.result(call, DEADLINE_S + SLACK_S)
    assert isinstance(caught.value.cause, WeightsError)
    return str(caught.value.cause)


def check_received(peers: Peers, receiver: Any, version: int) -> None:
    assert peers.ask(receiver, "holds", version)
    peers.ask(receiver, "check", version)


def check_kept(peers: Peers, receiver: Any, old: int | None, new: int) -> None:
    """It has what it had, and does not take it for the new version."""
    assert peers.ask(receiver, "holds", old)
    with pytest.raises(CallFailed) as caught:
        peers.ask(receiver, "check", new)
    assert isinstance(caught.value.cause, WeightsError)


def test_weights_arrive_in_any_order_of_offers_and_as_often_as_they_are_asked_for(
    peers: Peers,
) -> None:
    old, new = peers.publish(1), peers.publish(2)
    for offers, version in ((new, 2), (old[::-1], 1), (new[::-1], 2), (new, 2)):
        calls = [peers.call(one, "receive", offers, version) for one in peers.receivers]
        for receiver, call in zip(peers.receivers, calls, strict=True):
            peers.result(call)
            check_received(peers, receiver, version)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_packets_are_refused_and_right_ones_taken_afterwards(
    peers: Peers, fault: str
) -> None:
    first, other = peers.receivers
    before = peers.publish(10)
    peers.ask(first, "receive", before, 10)
    offers = peers.publish(11, fault)
    said = refusal(peers, peers.call(first, "receive", offers, 11))
    assert "device 2" in said  # where it was to go
    check_kept(peers, first, 10, 11)
    peers.ask(other, "receive", offers, 11)
    check_received(peers, other, 11)
    peers.ask(first, "receive", peers.publish(11), 11)
    check_received(peers, first, 11)


def test_an_old_offer_is_not_taken_for_a_new_one(peers: Peers) -> None:
    first = peers.receivers[0]
    old, new = peers.publish(20), peers.publish(21)
    peers.ask(first, "receive", old, 20)
    said = refusal(peers, peers.call(first, "receive", [old[0], new[1]], 21))
    assert "of version 20; expected version 21" in said
    check_kept(peers, first, 20, 21)


def test_a_missing_offer_is_noticed(peers: Peers) -> None:
    first = peers.receivers[0]
    offers = peers.publish(30)
    peers.ask(first, "receive", offers, 30)
    said = refusal(peers, peers.call(first, "receive", peers.publish(31)[:1], 31))
    assert "no packet has come from device 1" in said
    check_kept(peers, first, 30, 31)


def test_forgotten_weights_are_right_or_refused_and_others_still_given(peers: Peers) -> None:
    first = peers.receivers[0]
    old, new = peers.publish(40), peers.publish(41)
    for sender, offer in zip(peers.senders, old, strict=True):
        peers.ask(sender, "forget", offer.number)
    right_or_refused(peers, first, peers.call(first, "receive", old, 40), 40)
    peers.ask(first, "receive", new, 41)
    check_received(peers, first, 41)


def right_or_refused(peers: Peers, receiver: Any, call: Ref, version: int) -> None:
    """By the deadline, and without anything half written."""
    begin_s = time.monotonic()
    peers.backend.watch([call], DEADLINE_S + SLACK_S)
    if peers.failed(call):
        assert refusal(peers, call).startswith("the weights of process ")
        with pytest.raises(CallFailed):
            peers.ask(receiver, "check", version)
    else:
        check_received(peers, receiver, version)
    assert time.monotonic() - begin_s < DEADLINE_S + SLACK_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_hangs_is_not_waited_for(
    mortals: Peers, number: signal.Signals
) -> None:
    first = mortals.receivers[0]
    mortals.ask(first, "receive", mortals.publish(1), 1)
    offers = mortals.publish(2)
    mortals.signal(mortals.senders[0], number)
    right_or_refused(mortals, first, mortals.call(first, "receive", offers, 2), 2)


def test_a_copy_that_never_got_its_first_weights_is_refused(listeners: Peers) -> None:
    """What it was built with is not taken for them."""
    sender, receiver = listeners.senders[0], listeners.receivers[0]
    offers = listeners.publish(1)
    listeners.ask(sender, "forget", offers[0].number)
    refusal(listeners, listeners.call(receiver, "receive", offers, 1))
    with pytest.raises(CallFailed, match="was never received; version 1 is expected"):
        listeners.ask(receiver, "check", 1)


def test_nor_is_one_whose_store_forgets_what_it_put_there(mortals_on_ray: Peers) -> None:
    """Plain processes leave files; Ray loses an object with its owner, sooner or later."""
    first = mortals_on_ray.receivers[0]
    offers = mortals_on_ray.publish(1)
    mortals_on_ray.signal(mortals_on_ray.senders[0], signal.SIGKILL)
    call = mortals_on_ray.call(first, "receive", offers, 1)
    right_or_refused(mortals_on_ray, first, call, 1)


def stored_mib() -> int:
    """What Ray's object store holds, by its own account."""
    import ray
    from ray._private.internal_api import memory_summary

    said = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    found = re.search(r"Plasma memory usage (\d+) MiB", said)
    assert found is not None, said
    return int(found[1])


def test_ray_stores_a_model_once_for_all_who_take_it(on_ray: ProcessBackend) -> None:
    """Two processes of one engine and one of another read the same memory."""
    groups = [DeviceGroup("train"), *(DeviceGroup(n, num_ranks=k) for n, k in RECEIVERS.items())]
    devices = on_ray.reserve(groups, START_S)
    started = [
        on_ray.spawn(WholePeer, (group.name, process, "object_store"), group, process, devices)
        for group in groups
        for process in range(group.num_processes)
    ]
    try:
        on_ray.get([on_ray.call(one, "taken", ())[0] for one in started], START_S)
        before = stored_mib()
        (offer,) = on_ray.get(on_ray.call(started[0], "publish", (1,)), START_S)
        taken = [on_ray.call(one, "take", ([offer], 1))[0] for one in started[1:]]
        assert on_ray.get(taken, START_S) == [True] * 3
        assert stored_mib() - before <= MODEL_BYTES / 2**20 + 1
    finally:
        for one in started:
            on_ray.kill(one)
        for group in groups:
            devices.release(group.name)


def test_a_sender_may_die_while_its_weights_are_on_their_way(mortals: Peers) -> None:
    """The receiver is stopped in between, so that they are."""
    sender, receiver = mortals.senders[0], mortals.receivers[0]
    pid = mortals.ask(receiver, "pid")
    offer = mortals.ask(sender, "publish_large", LARGE)
    call = mortals.call(receiver, "receive", [offer], 1)
    os.kill(pid, signal.SIGSTOP)
    mortals.signal(sender, signal.SIGKILL)
    os.kill(pid, signal.SIGCONT)
    refusal(mortals, call)
    assert mortals.ask(receiver, "holds", None)


def test_a_receiver_that_dies_is_in_nobodys_way(mortals: Peers) -> None:
    """Started again it asks for the same weights, and the sender can end in time."""
    sender, (mortal, other) = mortals.senders[0], mortals.receivers
    offers = mortals.publish(1)
    large = mortals.ask(sender, "publish_large", LARGE)
    mortals.call(mortal, "receive", [large], 1)
    mortals.backend.kill(mortal)
    again = mortals.start("rollout", 0)
    for receiver in (again, other):
        mortals.ask(receiver, "receive", offers, 1)
        check_received(mortals, receiver, 1)
    newer = mortals.publish(2)
    mortals.ask(again, "receive", newer, 2)
    check_received(mortals, again, 2)
    mortals.result(mortals.call(sender, "close"), 1.0 + SLACK_S)


def test_a_sender_ends_in_time_though_a_receiver_hangs(mortals: Peers) -> None:
    sender, receiver = mortals.senders[0], mortals.receivers[0]
    pid = mortals.ask(receiver, "pid")
    offer = mortals.ask(sender, "publish_large", LARGE)
    mortals.call(receiver, "receive", [offer], 1)
    os.kill(pid, signal.SIGSTOP)
    mortals.result(mortals.call(sender, "close"), 1.0 + SLACK_S)
    os.kill(pid, signal.SIGCONT)
