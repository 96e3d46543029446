"""Workers of Ray as forks of one process, which `ray_fork_server.py` describes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Generator
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from .ray_fork_server import NAME

__all__ = ["forked_workers"]

_SCRIPT = str(Path(__file__).with_name("ray_fork_server.py"))
_READY_S = 240.0  # For the imports on a busy machine
_SERVERS: list[subprocess.Popen[bytes]] = []
"""One at most, however many folders use the fixture."""


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Generator[None]:
    """Have the raylets that this process starts fork their workers."""
    if find_spec("ray") is None:  # as on a machine that is lent for its GPU
        yield
        return
    from ray._private import services  # pyright: ignore[reportPrivateImportUsage]
    from ray._private.node import Node

    start = services.start_raylet

    def start_raylet(*args: Any, **kwargs: Any) -> Any:
        if not _SERVERS:
            _SERVERS.append(_start_server())
        given = signature(start).bind(*args, **kwargs)
        given.arguments["setup_worker_path"] = _SCRIPT
        return start(*given.args, **given.kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "start_raylet", start_raylet)
        # Each of these two starts an interpreter for what nothing here asks of Ray.
        patch.setattr(services, "start_api_server", _no_dashboard)
        patch.setattr(Node, "start_monitor", _no_autoscaler)
        patch.setenv(NAME, f"penstock-ray-forks-{os.getpid()}")
        yield
    while _SERVERS:
        server = _SERVERS.pop()
        server.kill()
        server.wait()


def _no_dashboard(*_: Any, **__: Any) -> tuple[str, None]:
    return "", None


def _no_autoscaler(node: Any) -> None:
    del node


def _start_server() -> subprocess.Popen[bytes]:
    """Start it, and wait until it has imported: Ray gives workers a minute to register."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0" + os.environ[NAME])
        listening.listen()
        file = listening.fileno()
        started = subprocess.Popen([sys.executable, _SCRIPT, "serve", str(file)], pass_fds=[file])
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_READY_S)
        asking.connect("\0" + os.environ[NAME])
        asking.shutdown(socket.SHUT_WR)
        asking.recv(1)
    return started
