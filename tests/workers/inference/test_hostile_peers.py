"""Peers that send anything, half of it, too much of it or nothing: nobody else waits for them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from no_more_files import no_more_files
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.remote_inference import (
    Array,
    InferenceRequest,
    ServedRole,
    ServedWeights,
)
from penstock.workers.inference import link as wire
from penstock.workers.inference.link import (
    FrameReader,
    InferenceClient,
    InferenceServer,
    answer_frame,
    answer_from,
    proof,
    request_frame,
    request_from,
)

from .serving import TOKEN, answer_on, connected, serving


class Doubled(NamedTuple):
    value: Array


class Doubler(Role):
    """Doubles; waits as many seconds as it is told first."""

    def double(self, value: Array, wait_s: Array | None) -> Doubled:
        if wait_s is not None:
            time.sleep(float(wait_s))
        if value.size and value.flat[0] < 0:
            raise ValueError("x" * 1_000_000 + "end")
        return Doubled(value * 2)


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    with serving(Doubler()) as running:
        yield running


@pytest.fixture
def client(server: InferenceServer) -> Iterator[InferenceClient]:
    with connected(server.address) as found:
        yield found


def double(client: InferenceClient, value: float = 1.0, wait_s: float | None = None) -> list[float]:
    stand_in = ServedRole("doubler", Doubler, client.send).at(7)
    assert isinstance(stand_in, Doubler)
    wait = None if wait_s is None else np.array(wait_s)
    return stand_in.double(np.array([value]), wait).value.tolist()


@contextlib.contextmanager
def proven(server: InferenceServer) -> Generator[socket.socket]:
    """A connection of somebody who knows the token."""
    with socket.create_connection(server.address, 20.0) as link:
        link.sendall(proof(TOKEN, link.recv(16)))
        yield link


def is_closed(link: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while link.recv(1 << 16):
            pass
    return True


def frame(header: object, arrays: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<IQ", len(text), len(arrays)) + text + arrays


def with_arrays(*specs: object) -> bytes:
    header = {"role": "doubler", "method": "double", "version": 7, "arrays": list(specs)}
    return frame(header, b"\0" * 8)


NO_REQUESTS = {
    "2**63 bytes": struct.pack("<IQ", 2, 2**63) + b"{}",
    "2**64 - 1 bytes": struct.pack("<IQ", 2, 2**64 - 1) + b"{}",
    "a header of 4 GiB": struct.pack("<IQ", 2**32 - 1, 0),
    "2**63 elements": with_arrays(["f4", 2**63]),
    "2**31 elements": with_arrays(["f4", 2**31]),
    "2**63 times none": with_arrays(["f4", 0, 2**63]),
    "10**400 elements": with_arrays(["f4", 10**400]),
    "a product beyond 64 bits": with_arrays(["f8", *[2**31] * 4]),
    "none of very many": with_arrays(["f8", 0, *[2**31] * 4], ["f8", 1]),
    "40 axes": with_arrays(["f8", *[1] * 40]),
    "less than nothing": with_arrays(["f8", -1]),
    "truth as a size": with_arrays(["f8", True]),
    "a broken size": with_arrays(["f8", 1.0]),
    "a list as a dtype": with_arrays([["f8"], 1]),
    "no dtype": with_arrays([]),
    "an object as an array": with_arrays({}),
    "a number as an array": with_arrays(5),
    "a text as an array": with_arrays("f8"),
    "objects": with_arrays(["O8", 1]),
    "too few arrays": with_arrays(),
    "arrays that are none": frame({"role": "a", "method": "b", "version": 1, "arrays": 5}),
    "no role": frame({"method": "b", "version": 1, "arrays": []}),
    "a role that is a list": frame({"role": [], "method": "b", "version": 1, "arrays": []}),
    "a version that is a text": frame({"role": "a", "method": "b", "version": "1", "arrays": []}),
    "a list": frame([]),
    "a number": frame(5),
    "no JSON": frame(b"\xff\xfe{}"),
    "brackets": frame(b"[" * 1_000_000),
    "a number of many digits": frame(b'{"arrays": ' + b"9" * 10_000 + b"}"),
}


@pytest.mark.parametrize("what", NO_REQUESTS)
def test_what_is_no_request_costs_its_own_connection(
    server: InferenceServer, client: InferenceClient, what: str
) -> None:
    with proven(server) as link:
        link.sendall(NO_REQUESTS[what])
        assert is_closed(link)
    assert double(client) == [2]


def test_who_asks_for_what_is_not_served_is_told(server: InferenceServer) -> None:
    asked = InferenceRequest("doubler", "__init__", 7, ())
    with proven(server) as link:
        link.sendall(request_frame(asked))
        with pytest.raises(WorkerError, match="'doubler' serves double, not '__init__'"):
            answer_on(link, Doubled)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("drips", [False, True])
def test_half_a_request_is_not_kept(
    server: InferenceServer,
    client: InferenceClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    drips: bool,
) -> None:
    monkeypatch.setattr(wire, "_REQUEST_S", 0.3)
    whole = request_frame(InferenceRequest("doubler", "double", 7, (np.ones(1000), None)))
    began = time.monotonic()
    with proven(server) as link, contextlib.suppress(ConnectionError):
        link.sendall(whole[:500])
        while "a connection is dropped" not in caplog.text:
            assert time.monotonic() - began < 5
            time.sleep(0.05)
            double(client)  # else it would look after 10 s
            if drips:
                link.sendall(b"\0")
    assert messages(caplog) == ["a connection is dropped: its request was not whole after 0.3 s"]


def test_the_time_of_an_answer_is_not_taken_for_that_of_a_request(
    server: InferenceServer, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_REQUEST_S", 0.3)
    monkeypatch.setattr(wire, "_PATIENCE_S", 0.3)
    whole = request_frame(InferenceRequest("doubler", "double", 7, (np.ones(1000), None)))
    with proven(server) as link, socket.create_connection(server.address, 20.0) as late:
        link.sendall(whole[:500])
        time.sleep(0.1)
        assert double(client, wait_s=1.0) == [2]
        link.sendall(whole[500:])
        late.sendall(proof(TOKEN, late.recv(16)))
        late.sendall(whole)
        for one in (link, late):
            assert answer_on(one, Doubled).value.sum() == 2000


def test_a_second_request_waits_for_the_answer_to_the_first(
    server: InferenceServer, client: InferenceClient, caplog: pytest.LogCaptureFixture
) -> None:
    whole = request_frame(InferenceRequest("doubler", "double", 7, (np.ones(1), None)))
    with proven(server) as link:
        link.sendall(whole * 2)
        assert is_closed(link)
    assert messages(caplog) == ["a connection is dropped: it asks again before it has its answer"]
    assert double(client) == [2]


def test_connections_that_prove_nothing_give_way(
    server: InferenceServer,
    client: InferenceClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wire, "_MOST_UNPROVEN", 16)
    with contextlib.ExitStack() as held:
        links = [
            held.enter_context(socket.create_connection(server.address, 20)) for _ in range(60)
        ]
        for link in links[::2]:
            with contextlib.suppress(ConnectionError):
                link.sendall(b"half of a proof")
        assert double(client) == [2]
        for link in links[:30]:
            assert is_closed(link)
    assert set(messages(caplog)) == {
        "a connection is dropped: too many others have not proven themselves either"
    }


def test_a_wrong_token_is_told_apart(
    server: InferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(server.address, 20) as link:
        link.sendall(proof("another", link.recv(16)))
        assert is_closed(link)
    assert messages(caplog) == ["a connection is dropped: it does not know the token of this run"]


def test_a_server_without_descriptors_waits_and_does_not_spin(
    server: InferenceServer, client: InferenceClient, caplog: pytest.LogCaptureFixture
) -> None:
    with no_more_files(spare=1), socket.create_connection(server.address, 20):
        end_s = time.monotonic() + 20
        while not caplog.records and time.monotonic() < end_s:
            time.sleep(0.01)
        spent_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - spent_s < 0.2
        assert 1 <= len(caplog.records) < 12
    assert double(client) == [2]
    assert messages(caplog)[0] == (
        "a connection could not be accepted: [Errno 24] Too many open files"
    )


def test_an_error_that_goes_on_for_ever_is_cut(client: InferenceClient) -> None:
    with pytest.raises(WorkerError) as caught:
        double(client, -1.0)
    text = str(caught.value)
    assert len(text) < 70_000
    assert text.startswith("'doubler.double' failed where it is served:\nTraceback")
    assert " characters ...\n" in text
    assert text.endswith("xxxend")


def test_what_is_too_large_is_not_sent(
    client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_MOST_ARRAYS", 7)
    with pytest.raises(WorkerError) as caught:
        double(client)
    assert str(caught.value) == (
        "a message of 8 bytes of arrays and a header of 82 cannot be sent; at most 7 and 1048576 "
        "are taken. Ask about fewer rows at once"
    )


class Quitting(ServedWeights):
    def answer_all(self, requests: Sequence[InferenceRequest]) -> list[object]:
        raise SystemExit(0)


def test_a_role_that_calls_exit_is_told_of() -> None:
    server = InferenceServer(Quitting("group 'math'"), "127.0.0.1", TOKEN)
    with (
        connected(server.address) as client,
        pytest.raises(WorkerError, match="has its process ended"),
    ):
        double(client)
    with pytest.raises(WorkerError, match=r"a fault of its own, .*: SystemExit\(0\)$"):
        server.close()


@contextlib.contextmanager
def pretending(answer: Callable[[socket.socket], None]) -> Generator[tuple[str, int]]:
    """Something that listens where a server should, and answers anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as link:
                link.settimeout(10)
                link.sendall(b"c" * 16)
                link.recv(1 << 16)
                answer(link)
                link.shutdown(socket.SHUT_WR)
                while link.recv(1 << 16):
                    pass

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()
        thread.join(20)


def test_more_than_one_answer_is_not_kept_for_the_next_request() -> None:
    answer = answer_frame(Doubled(np.array([3.0])))
    with (
        pretending(lambda link: link.sendall(answer * 2)) as address,
        connected(address, 5.0) as client,
        pytest.raises(WorkerError) as caught,
    ):
        double(client)
    assert str(caught.value) == (
        "calling 'doubler.double' of group 'math' failed: it said more than its answer; has its "
        "process ended?"
    )


def test_a_server_that_drips_has_the_time_of_the_call() -> None:
    def drips(link: socket.socket) -> None:
        for byte in answer_frame(Doubled(np.ones(1000))):
            link.sendall(bytes([byte]))
            time.sleep(0.02)

    client = InferenceClient("group 'math'", 0.3)
    began = time.monotonic()
    with pretending(drips) as address:
        client.connect(address, TOKEN)
        with pytest.raises(WorkerError, match=r"no answer within 0\.3 s"):
            double(client)
        assert time.monotonic() - began < 1


def damaged(data: st.DataObject, whole: bytes) -> bytes:
    """With bytes changed, left out, put in, or the end cut off."""
    found = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(found) - 1))
        end = at + data.draw(st.integers(0, 3))
        found[at:end] = data.draw(st.binary(max_size=9))
    return bytes(found[: data.draw(st.integers(0, len(found)))])


REQUEST = request_frame(InferenceRequest("doubler", "double", 7, (np.ones(3), None)))


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300)
def test_damaged_frames_are_frames_or_refused(data: st.DataObject) -> None:
    reader = FrameReader()
    reader.feed(damaged(data, REQUEST))
    with contextlib.suppress(WorkerError):
        while (found := reader.take()) is not None:
            request_from(found)
    reader = FrameReader()
    reader.feed(damaged(data, answer_frame(Doubled(np.ones(3)))))
    with contextlib.suppress(WorkerError):
        while (found := reader.take()) is not None:
            answer_from(found, Doubled)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_whatever_is_sent_others_are_answered(
    server: InferenceServer, client: InferenceClient, data: st.DataObject
) -> None:
    with socket.create_connection(server.address, 20) as link:
        challenge = link.recv(16)
        first = proof(TOKEN, challenge)
        sent = damaged(data, first) if data.draw(st.booleans()) else first
        with contextlib.suppress(OSError):  # it had not read all when it closed
            link.sendall(sent + damaged(data, REQUEST))
            link.shutdown(socket.SHUT_WR)
            assert is_closed(link)
    assert double(client) == [2]
