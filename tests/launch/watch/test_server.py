"""The server of the page: who is answered, with which headers, and that nobody else is."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from penstock.launch.run_dir import loopback_server
from penstock.launch.run_dir.loopback_server import PageServer

from .conftest import requested
from .folders import new_run

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def test_the_page_and_its_files_are_served_with_their_headers(server: PageServer) -> None:
    for name, kind in (
        ("", "text/html; charset=utf-8"),
        ("static/app.js", "text/javascript; charset=utf-8"),
        ("static/style.css", "text/css; charset=utf-8"),
        ("static/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
        ("api/runs", "application/json"),
    ):
        status, headers, body = requested(server, f"/{server.token}/{name}")
        assert (status, headers["Content-Type"]) == (200, kind)
        assert len(body) == int(headers["Content-Length"]) > 0
        assert HEADERS.items() <= headers.items()
        assert "Python" not in headers["Server"]


def test_every_file_of_the_page_is_served_and_names_only_such_files(server: PageServer) -> None:
    folder = Path(__file__).parents[3] / "launch" / "watch" / "static"
    for path in folder.iterdir():
        if path.suffix in (".js", ".css"):
            status, _, body = requested(server, f"/{server.token}/static/{path.name}")
            assert (status, body) == (200, path.read_bytes())
    page = (folder / "index.html").read_text()
    assert "http" not in page
    assert "style=" not in page
    assert "onclick=" not in page


def test_no_text_of_the_page_is_parsed_as_markup() -> None:
    folder = Path(__file__).parents[3] / "launch" / "watch" / "static"
    ours = [path for path in folder.glob("*.js") if not path.name.startswith("uPlot")]
    assert len(ours) == 8
    for path in ours:
        text = path.read_text()
        for parses in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert parses not in text, path.name


def test_head_gets_headers_alone(server: PageServer) -> None:
    status, headers, body = requested(server, f"/{server.token}/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


def nothing(found: tuple[int, dict[str, str], bytes]) -> bool:
    status, headers, body = found
    return (status, body, "Content-Type" in headers) == (404, b"", False)


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/favicon.ico",
        "/static/app.js",
        "/api/runs",
        "/wrong/",
        "/wrong/api/runs",
        "/%2e%2e/",
        "//",
        "/" + "a" * 20_000,
    ],
)
def test_without_the_token_there_is_nothing(server: PageServer, target: str) -> None:
    assert nothing(requested(server, target))
    assert nothing(requested(server, target, "HEAD"))


def test_a_part_of_the_token_is_no_token(server: PageServer) -> None:
    for token in (server.token[:-1], f"{server.token}x", server.token.swapcase(), ""):
        assert nothing(requested(server, f"/{token}/"))
    assert nothing(requested(server, f"/{server.token}"))  # without the slash: no page of ours
    assert len(server.token) >= 43


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_only_get_and_head_are_answered(server: PageServer, method: str) -> None:
    assert nothing(requested(server, f"/{server.token}/", method))


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost",
        "evil.localhost:{port}",
        "0.0.0.0:{port}",
    ],
)
def test_another_hosts_name_gets_nothing(server: PageServer, host: str) -> None:
    given = {"Host": host.format(port=server.server_port)}
    assert nothing(requested(server, f"/{server.token}/", headers=given))


def test_without_a_host_or_with_two_there_is_nothing(server: PageServer) -> None:
    assert nothing(requested(server, f"/{server.token}/", headers={"Host": ""}))
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as line:
        own = f"127.0.0.1:{server.server_port}"
        request = f"GET /{server.token}/ HTTP/1.1\r\nHost: {own}\r\nHost: example.com\r\n\r\n"
        line.sendall(request.encode())
        assert line.recv(64).startswith(b"HTTP/1.0 404 ")


def test_localhost_is_a_name_of_this_machine(server: PageServer) -> None:
    given = {"Host": f"localhost:{server.server_port}"}
    assert requested(server, f"/{server.token}/", headers=given)[0] == 200


@pytest.mark.parametrize(
    "request_",
    [b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /\xff/ HTTP/1.1\r\n\r\n"],
)
def test_what_is_no_request_gets_nothing(server: PageServer, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as line:
        line.sendall(request_)
        said = line.recv(4096)
    assert b"penstock watch" not in said
    assert b"<" not in said


def test_it_listens_on_the_loopback_device_alone(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "static/../server.py",
        "static/%2e%2e/server.py",
        "static//etc/passwd",
        "static/",
        "static/uPlot.LICENSE",
        "../../etc/passwd",
        "api/../runs",
        "api/",
        "api/_runs",
        "graph?run=../../etc",
        "graph",
    ],
)
def test_no_path_leads_out(server: PageServer, runs: Path, name: str) -> None:
    new_run(runs)
    assert nothing(requested(server, f"/{server.token}/{name}"))


def test_more_connections_than_a_page_makes_are_turned_away(server: PageServer) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", server.server_port), timeout=30) for _ in range(64)
    ]
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as line:
            assert line.recv(16) == b""  # closed without a word
    finally:
        for line in silent:
            line.close()
    assert threading.active_count() < 100


def test_the_graph_is_a_picture_in_which_nothing_runs(server: PageServer, runs: Path) -> None:
    run = new_run(runs)
    run.graph.write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    status, headers, body = requested(server, f"/{server.token}/graph?run={run.id}")
    assert (status, body) == (200, run.graph.read_bytes())
    assert headers["Content-Type"] == "image/svg+xml"
    policy = headers["Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; sandbox"


@pytest.mark.slow
def test_an_answer_that_does_not_come_keeps_no_connection(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may hang for good: the page says so, and other answers go on."""
    monkeypatch.setattr(loopback_server, "_ANSWER_DEADLINE_S", 0.2)
    hangs = threading.Event()

    def answer(target: str) -> loopback_server.Answer:
        if target == "hangs":
            hangs.wait()
        return loopback_server.Answer(b"here", "text/plain")

    with PageServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with ThreadPoolExecutor(10) as askers:
                asked = [
                    f"/{server.token}/hangs"
                ] * 70  # as many as are answered at a time, and more
                assert {said[0] for said in askers.map(partial(requested, server), asked)} == {503}
            assert requested(server, f"/{server.token}/other")[0] == 503  # nothing is free
            hangs.set()
            wait_until_free(server)
            assert requested(server, f"/{server.token}/other")[2] == b"here"
        finally:
            hangs.set()
            server.shutdown()
            thread.join()


def wait_until_free(server: PageServer) -> None:
    end_s = time.monotonic() + 10
    while requested(server, f"/{server.token}/other")[0] == 503 and time.monotonic() < end_s:
        time.sleep(0.05)
