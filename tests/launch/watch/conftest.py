"""A server of the page within the test process, and what it answers."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from penstock.launch.run_dir.loopback_server import PageServer
from penstock.launch.watch.pages import KnownRuns, Pages

Ask = Callable[..., Any]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of all runs."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@contextmanager
def served(runs: Path) -> Generator[PageServer]:
    """A server of all runs of a folder, as long as the block is in progress."""
    with PageServer(Pages(KnownRuns([], runs)).answer) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


@pytest.fixture
def server(runs: Path) -> Generator[PageServer]:
    """A server of all runs there."""
    with served(runs) as made:
        yield made


def requested(
    server: PageServer, target: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what a server answers; the target is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        own = headers or {}
        connection.putrequest(method, target, skip_host="Host" in own)
        for name, value in own.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@pytest.fixture
def ask(server: PageServer) -> Ask:
    """Asks a view of the page: `ask("curve", run="one", metric="loss")`."""

    def asked(name: str, **keys: Any) -> Any:
        given = {key.rstrip("_"): value for key, value in keys.items()}
        target = f"/{server.token}/api/{name}?{urlencode(given, doseq=True)}"
        status, _, body = requested(server, target)
        assert status == 200, body
        return json.loads(body)

    return asked
