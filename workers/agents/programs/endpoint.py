"""An OpenAI-compatible server in front of a policy, and the sequences of tokens that come of it.

It is on the loopback device alone, in the event loop in which turns are sampled. Addresses are
`http://127.0.0.1:PORT/c/NUMBER/v1`: a key opens its own conversation, as long as that goes on.

A request whose messages go on from what was said is the next turn of that sequence: the tokens
before it are those that were sampled, never the client's text of them encoded again. A request that
parts from what was said - another branch, a sub-agent, a history that the client has rewritten -
begins a sequence of its own. It shares the tokens of the turns up to which both are the same, which
are trained in the first sequence alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import Tensor

from ....algorithms.roles.language import Turn, TurnRequest
from ....algorithms.roles.language_tables import Sampling
from ....dataflow.errors import ConfigError, WorkerError
from ...models.tokenizer import ChatTemplateError
from ..conversation import Conversation, Exchange
from ..library_logs import tame
from ..rendering import TurnRenderer
from .chat_api import (
    ChatAnswer,
    ChatRequest,
    Refused,
    completion,
    error_body,
    events,
    message_key,
    read_request,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class _End(NamedTuple):
    """The end of a turn: so many messages and tokens in, and whether a token ended it."""

    messages: int = 0
    tokens: int = 0
    finished: bool = True


@dataclass
class _Sequence:
    """One row and what tells how far a request goes along with it."""

    row: Conversation  # what becomes a row of the table
    name: str  # of the request that began it: rows are in the order of their names
    tools: str  # of all its requests
    keys: list[str] = field(default_factory=list[str])  # of its messages
    # Of each turn in it, its own and those that it shares.
    ends: list[_End] = field(default_factory=list[_End])
    is_open: bool = False  # whether a turn is being sampled

    def shared(self, tools: str, keys: Sequence[str]) -> _End:
        """The end of the last turn up to which a request is the same; none if there is none."""
        found = _End()
        for end in self.ends if tools == self.tools else ():
            if end.messages >= len(keys) or list(keys[: end.messages]) != self.keys[: end.messages]:
                break
            found = end
        return found

    def goes_on(self, end: _End) -> bool:
        return not self.is_open and self.ends[-1] == end


class ProgramSequences:
    """One conversation of a program.

    Attributes:
        limit: Which limit the program has met; None if none. One of `ENDINGS`.
        counts: What is to be reported of it.
    """

    def __init__(
        self,
        begin: Callable[[int], Conversation],
        rows: Sequence[int],
        exchange: Exchange,
        renderer: TurnRenderer,
        spell: Callable[[Tensor], tuple[str, ...]],
        sampling: Sampling,
        max_turns: int,
    ) -> None:
        self._begin, self._free = begin, list(rows)
        self._exchange, self._renderer, self._spell = exchange, renderer, spell
        self._sampling, self._max_turns = sampling, max_turns
        self._sequences: list[_Sequence] = []
        self._asked: Counter[str] = Counter()
        self._num_turns = 0
        self._rows: list[Conversation] = []
        self._sampled = asyncio.Condition()
        self.limit: str | None = None
        self.counts: Counter[str] = Counter()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        if self._num_turns == self._max_turns:
            self._end("last turn", f"this conversation has had its {self._max_turns} turns")
        name = self._name(request)
        sequence, tokens = self._placed(request, name)
        row = sequence.row
        longest = self._sampling.max_new_tokens
        most = min(longest, request.max_tokens or longest)
        most = min(most, self._sampling.max_total_tokens - len(tokens))
        if most < 1:
            self._end(
                "out of tokens",
                f"the messages are {len(tokens)} tokens, and a conversation may have "
                f"{self._sampling.max_total_tokens}",
            )
        self._take(sequence, request, tokens)
        # The same request has the same random numbers, whenever it comes.
        number = int(name[:15], 16)
        asked = TurnRequest(
            row.row,
            tuple(tokens),
            most,
            self._exchange.uniform(row.problem, row.sample, number, most),
            self._exchange.seed(row.problem, row.sample, number),
        )
        turn = await self._exchange.speak(asked)
        reply = self._exchange.reply_of(len(row.turns), turn.token, turn.finished)
        # The token that ends a turn is no text.
        own = turn.token[: len(turn.token) - turn.finished]
        answer = ChatAnswer(
            name,
            reply,
            bool(request.tools),
            self._spell(own),
            tuple(turn.logprob[: len(own)].tolist()),
            len(tokens),
        )
        self._said(sequence, turn, answer)
        async with self._sampled:
            self._sampled.notify_all()
        return answer

    async def settled(self) -> None:
        self._max_turns = self._num_turns
        async with self._sampled:
            await self._sampled.wait_for(lambda: not any(s.is_open for s in self._sequences))

    def rows(self) -> list[Conversation]:
        """The rows in an order that no delay changes; the first has the conversation's counts."""
        if self._rows:
            return self._rows
        ordered = sorted(self._sequences, key=lambda one: (len(one.row.messages), one.name))
        rows = self._rows = [one.row for one in ordered] or [self._begin(self._free[0])]
        for piece, row in enumerate(rows):
            row.piece = piece
        self.counts["sequences"] = len(self._sequences)
        rows[0].counts.update({name: float(count) for name, count in self.counts.items()})
        return rows

    def _name(self, request: ChatRequest) -> str:
        asked = json.dumps([request.keys, request.tools, request.max_tokens], sort_keys=True)
        self._asked[asked] += 1
        return hashlib.sha256(f"{self._asked[asked]}{asked}".encode()).hexdigest()[:24]

    def _placed(self, request: ChatRequest, name: str) -> tuple[_Sequence, list[int]]:
        tools = json.dumps(request.tools, sort_keys=True)
        found = [(one.shared(tools, request.keys), one) for one in self._sequences]
        along = [(end, one) for end, one in found if end.messages]
        if not along:
            return self._new(name, tools), self._rendered(request, _End())
        # Of those that share as much, one that goes on from there.
        end, best = min(
            along, key=lambda each: (-each[0].messages, not each[1].goes_on(each[0]), each[1].name)
        )
        tokens = best.row.tokens[: end.tokens] + self._rendered(request, end)
        if best.goes_on(end):
            return best, tokens
        new = self._new(name, tools)
        new.ends = [one for one in best.ends if one.messages <= end.messages]
        return new, tokens

    def _new(self, name: str, tools: str) -> _Sequence:
        if not self._free:
            self._end("last turn", "this conversation has as many branches as it may have")
        made = self._begin(self._free[0])
        made.tokens, made.messages = [], []
        return _Sequence(made, name, tools)

    def _rendered(self, request: ChatRequest, end: _End) -> list[int]:
        """The tokens that follow the end of a turn; of no turn, those of the whole request."""
        messages, tools = request.messages, request.tools or None
        try:
            if not end.messages:
                return self._renderer.before(messages, tools)
            before, after = messages[: end.messages - 1], messages[end.messages :]
            return self._renderer.after(before, after, tools, finished=end.finished)
        except ChatTemplateError as error:
            raise Refused(f"the policy's chat template refuses this: {error}") from error

    def _take(self, sequence: _Sequence, request: ChatRequest, tokens: list[int]) -> None:
        if sequence not in self._sequences:
            self._free.pop(0)
            self._sequences.append(sequence)
        self._num_turns += 1
        self.counts["requests"] += 1
        self.counts["overridden"] += bool(request.overridden)
        sequence.is_open = True
        sequence.keys = list(request.keys)
        sequence.row.tokens = tokens
        sequence.row.messages = list(request.messages)

    def _said(self, sequence: _Sequence, turn: Turn, answer: ChatAnswer) -> None:
        row = sequence.row
        row.turns.append((len(row.tokens), turn))
        row.tokens += turn.token.tolist()
        row.rewards.append(0.0)
        row.messages.append(answer.message)
        sequence.keys.append(message_key(answer.message))
        sequence.ends.append(_End(len(sequence.keys), len(row.tokens), turn.finished))
        sequence.is_open = False
        calls = answer.reply.calls if answer.with_calls else ()
        self.counts["tool_calls"] += len(calls)
        self.counts["bad_calls"] += len(calls) - len(answer.calls)

    def _end(self, limit: str, why: str) -> NoReturn:
        self.limit = limit
        raise Refused(why, code="context_length_exceeded" if limit == "out of tokens" else "limit")


_MOST_BYTES = 4 << 20  # of a request's body
_MOST_DIGITS = 18  # most digits of a conversation's number
_SHOWN = 200  # most characters of an address that are shown
_START_LIMIT_S = 30.0
_CLOSE_LIMIT_S = 2


class Endpoint:
    """The handlers of the server.

    Attributes:
        refused: Requests that belong to no conversation, by the HTTP status that they got.
    """

    def __init__(self) -> None:
        self.url = ""
        self.refused: Counter[int] = Counter()
        self._open: dict[int, tuple[ProgramSequences, str]] = {}

    @contextmanager
    def opened(self, number: int, sequences: ProgramSequences) -> Generator[tuple[str, str]]:
        """Have a conversation served meanwhile."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._open[number] = sequences, key
        try:
            yield f"{self.url}/c/{number}/v1", key
        finally:
            del self._open[number]

    async def chat(self, request: Request) -> Response:
        """`POST /c/{number}/v1/chat/completions`."""
        sequences = None
        try:
            sequences = self._conversation(request)
            body = bytearray()
            async for piece in request.stream():
                body += piece
                if len(body) > _MOST_BYTES:
                    raise Refused(
                        f"the body is longer than {_MOST_BYTES} bytes", status=413, code="too_large"
                    )
            asked = read_request(bytes(body))
            answer = await sequences.answer(asked)
        except import_module("starlette.requests").ClientDisconnect:
            assert sequences is not None, "its body is read last"
            sequences.counts["hung_up"] += 1
            return _json({}, 499)  # the client has gone
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
        sequences, key = self._open.get(int(number), (None, secrets.token_urlsafe(24)))
        # Bytes, as a header may hold what is no ASCII; and of one time, whether it is right or not.
        right = hmac.compare_digest(f"Bearer {key}".encode(), given.encode(errors="replace"))
        if sequences is None or not right:
            raise Refused(
                "this key opens no conversation that goes on", status=401, code="invalid_api_key"
            )
        return sequences


def _not_served(request: Request) -> Refused:
    path = request.url.path
    shown = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}..."
    why = f"{request.method} {shown} is not served; chat/completions and models are"
    return Refused(why, status=404, code="not_found")


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return import_module("starlette.responses").JSONResponse(body, status)


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

    class Server(uvicorn.Server):
        """A server that installs no signal handlers."""

        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

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
        server: Any = Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                while not server.started:
                    if serving.done():
                        raise WorkerError(
                            "the server in front of the policy has ended at its start"
                        )
                    await asyncio.sleep(0.001)
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
