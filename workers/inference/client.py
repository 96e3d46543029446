"""Client side: calls of a role that another process serves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from ...dataflow.errors import StateError, WorkerError
from ...dataflow.runtime.executor import WorkerLost
from ...dataflow.runtime.remote_inference import InferenceRequest
from .protocol import CHALLENGE_BYTES, FrameReader, answer_from, proof, request_frame

_PIECE = 1 << 20
_PAUSE_S = 0.1  # Between two attempts to reach a server
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
                if num_lost > _MOST_LOST or time.monotonic() + _PAUSE_S >= end_s:
                    why = f"calling {what} failed: {error}; has its process ended?"
                    raise WorkerLost(why) from error
                self.close()  # they lead to the same
                time.sleep(_PAUSE_S)
            except TimeoutError as error:
                raise WorkerError(
                    f"calling {what} failed: no answer within {self._deadline_s:g} s"
                ) from error

    def _answer(self, frame: bytes, end_s: float) -> Any:
        link, is_new = self._taken(end_s)
        try:
            _limit(link, end_s)
            link.sendall(frame)
            answer = _next_frame(link, end_s)
        except TimeoutError:
            link.close()
            raise
        except OSError as error:
            link.close()
            raise _Gone(str(error), was_there=is_new) from error
        except BaseException:
            link.close()
            raise
        with self._lock:
            self._idle.append(link)
        return answer

    def close(self) -> None:
        """Give up all connections that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _taken(self, end_s: float) -> tuple[socket.socket, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        if self._address is None:
            raise StateError(f"nobody has said where {self._where} is")
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


def _next_frame(link: socket.socket, end_s: float) -> Any:
    reader = FrameReader()
    while (frame := reader.take()) is None:
        reader.feed(_piece(link, end_s))
    if reader.has_begun:  # it would pass for the answer to the next request
        raise ConnectionError("it said more than its answer")
    return frame
