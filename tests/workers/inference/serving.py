"""A served role and its clients, for tests of the link between them."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.remote_inference import ServedWeights
from penstock.workers.inference.link import (
    FrameReader,
    InferenceClient,
    InferenceServer,
    answer_from,
)

TOKEN = "open sesame"


@contextmanager
def serving(role: Role) -> Generator[InferenceServer]:
    """A role called 'doubler' at version 7."""
    served_weights = ServedWeights("group 'math'")
    served_weights.add("doubler", type(role), role)
    served_weights.set_version("doubler", 7)
    server = InferenceServer(served_weights, "127.0.0.1", TOKEN)
    yield server
    server.close()


@contextmanager
def connected(
    address: tuple[str, int], limit_s: float = 20.0, token: str = TOKEN
) -> Generator[InferenceClient]:
    client = InferenceClient("group 'math'", limit_s)
    client.connect(address, token)
    yield client
    client.close()


def answer_on(link: socket.socket, kind: Any) -> Any:
    """The answer that comes on a connection."""
    reader = FrameReader()
    while (found := reader.take()) is None:
        piece = link.recv(1 << 16)
        assert piece, "it was dropped"
        reader.feed(piece)
    return answer_from(found, kind)
