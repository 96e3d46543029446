"""Questions that travel by TCP: what arrives, what is refused, what happens when one side goes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from penstock.dataflow.errors import StateError, WorkerError
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
    proof,
    request_frame,
    request_from,
)

from .serving import TOKEN, connected, serving


class Doubled(NamedTuple):
    value: Array
    hint: Array | None


class Doubler(Role):
    """Doubles; fails on what is negative, and waits at a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.answer: object = None

    def double(self, value: Array, hint: Array | None) -> Doubled:
        assert self.gate.wait(30)
        if self.answer is not None:
            return self.answer  # pyright: ignore[reportReturnType] - what a bad worker does
        if (value < 0).any():
            raise ValueError(f"cannot double {value.min()}")
        return Doubled(value * 2, hint)


@pytest.fixture
def doubler() -> Doubler:
    return Doubler()


@pytest.fixture
def server(doubler: Doubler) -> Iterator[InferenceServer]:
    with serving(doubler) as running:
        yield running
        doubler.gate.set()


@pytest.fixture
def client(server: InferenceServer) -> Iterator[InferenceClient]:
    with connected(server.address) as found:
        yield found


def at(client: InferenceClient, version: int = 7) -> Doubler:
    stand_in = ServedRole("doubler", Doubler, client.send).at(version)
    assert isinstance(stand_in, Doubler)
    return stand_in


def test_what_arrives_is_what_was_sent(client: InferenceClient) -> None:
    value = np.random.default_rng(0).random((3, 5), np.float32)
    hint = np.array([[True, False]])
    found = at(client).double(value[:, ::2], hint)
    assert found.value.dtype == np.float32
    assert found.value.tobytes() == (value[:, ::2] * 2).tobytes()
    assert found.hint is not None
    assert found.hint.tolist() == hint.tolist()
    assert at(client).double(np.zeros((0, 4)), None).value.shape == (0, 4)
    large = np.ones((1 << 20, 2))  # more than comes in one piece
    assert at(client).double(large, None).value.sum() == 1 << 22


_ARRAYS = st.sampled_from(["<f4", "<f8", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1", ">f4"]).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
)


@given(st.lists(st.none() | _ARRAYS, max_size=4), st.integers(1, 40))
def test_frames_survive_any_cutting(arrays: list[Array | None], size: int) -> None:
    asked = InferenceRequest("a role", "method", 3, tuple(arrays))
    data, reader = request_frame(asked) * 2, FrameReader()
    found: list[InferenceRequest] = []
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
        while (frame := reader.take()) is not None:
            found.append(request_from(frame))
    assert len(found) == 2
    for one in found:
        assert (one.role, one.method, one.version) == ("a role", "method", 3)
        for came, sent in zip(one.arguments, arrays, strict=True):
            assert (came is None) == (sent is None)
            if came is not None and sent is not None:
                assert came.shape == sent.shape
                assert came.tobytes() == sent.astype(came.dtype).tobytes()


def test_whatever_is_waiting_is_answered_together(
    client: InferenceClient, doubler: Doubler, server: InferenceServer
) -> None:
    before = 0
    with ThreadPoolExecutor(9) as pool:
        for _ in range(2):  # The first time they connect.
            before = server.num_batches
            doubler.gate.clear()
            asked = [pool.submit(at(client).double, np.full(2, float(n)), None) for n in range(9)]
            time.sleep(0.5)  # The first is being answered, and the others have been sent.
            doubler.gate.set()
            assert [one.result(20).value[0] for one in asked] == [2.0 * n for n in range(9)]
    assert server.num_requests == 18
    assert server.num_batches - before < 9


def test_a_server_with_other_weights_refuses(client: InferenceClient) -> None:
    with pytest.raises(WorkerError) as caught:
        at(client, version=8).double(np.ones(1), None)
    assert str(caught.value) == (
        "'doubler.double': 'doubler.double' was called for version 8 of the weights, but group "
        "'math' holds version 7; this is a fault of the engine, please report it"
    )


def test_what_fails_there_is_told_here(client: InferenceClient, doubler: Doubler) -> None:
    with pytest.raises(WorkerError, match="failed where it is served:\n") as caught:
        at(client).double(np.array([-2.0]), None)
    assert "ValueError: cannot double -2.0" in str(caught.value)
    assert 'raise ValueError(f"cannot double' in str(caught.value)
    doubler.answer = [1, 2]
    with pytest.raises(WorkerError, match="the answer is a list, no named tuple of arrays"):
        at(client).double(np.ones(1), None)
    doubler.answer = Doubled([1.0], None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkerError, match="entry 0 of the answer is a list, which is no array"):
        at(client).double(np.ones(1), None)
    doubler.answer = None
    assert at(client).double(np.ones(1), None).value.tolist() == [2]


def test_only_numbers_can_be_asked(client: InferenceClient) -> None:
    with pytest.raises(WorkerError, match="argument 0 of 'doubler.double' is a list; a role that"):
        at(client).double([1, 2], None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkerError, match="an array of object cannot be sent; known are b1, f4"):
        at(client).double(np.array([{}]), None)


def test_no_wait_is_without_end(server: InferenceServer, doubler: Doubler) -> None:
    doubler.gate.clear()
    client = InferenceClient("group 'math'", 0.2)
    with pytest.raises(StateError, match="the address of group 'math' is not known yet"):
        at(client).double(np.ones(1), None)
    client.connect(server.address, TOKEN)
    with pytest.raises(WorkerError) as caught:
        at(client).double(np.ones(1), None)
    assert str(caught.value) == (
        "calling 'doubler.double' of group 'math' failed: no answer within 0.2 s"
    )
    doubler.gate.set()
    with connected(server.address) as patient:
        assert at(patient).double(np.ones(1), None).value.tolist() == [2]


def test_a_server_that_has_gone_is_named(server: InferenceServer, client: InferenceClient) -> None:
    at(client).double(np.ones(1), None)
    server.close()
    with pytest.raises(WorkerError, match="of group 'math' failed: .*; has its process ended"):
        at(client).double(np.ones(1), None)


class Faulty(ServedWeights):
    """Fails itself, and not the worker that it asks."""

    def answer_all(self, requests: Sequence[InferenceRequest]) -> list[object]:
        raise ZeroDivisionError(f"{len(requests)} requests")


def test_a_server_that_fails_says_why_when_it_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    server = InferenceServer(Faulty("group 'math'"), "127.0.0.1", TOKEN)
    with (
        connected(server.address) as client,
        pytest.raises(WorkerError, match="of group 'math' failed: .*; has its process ended"),
    ):
        at(client).double(np.ones(1), None)
    with pytest.raises(WorkerError) as caught:
        server.close()
    assert str(caught.value) == (
        "the thread that answers requests has ended by a fault of its own, so its clients lost "
        "their connections: ZeroDivisionError('1 requests')"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "answering requests has ended" in caplog.text
    server.close()


def test_strangers_are_sent_away(
    server: InferenceServer, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        connected(server.address, token="open barley") as guess,
        pytest.raises(WorkerError, match="it has closed the connection|reset|Broken pipe"),
    ):
        at(guess).double(np.ones(1), None)
    monkeypatch.setattr(wire, "_PATIENCE_S", 0.1)
    with socket.create_connection(server.address, 20.0) as silent:
        assert at(client).double(np.ones(1), None).value.tolist() == [2]
        assert len(silent.recv(100)) == 16
        at(client).double(np.ones(1), None)
        assert silent.recv(1) == b""
    assert at(client).double(np.ones(1), None).value.tolist() == [2]


def test_who_reads_slowly_holds_up_nobody_and_is_dropped(
    server: InferenceServer, client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = np.ones(4 << 20, np.float32)
    with socket.create_connection(server.address, 20.0) as slow:
        slow.sendall(proof(TOKEN, slow.recv(16)))
        slow.sendall(request_frame(InferenceRequest("doubler", "double", 7, (large, None))))
        began = time.monotonic()
        while server.num_requests < 1:
            assert time.monotonic() - began < 20
            time.sleep(0.01)
        began = time.monotonic()
        assert at(client).double(np.ones(1), None).value.tolist() == [2]
        assert time.monotonic() - began < 8  # the connection that takes nothing has 10 s
        monkeypatch.setattr(wire, "_PATIENCE_S", 0.1)
        time.sleep(0.3)
        at(client).double(np.ones(1), None)
        at(client).double(np.ones(1), None)
        taken = 0
        while piece := slow.recv(1 << 20):
            taken += len(piece)
        assert taken < large.nbytes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff" * 12, "claims a header of 4294967295 bytes"),
        (b"\x02\0\0\0" + b"\0" * 8 + b"{}", "cannot be read: 'arrays'"),
        (b"\x02\0\0\0" + b"\0" * 8 + b"[]", "cannot be read: list indices"),
        (b"\x02\0\0\0" + b"\0" * 8 + b"x!", "cannot be read: Expecting value"),
        (b"\x0d\0\0\0\x01" + b"\0" * 7 + b'{"arrays":[]}x', "has 1 bytes more than its arrays"),
        (b"\x13\0\0\0\0" + b"\0" * 7 + b'{"arrays":[["O",1]]', "cannot be read"),
        (b"\x15\0\0\0\0" + b"\0" * 7 + b'{"arrays":[["O8",1]]}', "it has an array of 'O8'"),
        (b"\x16\0\0\0\0" + b"\0" * 7 + b'{"arrays":[["f4",-1]]}', r"array of shape \[-1\]"),
        (b"\x15\0\0\0\0" + b"\0" * 7 + b'{"arrays":[["f4",9]]}', "cannot be read"),
        (b"\xa0\x86\x01\0" + b"\0" * 8 + b"[" * 100_000, "cannot be read: maximum recursion"),
    ],
)
def test_a_message_that_is_none_is_refused(data: bytes, message: str) -> None:
    reader = FrameReader()
    reader.feed(data)
    with pytest.raises(WorkerError, match=message):
        reader.take()
