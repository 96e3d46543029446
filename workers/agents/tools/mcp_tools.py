"""Tools that an MCP server offers, over standard input and output or HTTP.

Needs the package `mcp`. The server tells the schemas of its tools when the tools are built, by a
connection that is closed again; the one that calls use is made with the first call, in the event
loop of that call, and is shared by all conversations unless each is to have its own. A server that
vanishes or hangs costs its own calls; but one that is deterministic is started again, told what it
had been told of the conversation, and called again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from ....dataflow.errors import ConfigError
from ....dataflow.options import FiniteFloat, Int, NonNegativeInt, option_class
from ...isolation.child import cut, supervised
from ...isolation.pool import completed
from ..library_logs import SPEAKER, tame
from .tool import Tool, ToolSession, ToolText, schema_of

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult


_CLOSE_S = 15.0
"""Seconds for a connection to close, which takes some 7 at most if a server does not want to."""
ANSWER_S = 5.0  # seconds in which a server that lives lists its tools
_ENDED = "the tool's server ended during the call"
_LOG = logging.getLogger("penstock.tools")


_T = TypeVar("_T")


class ServerLost(Exception):
    """There is no server to call; the model gets its text."""


@contextlib.asynccontextmanager
async def connected(options: McpTools, log: IO[str]) -> AsyncGenerator[Client]:
    import anyio
    from mcp import Client, StdioServerParameters, stdio_client

    tame("mcp", "client")
    SPEAKER.set(f"MCP server {options.where}")
    if options.url is not None:
        client = Client(options.url, cache=None)
    else:
        first, *rest = supervised(options.command)
        parameters = StdioServerParameters(
            command=first, args=rest, env=dict(options.env), encoding_error_handler="replace"
        )
        client = Client(stdio_client(parameters, errlog=log), cache=None)  # pyright: ignore[reportArgumentType]
    # The deadline is around all of it, as what is inside may not outlive it, and lifted then.
    with anyio.move_on_after(options.start_limit_s) as limit:
        async with client:
            limit.deadline = math.inf
            yield client
    if limit.cancelled_caught:
        raise TimeoutError


class McpServer:
    """A server that is connected to when it is called, and again when it is lost.

    Attributes:
        num_made: Connections so far.
    """

    def __init__(self, options: McpTools) -> None:
        self._options, self._max_restarts = options, options.max_restarts
        self._num_restarts = self.num_made = 0
        self._connection: _Connection | None = None
        self._closing: set[_Connection] = set()

    def which(self) -> int:
        """Number of the server that is called next; it has seen only calls made to itself."""
        self._connected()
        return self.num_made

    async def call(self, name: str, arguments: Mapping[str, Any], limit_s: float) -> CallToolResult:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        connection = self._connected()
        try:
            client = await asyncio.shield(connection.made)
        except Exception as error:
            self._lose(connection)
            raise ServerLost(f"the tool's server cannot be reached: {why_not(error)}") from error
        try:
            return await connection.within(client.call_tool(name, dict(arguments)), limit_s)
        except TimeoutError:
            try:
                await connection.within(client.list_tools(), ANSWER_S)
            except Exception:  # whatever is wrong with it
                self._lose(connection)
            raise
        except ServerLost:
            self._lose(connection)
            raise
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                self._lose(connection)
                raise ServerLost(_ENDED) from error
            raise

    async def close(self) -> None:
        if self._connection is not None:
            self._lose(self._connection)
        for connection in tuple(self._closing):
            await connection.closed()
        self._closing.clear()

    def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._connection is not None and self._connection.loop is not loop:
            self._connection = None  # it ended with its event loop, which is no failure
        if self._connection is not None and self._connection.is_closed:
            self._lose(self._connection)
        if self._connection is None:
            if self._num_restarts > self._max_restarts:
                raise ServerLost(
                    f"the tool's server is gone, after {self._max_restarts} restarts of it"
                )
            self._connection = _Connection(self._options)
            self.num_made += 1
        return self._connection

    def _lose(self, connection: _Connection) -> None:
        connection.stop()
        self._closing = {one for one in self._closing if not one.is_closed}
        self._closing.add(connection)
        if connection is self._connection:
            self._connection = None
            self._num_restarts += 1


class _Connection:
    """One connection and the task that has it.

    Attributes:
        loop: The event loop it belongs to.
        made: The client, once it is connected.
    """

    def __init__(self, options: McpTools) -> None:
        self.loop = asyncio.get_running_loop()
        self._options = options
        self._stop = asyncio.Event()
        self.made: asyncio.Future[Client] = self.loop.create_future()
        self._task = self.loop.create_task(self._serve())

    async def within(self, awaitable: Awaitable[_T], limit_s: float) -> _T:
        asked = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait(
                {asked, self._task}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if asked.done():
                return asked.result()
            if self._task.done():
                raise ServerLost(_ENDED)
            raise TimeoutError
        finally:
            asked.cancel()

    @property
    def is_closed(self) -> bool:
        return self._task.done()

    def stop(self) -> None:
        if not self.loop.is_closed():
            self._stop.set()

    async def closed(self) -> None:
        if self.loop is not asyncio.get_running_loop():
            return
        _, left = await asyncio.wait({self._task}, timeout=_CLOSE_S)
        if left:
            self._task.cancel()
            _LOG.warning("an MCP server did not let go of its connection in %g s", _CLOSE_S)

    async def _serve(self) -> None:
        why: Exception = ServerLost("its connection was closed")
        try:
            with open(os.devnull, "w") as nowhere:
                async with connected(self._options, nowhere) as client:
                    self.made.set_result(client)
                    await self._stop.wait()
        except Exception as error:
            why = error
        finally:
            if not self.made.done():
                self.made.set_exception(why)
                self.made.exception()  # seen: asyncio warns of an exception that is never retrieved


def why_not(error: BaseException) -> str:
    """Describe an error; of a group of them the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return f"{str(error)[:500] or type(error).__name__}"


_ENDED_BETWEEN = "the tool's server ended between two calls"
_OTHERWISE = "the tool's server was started again, and answers otherwise than before"
_MOST_PAGES = 100  # of a list of tools


@option_class
class McpTools:
    """The tools of one MCP server.

    Example:
        `McpTools(command=("python", "-m", "my_server"), allowed=("search",))`
    """

    command: tuple[str, ...] = ()
    """Program and arguments of a server that speaks over its standard input and output; or give
    `url`."""
    url: str | None = None
    """Address of a server that speaks over HTTP."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the server, besides a few harmless ones of ours."""
    time_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 30.0
    """Seconds one call may take."""
    start_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 30.0
    """Seconds a server may take to start and answer."""
    max_restarts: NonNegativeInt = 3
    """Most restarts of a lost server, in the whole run or in a conversation."""
    per_conversation: bool = False
    """Whether each conversation has a server of its own, for servers that remember."""
    max_bytes: Annotated[Int, Ge(1), Le(1 << 26)] = 16_384
    """Largest result, as UTF-8; of a longer one the model gets the beginning and a count."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that a model may call; all if not given."""
    deterministic: bool = False
    """Whether what the server answers depends on the conversation alone; then a call whose server
    ends is made once more."""

    def build(self) -> Tool:
        if bool(self.command) == (self.url is not None):
            raise ConfigError("an MCP server has either a command or a url\n    give one of them")
        if find_spec("mcp") is None:
            raise ConfigError(
                "MCP servers need the package mcp, which is not installed\n"
                "    pip install penstock-rl[mcp]"
            )
        schemas = {schema["function"]["name"]: schema for schema in self._listed()}
        for name in self.allowed or ():
            if name not in schemas:
                raise ConfigError(
                    f"the MCP server {self.where} has no tool '{name}'\n"
                    f"    it has {', '.join(schemas) or 'none'}"
                )
        names = schemas if self.allowed is None else self.allowed
        return McpTool(self, [schemas[name] for name in names])

    @property
    def where(self) -> str:
        return f"'{self.url or ' '.join(self.command)}'"

    def _listed(self) -> Sequence[Mapping[str, Any]]:
        with tempfile.TemporaryFile("w+", errors="replace") as log:

            async def listed() -> Sequence[Mapping[str, Any]]:
                import anyio

                # Not asyncio.timeout(), which would break into the closing of the connection.
                async with connected(self, log) as client:
                    with anyio.fail_after(self.start_limit_s):
                        return await _schemas(client)

            try:
                return completed(listed())
            except Exception as error:  # of many kinds
                log.seek(0)
                said = log.read()[-500:].strip()
                raise ConfigError(
                    f"the MCP server {self.where} does not tell its tools: {why_not(error)}\n"
                    f"    see whether it runs by itself{f'; it said: {said}' if said else ''}"
                ) from error


class McpTool(Tool):
    def __init__(self, options: McpTools, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.deterministic = options.deterministic
        self.options, self.schemas = options, tuple(schemas)
        self.names = frozenset(schema["function"]["name"] for schema in self.schemas)
        # The one that all conversations share, or those of the ones that are open.
        self.servers = set[McpServer]() if options.per_conversation else {McpServer(options)}

    @override
    def open(self, seed: int) -> ToolSession:
        """Begin a conversation; a server is connected to with the first call."""
        if self.options.per_conversation:
            server = McpServer(self.options)
            self.servers.add(server)
            return _Session(self, server)
        return _Session(self, *self.servers)

    @override
    async def close(self) -> None:
        for server in tuple(self.servers):
            await server.close()
        if self.options.per_conversation:
            self.servers.clear()


class _Session(ToolSession):
    """The calls of one conversation; it closes the server if that is its own."""

    def __init__(self, tool: McpTool, server: McpServer) -> None:
        self._tool, self._options, self._server = tool, tool.options, server
        self._made: list[tuple[str, Mapping[str, Any], ToolText]] = []
        self._which = 0

    @override
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        if name not in self._tool.names:
            return ToolText(f"there is no tool {name!r}", error=True)
        lost = ""
        for _ in range(1 + self._options.deterministic):
            try:
                return await self._call_once(name, arguments)
            except ServerLost as error:
                lost = str(error)
        return ToolText(cut(lost, self._options.max_bytes), error=True)

    async def _call_once(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        """Call a tool of a server that knows what was said before, if that matters to it."""
        if not (self._options.per_conversation and self._options.deterministic):
            return await self._answer(name, arguments)
        which = self._server.which()
        for earlier, given, told in self._made if which != self._which else ():
            if await self._noted(which, earlier, given) != told:
                raise ServerLost(_OTHERWISE)
        told = await self._noted(which, name, arguments)
        self._which = which
        self._made.append((name, arguments, told))
        return told

    async def _noted(self, which: int, name: str, arguments: Mapping[str, Any]) -> ToolText:
        told = await self._answer(name, arguments)
        if self._server.num_made != which:
            raise ServerLost(_ENDED_BETWEEN)
        return told

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        limit_s, most = self._options.time_limit_s, self._options.max_bytes
        try:
            result = await self._server.call(name, arguments, limit_s)
            return ToolText(cut(_text(result), most), error=bool(result.is_error))
        except TimeoutError:
            return ToolText(f"{name} took longer than {limit_s:g} s", error=True, timed_out=True)
        except ServerLost:
            raise
        except Exception as error:  # the server's answer, or the library's opinion of it
            return ToolText(cut(f"{name} failed: {why_not(error)}", most), error=True)

    @override
    async def close(self) -> None:
        if self._options.per_conversation and self._server in self._tool.servers:
            self._tool.servers.remove(self._server)
            await self._server.close()


async def _schemas(client: Any) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            found.append(schema_of(tool.name, tool.description or "", tool.input_schema))
        cursor = page.next_cursor
        if not cursor:
            break
    return found


def _text(result: Any) -> str:
    """The parts of a result that are texts; if there are none, what it has as JSON."""
    texts = [part.text for part in result.content if part.type == "text"]
    if not texts and result.structured_content is not None:
        texts = [json.dumps(result.structured_content, ensure_ascii=False)]
    others = [f"[{part.type}]" for part in result.content if part.type != "text"]
    return "\n".join([*texts, *others])
