"""The judge's client against servers that break the protocol, wait, flood, redirect and echo."""

from __future__ import annotations

import base64
import contextlib
import gzip
import html
import json
import logging
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.workers.rewards.judge import (
    ChatClient,
    ChatClientOptions,
    ChatError,
    ChatRefused,
    ChatTimeout,
    in_loop,
)

KEY = "sk-Very/secret+key=&<1>"
GOOD = json.dumps({"choices": [{"message": {"content": "Score: 7"}}]}).encode()


class RawServer:
    """Reads a request, sends the bytes that a test gives it, and closes the connection."""

    def __init__(self) -> None:
        self.pieces: Iterable[bytes] = ()
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # the client goes when it has enough
                connection.settimeout(10)
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(1 << 16)
                length = re.search(rb"content-length: (\d+)", request.lower())
                assert length
                missing = int(length[1]) - len(request.partition(b"\r\n\r\n")[2])
                while missing > 0:
                    missing -= len(connection.recv(missing))
                self.requests.append(request)
                for piece in self.pieces:
                    connection.sendall(piece)


@pytest.fixture
def server() -> Iterator[RawServer]:
    made = RawServer()
    yield made
    made.close()


def client(url: str, **options: Any) -> ChatClient:
    given: dict[str, Any] = {"max_attempts": 1, "pause_s": 0.0, "deadline_s": 5.0, **options}
    return ChatClient(ChatClientOptions(url=url, model="m", **given))


def reply(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def chunked(*sizes_and_chunks: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(sizes_and_chunks)


def repeated(piece: bytes, seconds: float = 0.0) -> Generator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    while True:
        time.sleep(seconds)
        yield piece


BROKEN = {
    "nothing": [b""],
    "zeros": [b"\0" * 1000],
    "no status": [b"HTTP/1.1 abc\r\n\r\n"],
    "another version": [b"HTTP/9.9 200 OK\r\n\r\n"],
    "a negative length": [b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"],
    "a length of many digits": [b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 50 + b"\r\n\r\n"],
    "two lengths": [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"],
    "a short body": [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc"],
    "a chunk size that is none": [chunked(b"zz\r\nabc\r\n0\r\n\r\n")],
    "a chunk size below 0": [chunked(b"-5\r\nabc\r\n0\r\n\r\n")],
    "a chunk of 2**63 bytes": [chunked(b"8000000000000000\r\nabc\r\n0\r\n\r\n")],
    "a chunk size of many digits": [chunked(b"1" * 5000 + b"\r\nabc\r\n0\r\n\r\n")],
    "a chunk without an end": [chunked(b"3\r\nabcdef\r\n0\r\n\r\n")],
    "no last chunk": [chunked(b"3\r\nabc\r\n")],
    "a huge header": [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000 + b"\r\n\r\n"],
    "headers without end": repeated(b"X: x\r\n"),
    "a header without end": repeated(b"x" * 1000),
    "hints without end": repeated(b"\r\nHTTP/1.1 103 Early Hints\r\n"),
    "a switch of protocols": [b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n" + b"x" * 100],
    "another charset": [reply(b"\xff\xfe" * 100)],
    "brackets": [reply(b"[" * 100_000)],
    "a number of many digits": [reply(b"9" * 10_000)],
    "no list": [reply(b'{"choices": {"0": 1}}')],
    "a text in the wrong place": [reply(b'{"choices": "abc"}')],
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_whatever_is_no_reply_costs_the_request_alone(server: RawServer, broken: str) -> None:
    server.pieces = BROKEN[broken]
    began = time.monotonic()
    with pytest.raises(ChatError):
        in_loop(client(server.url, attempt_s=1.0).ask([]))
    assert time.monotonic() - began < 3


def test_a_malformed_chunk_size_is_told(server: RawServer) -> None:
    server.pieces = BROKEN["a chunk size that is none"]
    with pytest.raises(ChatError) as caught:
        in_loop(client(server.url, max_attempts=2).ask([]))
    assert str(caught.value) == (
        "2 attempts failed; the last: RemoteProtocolError: illegal chunk header: "
        "bytearray(b'zz\\r\\n')"
    )


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_replies_give_an_answer_or_an_error(server: RawServer, data: st.DataObject) -> None:
    whole = bytearray(chunked(b"%x\r\n" % len(GOOD), GOOD, b"\r\n0\r\n\r\n"))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    server.pieces = [bytes(whole[: data.draw(st.integers(0, len(whole)))])]
    began = time.monotonic()
    with contextlib.suppress(ChatError, ChatRefused):
        assert isinstance(in_loop(client(server.url, attempt_s=0.5).ask([])), str)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("piece", [b"x", b"X: x\r\n", b"\r\nHTTP/1.1 103 Early Hints\r\n"])
def test_headers_that_drip_have_the_time_of_the_attempt(server: RawServer, piece: bytes) -> None:
    server.pieces = repeated(piece, 0.05)
    began = time.monotonic()
    with pytest.raises(ChatTimeout) as caught:
        in_loop(client(server.url, attempt_s=0.2, deadline_s=0.4, max_attempts=9).ask([]))
    assert time.monotonic() - began < 1
    assert re.fullmatch(
        r"no answer within 0\.4 s; the last: no whole answer within 0\.\d+ s", str(caught.value)
    )


def test_replies_are_bounded(server: RawServer) -> None:
    server.pieces = (
        chunked() if i == 0 else b"10000\r\n" + b"x" * 65536 + b"\r\n" for i in range(99)
    )
    with pytest.raises(ChatError) as caught:
        in_loop(client(server.url).ask([]))
    assert str(caught.value) == (
        "1 attempts failed; the last: ValueError: the reply has more than 1048576 bytes"
    )


def test_what_is_compressed_is_not_unpacked(server: RawServer) -> None:
    bomb = gzip.compress(gzip.compress(b"\0" * 50_000_000))
    server.pieces = [reply(bomb, "Content-Encoding: gzip")]
    with pytest.raises(ChatError, match="^the reply is no chat completion: "):
        in_loop(client(server.url).ask([]))
    assert b"accept-encoding: identity" in server.requests[0].lower()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(
    server: RawServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    other = RawServer()
    try:
        location = f"Location: {other.url}"
        server.pieces = [reply(b"over there", location, status=f"{status} Moved")]
        with pytest.raises(ChatError) as caught:
            in_loop(client(server.url, api_key_env="JUDGE_KEY").ask([]))
    finally:
        other.close()
    assert str(caught.value) == f"status {status}: over there"
    assert other.requests == []
    assert f"authorization: bearer {KEY.lower()}".encode() in server.requests[0].lower()


def test_proxies_and_passwords_of_the_machine_are_not_used(
    server: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    server.pieces = [reply(GOOD)]
    assert in_loop(client(server.url).ask([])) == "Score: 7"
    assert b"authorization" not in server.requests[0].lower()


def full_listener(held: contextlib.ExitStack) -> int:
    """A port to which nobody can connect, and where nobody hears that."""
    listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    for _ in range(50):
        waiting = held.enter_context(socket.socket())
        waiting.settimeout(0.2)
        try:
            waiting.connect(listener.getsockname())
        except TimeoutError:
            break
    return listener.getsockname()[1]


def test_many_addresses_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as held:
        port = full_listener(held)
        one = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))

        def nine(*_: object, **__: object) -> list[Any]:
            return [one] * 9

        monkeypatch.setattr(socket, "getaddrinfo", nine)
        began = time.monotonic()
        with pytest.raises(ChatTimeout):
            in_loop(client(f"http://many.test:{port}", attempt_s=0.5, deadline_s=0.5).ask([]))
        assert time.monotonic() - began < 1.5


def test_a_name_that_does_not_resolve_has_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def never(*_: object, **__: object) -> list[Any]:
        over.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", never)
    began = time.monotonic()
    try:
        with pytest.raises(ChatTimeout):
            in_loop(client("http://never.test", deadline_s=0.3).ask([]))
        assert time.monotonic() - began < 1.5
    finally:
        over.set()


def jumbled(key: str) -> str:
    return "".join(f"\\u{ord(c):04X}" if i % 3 else f"%{ord(c):02X}" for i, c in enumerate(key))


def beside(pad: bytes) -> Callable[[str], str]:
    return lambda key: base64.b64encode(pad + key.encode() + b" and more").decode()


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "in capitals": str.upper,
    "in a URL": urllib.parse.quote_plus,
    "in a URL, all": lambda key: urllib.parse.quote(key, safe=""),
    "in JSON": json.dumps,
    "in JSON, with slashes": lambda key: json.dumps(key).replace("/", "\\/"),
    "in HTML": html.escape,
    "in HTML, by numbers": lambda key: "".join(f"&#{ord(c)};" for c in key),
    "in hex": lambda key: key.encode().hex(),
    "mixed": jumbled,
    "repr": repr,
    "base64": beside(b""),
    "base64 of a header": beside(b"Bearer "),
    "base64 of a pair": beside(b"user:"),
    "base64 of x": beside(b"x"),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"??{key}".encode()).decode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_key_that_is_echoed_is_masked(
    server: RawServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spelling: str,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    echo = SPELLINGS[spelling](KEY)
    asking = client(server.url, api_key_env="JUDGE_KEY")
    told: list[str] = []
    with caplog.at_level(logging.DEBUG):
        for status in ("200 OK", "400 Bad", "401 No", "503 Busy", f"200 {KEY}\r\n{KEY}"):
            server.pieces = [reply(b" " * 70_000 + echo.encode(), f"X: {KEY}", status=status)]
            with pytest.raises((ChatError, ChatRefused)) as caught:
                in_loop(asking.ask([]))
            told.append(str(caught.value))
    content = json.dumps({"choices": [{"message": {"content": f"Not {echo}!"}}]})
    server.pieces = [reply(content.encode())]
    told.append(in_loop(asking.ask([])))
    shown = "".join([*told, caplog.text])
    assert all("***" in text for text in told)
    pieces = [KEY[i : i + 6] for i in range(len(KEY) - 5)]
    for piece in [*pieces, *(SPELLINGS[spelling](piece)[4:12] for piece in pieces)]:
        assert len(piece) < 4 or piece not in shown


def test_a_key_that_is_no_header_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("sk-a\nb", "sk-\u00e9", "sk-\x7f"):
        monkeypatch.setenv("JUDGE_KEY", key)
        with pytest.raises(ConfigError) as caught:
            client("http://h", api_key_env="JUDGE_KEY")
        assert str(caught.value) == (
            "environment variable JUDGE_KEY, which is to hold the judge's API key, holds "
            "characters that a header cannot carry\n    set it to the key alone"
        )


def test_what_a_terminal_would_obey_is_not_shown(server: RawServer) -> None:
    server.pieces = [reply(b"\x1b[2J\x07 \xc2\x9bboo", status="400 Bad")]
    with pytest.raises(ChatError) as caught:
        in_loop(client(server.url).ask([]))
    assert str(caught.value) == "status 400: ?[2J? ?boo"


@pytest.mark.parametrize(
    "url", ["http://h:99999", "http://h:0", "http://h:x", "http://[::1", "//h"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"an address and a model, got url={url!r}, ")):
        ChatClientOptions(url=url, model="m")
