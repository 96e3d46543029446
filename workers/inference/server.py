"""The thread that answers requests to roles which a process serves.

One thread reads what has arrived on all connections, answers everything that is waiting at once,
and sends the answers. So requests gather while it is busy, and nobody waits for a batch to fill.
It never waits for a connection to take an answer: one that has not taken its answer is read no
further until it has, and is dropped if it takes nothing for a while. So is one that does not prove
itself, or does not end a request that it has begun. What time is spent on answering counts for
none of that.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...dataflow.errors import PenstockError, WorkerError
from ...dataflow.runtime.remote_inference import InferenceRequest, ServedWeights
from ...dataflow.runtime.worker_protocol import CLOSE_S
from .protocol import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    FrameReader,
    answer_frame,
    error_frame,
    proof,
    request_from,
)

_PIECE = 1 << 20  # Most bytes taken from a connection at once

# How long a connection may keep us waiting: to prove itself, and to take some of an answer.
_PATIENCE_S = 10.0

_REQUEST_S = 60.0  # How long a connection may take from the first byte of a request to the last

_MOST_UNPROVEN = 256  # Connections that have not proven themselves; the oldest gives way to another

_PAUSE_S = 0.2  # Before the next connection is accepted when one could not be

_LOG = logging.getLogger("penstock.serving")


@dataclass
class _Peer:
    """One connection."""

    link: socket.socket  # The client's socket
    expected: bytes  # The proof it owes; empty once it has given it
    since_s: float  # When it connected, on the server's clock as all times here
    given: bytes = b""  # What has come of the proof
    reader: FrameReader = field(default_factory=FrameReader)  # Reads the client's requests
    began_s: float | None = None  # When the request began that the reader has not all of
    unsent: bytearray = field(default_factory=bytearray)  # Answers it has not taken yet
    took_s: float = 0.0  # When it last took some, or they began to wait


class InferenceServer:
    """Answers requests from other processes until it is closed."""

    def __init__(self, served_weights: ServedWeights, host: str, token: str, port: int = 0) -> None:
        self._served_weights, self._token = served_weights, token
        self._listener = _listening(host, port)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])  # Host and port
        self.num_requests = self.num_batches = 0
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
                "the thread that answers requests has ended by a fault of its own, so whoever "
                f"called lost the connection: {self._failure!r}"
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
            # Too many files are open for now, and whoever wants to connect goes on to be an event.
            _LOG.warning("a connection could not be accepted: %s", error)
            self._selector.unregister(self._listener)
            self._listen_at_s = time.monotonic() + _PAUSE_S
            return
        challenge = os.urandom(CHALLENGE_BYTES)
        unproven = [peer for peer in self._peers.values() if peer.expected]
        if len(unproven) >= _MOST_UNPROVEN:
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
            self._drop(peer)  # It has gone; whoever called will notice.
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


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError:
        if not port:
            raise
        return socket.create_server((host, 0), backlog=1024)


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
