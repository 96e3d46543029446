"""An OpenAI-compatible server in front of a policy, with a key for each conversation.

It is on the loopback device alone, in the event loop in which turns are sampled. Addresses are
`http://127.0.0.1:PORT/c/NUMBER/v1`: a key opens its own conversation, as long as that goes on.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ....dataflow.errors import ConfigError, WorkerError
from ..library_logs import tame
from .chat_api import Refused, completion, error_body, events, read_request
from .sequences import ProgramSequences

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_MOST_BYTES = 4 << 20  # of a request's body
_MOST_DIGITS = 18  # most digits of a conversation's number
_SHOWN = 200  # most characters of an address that are shown
_START_LIMIT_S = 30.0
_CLOSE_LIMIT_S = 2


@dataclass(frozen=True)
class _Open:
    """A conversation that goes on, and the key to it."""

    sequences: ProgramSequences
    key: str


class Endpoint:
    """The handlers of the server.

    Attributes:
        refused: Requests that belong to no conversation, by the HTTP status that they got.
    """

    def __init__(self) -> None:
        self.url = ""
        self.refused: Counter[int] = Counter()
        self._open: dict[int, _Open] = {}

    @contextmanager
    def opened(self, number: int, sequences: ProgramSequences) -> Generator[tuple[str, str]]:
        """Have a conversation served meanwhile."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._open[number] = _Open(sequences, key)
        try:
            yield f"{self.url}/c/{number}/v1", key
        finally:
            del self._open[number]

    async def chat(self, request: Request) -> Response:
        """`POST /c/{number}/v1/chat/completions`."""
        sequences = None
        try:
            sequences = self._conversation(request)
            asked = read_request(await _body(request))
            answer = await sequences.answer(asked)
        except import_module("starlette.requests").ClientDisconnect:
            assert sequences is not None, "its body is read last"
            sequences.counts["hung_up"] += 1
            return _json({}, 499)  # nobody reads it
        except Refused as refused:
            if sequences is None:
                self.refused[refused.status] += 1
            else:
                sequences.counts["refused_requests"] += 1
            return _json(error_body(refused), refused.status)
        if asked.stream:
            streamed = import_module("starlette.responses").StreamingResponse
            return streamed(events(answer, asked), media_type="text/event-stream")
        return _json(completion(answer, asked))

    async def models(self, request: Request) -> Response:
        """`GET /c/{number}/v1/models`."""
        try:
            self._conversation(request)
        except Refused as refused:
            self.refused[refused.status] += 1
            return _json(error_body(refused), refused.status)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "penstock"}
        return _json({"object": "list", "data": [model]})

    async def unknown(self, request: Request, error: Exception) -> Response:
        self.refused[404] += 1
        return _json(error_body(_not_served(request)), 404)

    def _conversation(self, request: Request) -> ProgramSequences:
        number, given = request.path_params["number"], request.headers.get("authorization", "")
        if not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise _not_served(request)
        found = self._open.get(int(number))
        key = found.key if found else secrets.token_urlsafe(24)
        # Bytes, as a header may hold what is no ASCII; and of one time, whether it is right or not.
        right = hmac.compare_digest(f"Bearer {key}".encode(), given.encode(errors="replace"))
        if found is None or not right:
            raise Refused(
                "this key opens no conversation that goes on", status=401, code="invalid_api_key"
            )
        return found.sequences


def _not_served(request: Request) -> Refused:
    path = request.url.path
    shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}..."
    why = f"{request.method} {shown} is not served; chat/completions and models are"
    return Refused(why, status=404, code="not_found")


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return import_module("starlette.responses").JSONResponse(body, status)


async def _body(request: Request) -> bytes:
    read = bytearray()
    async for piece in request.stream():
        read += piece
        if len(read) > _MOST_BYTES:
            raise Refused(
                f"the body is longer than {_MOST_BYTES} bytes", status=413, code="too_large"
            )
    return bytes(read)


def check_extra() -> ModuleType:
    try:
        import_module("starlette")
        return import_module("uvicorn")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"programs that ask the policy need the module '{error.name}'\n"
            "    pip install penstock-rl[programs]"
        ) from error


@asynccontextmanager
async def served(endpoint: Endpoint) -> AsyncGenerator[None]:
    """Serve on a free port of the loopback device meanwhile."""
    uvicorn: Any = check_extra()
    tame("uvicorn")
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        endpoint.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            _app(endpoint),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_CLOSE_LIMIT_S,
        )
        server = _server(uvicorn, config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await _started(server, serving)
            yield
        finally:
            server.should_exit = True
            await asyncio.wait([serving], timeout=2 * _CLOSE_LIMIT_S)
            serving.cancel()


def _app(endpoint: Endpoint) -> Any:
    applications, routing = (import_module(f"starlette.{n}") for n in ("applications", "routing"))
    path = "/c/{number}/v1"
    routes = [
        routing.Route(f"{path}/chat/completions", endpoint.chat, methods=["POST"]),
        routing.Route(f"{path}/models", endpoint.models, methods=["GET"]),
    ]
    unknown: Mapping[int, Any] = {404: endpoint.unknown, 405: endpoint.unknown}
    return applications.Starlette(routes=routes, exception_handlers=unknown)


def _server(uvicorn: Any, config: Any) -> Any:
    """A server that leaves signals to whoever has them."""

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    return Server(config)


async def _started(server: Any, serving: asyncio.Task[None]) -> None:
    async with asyncio.timeout(_START_LIMIT_S):
        while not server.started:
            if serving.done():
                raise WorkerError("the server in front of the policy has ended at its start")
            await asyncio.sleep(0.001)
