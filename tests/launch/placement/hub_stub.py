"""A hub on the loopback interface: the part of its API that a download of a model uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants


class Hub(ThreadingHTTPServer):
    """Serves `models` (id -> revision -> folder) and notes which files were asked for.

    A revision is a branch; its commit is the hash of the folder's name.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.served: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def folder(self, model: str, revision: str) -> tuple[str, Path] | None:
        """Commit and folder of a branch or a commit."""
        for branch, folder in self.models.get(model, {}).items():
            commit = commit_of(folder)
            if revision in (branch, commit):
                return commit, folder
        return None


def commit_of(folder: Path) -> str:
    return hashlib.sha1(str(folder).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride] - whose it always is

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        api = path[:2] == ["api", "models"]
        parts = path[2:] if api else path
        if len(parts) < 4:
            print("SHORT", self.path)
            return self._send(404, b"", body)
        model, what, revision = "/".join(parts[:2]), *parts[2:4]
        if model in self.server.gated:
            return self._send(403, b"", body, {"X-Error-Code": "GatedRepo"})
        if model not in self.server.models:
            return self._send(404, b"", body, {"X-Error-Code": "RepoNotFound"})
        found = self.server.folder(model, revision)
        if found is None:
            return self._send(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
        commit, folder = found
        if what == "revision":
            said = {"id": model, "sha": commit, "siblings": []}
            return self._send(200, json.dumps(said).encode(), body)
        if what == "tree":
            return self._send(200, json.dumps(_tree(folder)).encode(), body)
        content = folder.joinpath(*parts[4:]).read_bytes()
        if body:
            self.server.served.append("/".join(parts[4:]))
        return self._send(
            200, content, body, {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}
        )

    def _send(
        self, code: int, content: bytes, body: bool, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree(folder: Path) -> list[dict[str, object]]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return [
        {
            "type": "file",
            "path": str(file.relative_to(folder)),
            "size": file.stat().st_size,
            "oid": _oid(file.read_bytes()),
        }
        for file in files
    ]


@contextmanager
def hub_at(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    """A hub that this process's client talks to, with a cache of its own."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    # Made of it when the client is imported.
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    huggingface_hub.close_session()
    try:
        yield hub
    finally:
        huggingface_hub.close_session()
        hub.shutdown()
        hub.server_close()
        thread.join()
