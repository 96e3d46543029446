"""How a process calls a role that another process serves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from ...dataflow.errors import StateError, WorkerError
from ...dataflow.runtime.remote_inference import InferenceRequest
from .protocol import CHALLENGE_BYTES, FrameReader, answer_from, proof, request_frame

__all__ = ["InferenceClient"]

_PIECE = 1 << 20


class InferenceClient:
    """Takes requests to one server; any number of threads may call at the same time.

    A thread that waits has a connection to itself meanwhile; there are as many as there ever were
    requests at once.

    Args:
        where: What to call the server in messages: "group 'policy'".
        deadline_s: How long an answer may take.
    """

    def __init__(self, where: str, deadline_s: float) -> None:
        self._where, self._deadline_s = where, deadline_s
        self._address: tuple[str, int] | None = None
        self._token = ""
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def connect(self, address: tuple[str, int], token: str) -> None:
        """Where the server is from now on, and what it wants to hear."""
        self.close()
        self._address, self._token = address, token

    def send(self, request: InferenceRequest, returns: type[Any]) -> Any:
        """See `SendRequest`.

        Raises:
            WorkerError: If the server refuses, cannot be reached, or does not answer in time.
        """
        frame = request_frame(request)
        end_s = time.monotonic() + self._deadline_s
        link: socket.socket | None = None
        try:
            link = self._taken(end_s)
            _limit(link, end_s)
            link.sendall(frame)
            answer = _next_frame(link, end_s)
        except OSError as error:
            what = f"calling '{request.role}.{request.method}' of {self._where} failed"
            if isinstance(error, TimeoutError):
                raise WorkerError(f"{what}: no answer within {self._deadline_s:g} s") from error
            raise WorkerError(f"{what}: {error}; has its process ended?") from error
        else:
            with self._lock:
                self._idle.append(link)
            link = None
        finally:
            if link is not None:
                link.close()
        return answer_from(answer, returns)

    def close(self) -> None:
        """Give up all connections that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _taken(self, end_s: float) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        if self._address is None:
            raise StateError(f"nobody has said where {self._where} is")
        link = socket.create_connection(self._address, max(end_s - time.monotonic(), 1e-3))
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = b""
            while len(challenge) < CHALLENGE_BYTES:
                challenge += _piece(link, end_s, CHALLENGE_BYTES - len(challenge))
            link.sendall(proof(self._token, challenge))
            undo.pop_all()
        return link


def _limit(link: socket.socket, end_s: float) -> None:
    link.settimeout(max(end_s - time.monotonic(), 1e-3))


def _piece(link: socket.socket, end_s: float, most: int = _PIECE) -> bytes:
    _limit(link, end_s)
    piece = link.recv(most)
    if not piece:
        raise ConnectionError("it has closed the connection")
    return piece


def _next_frame(link: socket.socket, end_s: float) -> Any:
    reader = FrameReader()
    while (frame := reader.take()) is None:
        reader.feed(_piece(link, end_s))
    if reader.has_begun:  # it would pass for the answer to the next request
        raise ConnectionError("it said more than its answer")
    return frame
