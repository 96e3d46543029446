"""Requests to the endpoint of programs that no client should send."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from penstock.workers.agents.programs.endpoint import Endpoint, served

pytest.importorskip("uvicorn", reason="comes with the engines")

NUM_CLIENTS = 30
POST = (
    "POST /c/0/v1/chat/completions HTTP/1.1\nHost: a\nContent-Length: {}\nAuthorization: Bearer {}"
)


async def ask(endpoint: Endpoint, head: str, body: bytes = b"", *, waits: bool = True) -> str:
    """Send a request as it stands, and return the first line of its response."""
    host, port = endpoint.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    await writer.drain()
    line = (await reader.readline()).decode() if waits else ""
    writer.close()
    await writer.wait_closed()
    return line.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [("9" * 5000, 404), ("9" * 19, 404), ("x", 404), ("-1", 404), ("\u0663", 404), ("5", 401)],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_wrong_address_is_refused(
    number: str, status: int, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = Endpoint()

    async def talk() -> str:
        from urllib.parse import quote

        path = {"GET": "models", "POST": "chat/completions"}[method]
        async with served(endpoint):
            head = f"{method} /c/{quote(number)}/v1/{path} HTTP/1.1\nHost: a\nContent-Length: 0"
            return await ask(endpoint, head)

    found = 401 if number == "\u0663" else status  # a digit in another script is the number 3
    assert asyncio.run(talk()).startswith(f"HTTP/1.1 {found}")
    assert endpoint.refused == {found: 1}
    assert "Traceback" not in "".join(capsys.readouterr())


def test_clients_that_hang_up_are_counted(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, sequences = Endpoint(), SimpleNamespace(counts=Counter[str]())

    async def talk() -> None:
        held: Any = sequences
        async with served(endpoint):
            with endpoint.opened(0, held) as (_, key):
                for _ in range(NUM_CLIENTS):
                    await ask(endpoint, POST.format(1000, key), b'{"messages"', waits=False)
                async with asyncio.timeout(20):
                    while sequences.counts["hung_up"] < NUM_CLIENTS:
                        await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        asyncio.run(talk())
    assert sequences.counts["hung_up"] == NUM_CLIENTS
    assert not caplog.records
    assert "Traceback" not in "".join(capsys.readouterr())


def test_an_error_of_the_server_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint()

    async def talk() -> None:
        held: Any = SimpleNamespace()  # without counts, so that the application fails
        async with served(endpoint):
            with endpoint.opened(0, held) as (_, key):
                for _ in range(3):
                    assert "500" in await ask(endpoint, POST.format(2, key), b"{}")

    asyncio.run(talk())
    said = [record for record in caplog.records if record.name.startswith("penstock")]
    assert len(said) <= 1
    assert all("Traceback" not in record.getMessage() for record in said)
