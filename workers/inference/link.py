"""The link over which a process asks a model that another one serves: frames, client, server.

Requests and answers are a length, a JSON header, and the arrays as they lie in memory.

    u32 bytes of the header | u64 bytes of all arrays | header, JSON | arrays, one after another

Everything is little-endian. The header names each array's dtype and shape, or null for a missing
one. Nothing is unpickled, and what a frame may claim is bounded before anything is made of it.

A client must know the token: the server sends 16 random bytes, and the client answers
with their HMAC-SHA256 under the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import selectors
import socket
import struct
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...dataflow.errors import PenstockError, StateError, WorkerError
from ...dataflow.runtime.executor import WorkerLost
from ...dataflow.runtime.remote_inference import Array, InferenceRequest, ServedWeights
from ...dataflow.runtime.worker_protocol import CLOSE_S

_PIECE = 1 << 20  # Most bytes taken from a connection at once
CHALLENGE_BYTES = 16
PROOF_BYTES = 32

_LENGTHS = struct.Struct("<IQ")
_MOST_HEADER = 1 << 20
_MOST_ARRAYS = 1 << 31
_MOST_AXES = 32
_MOST_ERROR = 1 << 16  # Characters of an error; as JSON one takes 12 bytes at most
# What arrays may hold, as numpy spells it, without the byte order.
_DTYPES = {"f4", "f8", "i8", "i4", "i2", "i1", "u1", "b1"}


def proof(token: str, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge, hashlib.sha256)


@dataclass(frozen=True)
class Frame:
    header: Mapping[str, Any]  # From JSON
    arrays: tuple[Array | None, ...]  # The arrays it came with; writable, and not shared


class FrameReader:
    """Puts frames together from bytes that arrive in pieces."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes | memoryview) -> None:
        self._bytes += piece

    @property
    def has_begun(self) -> bool:
        return bool(self._bytes)

    def take(self) -> Frame | None:
        begin = _LENGTHS.size
        if len(self._bytes) < begin:
            return None
        num_header, num_arrays = _LENGTHS.unpack_from(self._bytes)
        if num_header > _MOST_HEADER or num_arrays > _MOST_ARRAYS:
            raise WorkerError(
                f"a message claims a header of {num_header} bytes and {num_arrays} bytes of "
                f"arrays; at most {_MOST_HEADER} and {_MOST_ARRAYS} are taken"
            )
        end = begin + num_header + num_arrays
        if len(self._bytes) < end:
            return None
        # The frame's arrays are views of these bytes, so the buffer itself goes to the frame.
        whole, self._bytes = self._bytes, self._bytes[end:]
        return _frame(whole, begin, begin + num_header, end)


def _frame(whole: bytearray, begin: int, arrays: int, end: int) -> Frame:
    try:
        header = json.loads(whole[begin:arrays])
        specs = header["arrays"]
        found: list[Array | None] = []
        for spec in specs:
            array = None if spec is None else _array(whole, arrays, end, spec)
            found.append(array)
            arrays += 0 if array is None else array.nbytes
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WorkerError(f"a message cannot be read: {error}") from error
    if arrays != end:
        raise WorkerError(f"a message has {end - arrays} bytes more than its arrays")
    return Frame(header, tuple(found))


def _array(whole: bytearray, at: int, end: int, spec: Sequence[Any]) -> Array:
    dtype, *shape = spec
    if dtype not in _DTYPES:
        raise ValueError(f"it has an array of '{dtype}'; known are {', '.join(sorted(_DTYPES))}")
    # Not `isinstance`: a bool of JSON is an int to Python.
    if len(shape) > _MOST_AXES or any(
        type(size) is not int or not 0 <= size <= _MOST_ARRAYS for size in shape
    ):
        raise ValueError(f"it has an array of shape {shape!s:.200}")
    # Python's integers do not overflow, as a product of numpy's would.
    kind, count = np.dtype(f"<{dtype}"), math.prod(shape)
    if count * kind.itemsize > end - at:
        raise ValueError(f"it has an array of shape {shape} and {end - at} bytes for it")
    return np.frombuffer(whole, kind, count, at).reshape(shape)


def _encode(header: dict[str, Any], arrays: Sequence[Array | None]) -> bytes:
    specs: list[list[Any] | None] = []
    pieces: list[bytes] = []
    for array in arrays:
        if array is None:
            specs.append(None)
            continue
        kind = array.dtype.str[1:]
        if kind not in _DTYPES:
            raise WorkerError(
                f"an array of {array.dtype} cannot be sent; known are {', '.join(sorted(_DTYPES))}"
            )
        specs.append([kind, *array.shape])
        pieces.append(array.astype(f"<{kind}", order="C", copy=False).tobytes())
    text, num_bytes = json.dumps({**header, "arrays": specs}).encode(), sum(map(len, pieces))
    if len(text) > _MOST_HEADER or num_bytes > _MOST_ARRAYS:
        raise WorkerError(
            f"a message of {num_bytes} bytes of arrays and a header of {len(text)} cannot be sent; "
            f"at most {_MOST_ARRAYS} and {_MOST_HEADER} are taken. Ask about fewer rows at once"
        )
    return b"".join((_LENGTHS.pack(len(text), num_bytes), text, *pieces))


def request_frame(request: InferenceRequest) -> bytes:
    for index, argument in enumerate(request.arguments):
        if argument is not None and not isinstance(argument, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance] - user code
            raise WorkerError(
                f"argument {index} of '{request.role}.{request.method}' is a "
                f"{type(argument).__name__}; a role that is served is called with numpy arrays"
            )
    header = {"role": request.role, "method": request.method, "version": request.version}
    return _encode(header, request.arguments)


def request_from(frame: Frame) -> InferenceRequest:
    role, method, version = (frame.header.get(name) for name in ("role", "method", "version"))
    if not (isinstance(role, str) and isinstance(method, str) and type(version) is int):
        raise WorkerError(f"a request lacks its role, method or version: {frame.header!s:.200}")
    return InferenceRequest(role, method, version, frame.arrays)


def answer_frame(answer: Any) -> bytes:
    """An answer, a named tuple of arrays, as bytes."""
    if not isinstance(answer, tuple):
        raise WorkerError(f"the answer is a {type(answer).__name__}, no named tuple of arrays")
    arrays: tuple[Any, ...] = answer
    for index, array in enumerate(arrays):
        if array is not None and not isinstance(array, np.ndarray):
            raise WorkerError(
                f"entry {index} of the answer is a {type(array).__name__}, which is no array"
            )
    return _encode({}, arrays)


def error_frame(text: str) -> bytes:
    if len(text) > _MOST_ERROR:
        half = _MOST_ERROR // 2
        text = f"{text[:half]}\n... {len(text) - _MOST_ERROR} characters ...\n{text[-half:]}"
    return _encode({"error": text}, ())


def answer_from(frame: Frame, returns: type[Any]) -> Any:
    """Decode an answer or an error frame."""
    if "error" in frame.header:
        raise WorkerError(str(frame.header["error"]))
    num_fields = len(returns._fields)
    if num_fields != len(frame.arrays):
        raise WorkerError(
            f"an answer has {len(frame.arrays)} arrays; {returns.__name__} has {num_fields}"
        )
    return returns(*frame.arrays)


_REACH_PAUSE_S = 0.1  # Between two attempts to reach a server
# Servers that may go while they have a request: after more of them it is the request's fault.
_MOST_LOST = 3


class InferenceClient:
    """Takes requests to one server; any number of threads may call at the same time.

    A thread that waits has a connection to itself meanwhile; there are as many as there ever were
    requests at once.
    """

    def __init__(self, where: str, deadline_s: float, restart_s: float = 0.0) -> None:
        self._where, self._deadline_s, self._restart_s = where, deadline_s, restart_s
        self._address: tuple[str, int] | None = None
        self._token = ""
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def connect(self, address: tuple[str, int], token: str) -> None:
        self.close()
        self._address, self._token = address, token

    def send(self, request: InferenceRequest, returns: type[Any]) -> Any:
        frame, what = request_frame(request), f"'{request.role}.{request.method}' of {self._where}"
        end_s = time.monotonic() + self._restart_s
        num_lost = 0
        while True:
            since_s = time.monotonic()
            try:
                return answer_from(self._answer(frame, since_s + self._deadline_s), returns)
            except _Gone as error:
                num_lost += error.was_there
                if num_lost > _MOST_LOST or time.monotonic() + _REACH_PAUSE_S >= end_s:
                    why = f"calling {what} failed: {error}; has its process ended?"
                    raise WorkerLost(why) from error
                self.close()  # they lead to the same
                time.sleep(_REACH_PAUSE_S)
            except TimeoutError as error:
                raise WorkerError(
                    f"calling {what} failed: no answer within {self._deadline_s:g} s"
                ) from error

    def _answer(self, frame: bytes, end_s: float) -> Any:
        link, is_new = self._taken(end_s)
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            try:
                _limit(link, end_s)
                link.sendall(frame)
                reader = FrameReader()
                while (answer := reader.take()) is None:
                    reader.feed(_piece(link, end_s))
                if reader.has_begun:  # it would pass for the answer to the next request
                    raise ConnectionError("it said more than its answer")
            except TimeoutError:
                raise
            except OSError as error:
                raise _Gone(str(error), was_there=is_new) from error
            undo.pop_all()
        with self._lock:
            self._idle.append(link)
        return answer

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _taken(self, end_s: float) -> tuple[socket.socket, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        if self._address is None:
            raise StateError(f"the address of {self._where} is not known yet")
        try:
            link = socket.create_connection(self._address, max(end_s - time.monotonic(), 1e-3))
        except OSError as error:
            raise _Gone(str(error), was_there=False) from error
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            try:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                challenge = b""
                while len(challenge) < CHALLENGE_BYTES:
                    challenge += _piece(link, end_s, CHALLENGE_BYTES - len(challenge))
                link.sendall(proof(self._token, challenge))
            except ConnectionError as error:
                raise _Gone(str(error), was_there=True) from error
            undo.pop_all()
        return link, True


class _Gone(Exception):
    """There is no server; `was_there` says whether one took the connection, and closed it."""

    def __init__(self, said: str, *, was_there: bool) -> None:
        super().__init__(said)
        self.was_there = was_there


def _limit(link: socket.socket, end_s: float) -> None:
    link.settimeout(max(end_s - time.monotonic(), 1e-3))


def _piece(link: socket.socket, end_s: float, most: int = _PIECE) -> bytes:
    _limit(link, end_s)
    piece = link.recv(most)
    if not piece:
        raise ConnectionError("it has closed the connection")
    return piece


# How long a connection may keep us waiting: to prove itself, and to take some of an answer.
_PATIENCE_S = 10.0

_REQUEST_S = 60.0  # How long a connection may take from the first byte of a request to the last

_MOST_UNPROVEN = 256  # Connections that have not proven themselves; the oldest gives way to another

_PAUSE_S = 0.2  # Before the next connection is accepted when one could not be

_LOG = logging.getLogger("penstock.serving")


@dataclass
class _Peer:
    link: socket.socket  # The client's socket
    expected: bytes  # The proof it owes; empty once it has given it
    since_s: float  # When it connected, on the server's clock as all times here
    given: bytes = b""  # What has come of the proof
    reader: FrameReader = field(default_factory=FrameReader)  # Reads the client's requests
    began_s: float | None = None  # When the request began that the reader has not all of
    unsent: bytearray = field(default_factory=bytearray)  # Answers it has not taken yet
    took_s: float = 0.0  # When it last took some, or they began to wait


class InferenceServer:
    """Answers requests from other processes until it is closed.

    Its thread reads what has arrived on all connections, answers everything that is waiting at
    once, and sends the answers. So requests gather while it is busy, and none waits for a batch
    to fill. It never waits for a connection to take an answer: one that has not taken its answer is
    read no further until it has, and is dropped if it takes nothing for a while. So is one that
    does not prove itself, or does not end a request that it has begun. What time is spent on
    answering counts for none of that.
    """

    def __init__(self, served_weights: ServedWeights, host: str, token: str, port: int = 0) -> None:
        self._served_weights, self._token = served_weights, token
        try:
            self._listener = socket.create_server((host, port), backlog=1024)
        except OSError:  # another process has that port
            if not port:
                raise
            self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])  # Host and port
        self.num_requests = self.num_batches = 0
        # A byte through it ends the selector's wait, when the server is to close.
        self._wake, self._woken = socket.socketpair()
        self._closing = False
        self._failure: BaseException | None = None
        self._answering_s = 0.0
        self._listen_at_s: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._peers: dict[int, _Peer] = {}
        self._thread = threading.Thread(target=self._run, name="penstock-serving", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close all connections; idempotent."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(BrokenPipeError):  # the thread has ended before
            self._wake.send(b"x")
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise WorkerError(f"an answer is still being computed after {CLOSE_S:g} s")
        self._wake.close()
        if self._failure is not None:
            raise WorkerError(
                "the thread that answers requests has ended by a fault of its own, so its "
                f"clients lost their connections: {self._failure!r}"
            ) from self._failure

    def _run(self) -> None:
        try:
            while not self._closing:
                waiting = self._gather()
                if waiting:
                    self._answer(waiting)
        except BaseException as error:  # noqa: BLE001 - a role may call sys.exit; close() tells it
            _LOG.exception("answering requests has ended")
            self._failure = error
        finally:
            for peer in list(self._peers.values()):
                self._drop(peer)
            for one in (self._listener, self._woken, self._selector):
                one.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._answering_s

    def _gather(self) -> list[tuple[_Peer, InferenceRequest]]:
        waiting: list[tuple[_Peer, InferenceRequest]] = []
        for key, events in self._selector.select(self._until_listening_s()):
            peer: _Peer | None = key.data
            if key.fileobj is self._listener:
                self._accept()
            elif peer is None or peer.link.fileno() < 0:  # woken; or dropped by another's event
                continue
            elif events & selectors.EVENT_WRITE:
                self._flush(peer)
            else:
                waiting += self._read(peer)
        self._drop_late()
        return waiting

    def _until_listening_s(self) -> float:
        if self._listen_at_s is None:
            return _PATIENCE_S
        left_s = self._listen_at_s - time.monotonic()
        if left_s > 0:
            return left_s
        self._listen_at_s = None
        self._selector.register(self._listener, selectors.EVENT_READ)
        return _PATIENCE_S

    def _drop_late(self) -> None:
        now_s = self._now_s()
        for peer in list(self._peers.values()):
            is_unproven = peer.expected and now_s > peer.since_s + _PATIENCE_S
            takes_nothing = peer.unsent and now_s > peer.took_s + _PATIENCE_S
            if is_unproven or takes_nothing:
                self._drop(peer)
            elif peer.began_s is not None and now_s > peer.began_s + _REQUEST_S:
                self._drop(peer, f"its request was not whole after {_REQUEST_S:g} s")

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # It has gone again.
        except OSError as error:
            # Too many files are open for now, and a client that waits goes on to be an event.
            _LOG.warning("a connection could not be accepted: %s", error)
            self._selector.unregister(self._listener)
            self._listen_at_s = time.monotonic() + _PAUSE_S
            return
        challenge = os.urandom(CHALLENGE_BYTES)
        unproven = [peer for peer in self._peers.values() if peer.expected]
        if len(unproven) >= _MOST_UNPROVEN:
            # The one that has waited longest: a dict keeps its order.
            self._drop(unproven[0], "too many others have not proven themselves either")
        peer = _Peer(link, proof(self._token, challenge), self._now_s())
        self._peers[link.fileno()] = peer
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ, peer)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._drop(peer)  # It has gone again.
        else:
            self._send(peer, challenge)

    def _read(self, peer: _Peer) -> list[tuple[_Peer, InferenceRequest]]:
        try:
            piece = peer.link.recv(_PIECE)
        except BlockingIOError:
            return []
        except OSError:
            piece = b""
        if not piece:
            self._drop(peer)
            return []
        if peer.expected:
            piece = self._check(peer, piece)
        peer.reader.feed(piece)
        try:
            frame = peer.reader.take()
            if frame is None:
                if peer.began_s is None and peer.reader.has_begun:
                    peer.began_s = self._now_s()
                return []
            if peer.reader.has_begun:
                raise WorkerError("it asks again before it has its answer")
            peer.began_s = None
            return [(peer, request_from(frame))]
        except WorkerError as error:
            self._drop(peer, str(error))
            return []

    def _check(self, peer: _Peer, piece: bytes) -> bytes:
        given = peer.given + piece
        peer.given, rest = given[:PROOF_BYTES], given[PROOF_BYTES:]
        if len(peer.given) < PROOF_BYTES:
            return b""
        if not hmac.compare_digest(peer.given, peer.expected):
            self._drop(peer, "it does not know the token of this run")
            return b""
        peer.expected = b""
        return rest

    def _answer(self, waiting: Sequence[tuple[_Peer, InferenceRequest]]) -> None:
        self.num_requests += len(waiting)
        self.num_batches += 1
        begin_s = time.monotonic()
        answers = self._served_weights.answer_all([request for _, request in waiting])
        self._answering_s += time.monotonic() - begin_s
        for (peer, request), answer in zip(waiting, answers, strict=True):
            self._send(peer, _frame_of(request, answer))

    def _send(self, peer: _Peer, data: bytes) -> None:
        if not peer.unsent:
            peer.took_s = self._now_s()
        peer.unsent += data
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                del peer.unsent[: peer.link.send(peer.unsent)]
                peer.took_s = self._now_s()
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)  # It has gone; its client will notice.
            return
        wanted = selectors.EVENT_WRITE if peer.unsent else selectors.EVENT_READ
        self._selector.modify(peer.link, wanted, peer)

    def _drop(self, peer: _Peer, why: str = "") -> None:
        if why:
            _LOG.warning("a connection is dropped: %s", why)
        number = peer.link.fileno()
        if self._peers.pop(number, None) is not None:
            self._selector.unregister(peer.link)
            peer.link.close()


def _frame_of(request: InferenceRequest, answer: object) -> bytes:
    if not isinstance(answer, Exception):
        try:
            return answer_frame(answer)
        except WorkerError as error:
            answer = error
    if isinstance(answer, PenstockError):
        return error_frame(f"'{request.role}.{request.method}': {answer}")
    trace = "".join(traceback.format_exception(answer)).rstrip()
    return error_frame(f"'{request.role}.{request.method}' failed where it is served:\n{trace}")
