"""A read-only server on the loopback device, for those who have its address.

The page of `penstock watch` is served by it, and the numbers of a run for Prometheus.

- It listens on 127.0.0.1 and nowhere else; the kernel chooses the port unless one is given.
- The first part of every path is a token of 32 random bytes, new each time unless one is given.
  Whatever does not begin with it, names another host, is neither GET nor HEAD, or asks for nothing
  that is there, gets 404 and not a byte more: it does not learn that there is a page.
- The name of the host that a browser asks for must be the loopback device's. A page of
  another site, whose name is made to lead here, cannot read anything.
- No part of a path is a path of a file: `pages.Pages` looks names up in what it knows.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ...dataflow.files import Background

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
_REQUEST_DEADLINE_S = 10.0
_ANSWER_DEADLINE_S = 30.0  # longest time to compute an answer: a file system may hang

_MOST_CONNECTIONS = 64
_MOST_TARGET_CHARACTERS = 8192


@dataclass(frozen=True)
class Answer:
    """The answer to one request."""

    body: bytes
    content_type: str
    status: int = 200
    policy: str = ""  # another Content-Security-Policy than the page's; "" for that


_BUSY = Answer(b"the files of this page cannot be read in time\n", "text/plain", 503)


class PageServer(ThreadingHTTPServer):
    """Serves one page until it is closed.

    `answer` gives what stands at a target behind the token, such as `api/runs?x=1`; None if there
    is nothing. Port 0 is any that is free, and token "" a new one.
    """

    daemon_threads = True
    request_queue_size = 32
    allow_reuse_address = True

    def __init__(
        self, answer: Callable[[str], Answer | None], port: int = 0, token: str = ""
    ) -> None:
        self.answer = answer
        self.token = token or secrets.token_urlsafe(32)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._answering = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def answered(self, target: str) -> Answer | None:
        """Compute an answer within a deadline, so that no file keeps a connection for good."""
        if not self._answering.acquire(blocking=False):
            return _BUSY

        def answer() -> Answer | None:
            try:
                return self.answer(target)
            finally:
                self._answering.release()

        work = Background(answer, "penstock-answer")
        return work.result() if work.wait(_ANSWER_DEADLINE_S) else _BUSY

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def server_bind(self) -> None:
        # The base class asks a name service for this machine's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):  # more at a time than a page ever makes
            self.shutdown_request(request)
            return
        self._open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.discard(request)
            self._free.release()

    def server_close(self) -> None:
        super().server_close()  # and let go of open connections: browsers connect ahead of asking
        for connection in tuple(self._open):
            with suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # else the browser left while it was answered
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride] - no other makes it
    timeout = _REQUEST_DEADLINE_S
    server_version, sys_version = "penstock", ""

    def do_GET(self) -> None:
        self._reply(self._found())

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self._reply(None)  # a faulty request gets what one without the token gets

    def log_message(self, format: str, *args: Any) -> None:
        pass  # paths hold the token

    def _found(self) -> Answer | None:
        port = self.server.server_port
        if self.headers.get_all("Host", []) not in ([f"127.0.0.1:{port}"], [f"localhost:{port}"]):
            return None
        token, slash, target = self.path.removeprefix("/").partition("/")
        if len(self.path) > _MOST_TARGET_CHARACTERS or not self.path.startswith("/"):
            return None
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return None
        return self.server.answered(target)

    def _reply(self, answer: Answer | None) -> None:
        self.close_connection = True
        headers, body = dict(_HEADERS), b"" if answer is None else answer.body
        self.send_response(404 if answer is None else answer.status)
        if answer is not None:
            headers["Content-Security-Policy"] = answer.policy or headers["Content-Security-Policy"]
            headers["Content-Type"] = answer.content_type
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
