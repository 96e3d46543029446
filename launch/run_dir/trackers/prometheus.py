"""A run's newest numbers for Prometheus, at an address on this machine while the run goes on.

Nothing is kept and nothing is sent: Prometheus, or `curl`, asks. Every metric of every stage is one
series,

    penstock_metric{run="...",stage="grpo",metric="actor.train/loss"} 0.25

and `penstock_step` is the step that it is of. The address holds a token; see `loopback_server`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....dataflow.errors import ConfigError
from ....dataflow.files import read_bytes
from ..loopback_server import Answer, PageServer
from ..stop import say
from .tracker import RunInfo

_TARGET = "metrics"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LEAST_CHARACTERS = 16  # fewest characters of a token that the user chose
_MOST_TOKEN_BYTES = 4096  # largest token file

_DEADLINE_S = 10.0  # for the server's thread to end


class PrometheusTracker:
    """Serves `http://127.0.0.1:PORT/TOKEN/metrics`; see `Tracker`."""

    def __init__(self, port: int = 0, token_file: str | None = None) -> None:
        if type(port) is not int or not 0 <= port < 65536:
            raise ConfigError(
                "'port' of tracker 'prometheus': expected a whole number from 0 to 65535, "
                f"got {port!r}"
            )
        self._port = port
        self._token = "" if token_file is None else _token(Path(token_file))
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {}
        self._steps: dict[str, int] = {}
        self._run = ""
        self._server: PageServer | None = None

    def start(self, run: RunInfo) -> None:
        self._run = run.id
        server = PageServer(self._answer, self._port, self._token)
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: shutdown would wait for this one for ever
            server.server_close()
            raise
        self._server = server
        say(f"metrics for Prometheus: {server.url}{_TARGET}")

    def rewind(self, step: int, stage: str) -> None:
        with self._lock:
            self._values[stage] = {}
            self._steps.pop(stage, None)

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._values[stage] |= metrics
            self._steps[stage] = step

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(_DEADLINE_S)

    def _answer(self, target: str) -> Answer | None:
        if target != _TARGET:
            return None
        with self._lock:
            numbers = [
                ("metric", _labels(run=self._run, stage=stage, metric=name), value)
                for stage, values in self._values.items()
                for name, value in values.items()
            ]
            numbers += [
                ("step", _labels(run=self._run, stage=stage), step)
                for stage, step in self._steps.items()
            ]
        types = [f"# TYPE penstock_{name} gauge" for name in ("metric", "step")]
        lines = [f"penstock_{name}{{{labels}}} {_number(v)}" for name, labels, v in numbers]
        return Answer("".join(f"{line}\n" for line in (*types, *lines)).encode(), _CONTENT_TYPE)


def _token(path: Path) -> str:
    try:
        token = read_bytes(path, _MOST_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'token_file' of tracker 'prometheus': {error}") from error
    if len(token) < _LEAST_CHARACTERS or not token.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            f"'token_file' of tracker 'prometheus': expected at least {_LEAST_CHARACTERS} letters "
            f"and digits in '{path}', got {len(token)} characters\n"
            f"    openssl rand -hex 32 > {path}"
        )
    return token


def _labels(**labels: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
