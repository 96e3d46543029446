"""A connection to an MCP server: opened by a task of its own, and replaced so many times at most.

The package `mcp` wants a connection to be opened and closed by one task, so that task does nothing
else; calls are made by whoever has them. A server that does not answer within the time limit is
asked for its list of tools; if it does not answer that either, it is replaced, as is one that has
vanished. All waits have limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ..library_logs import SPEAKER, tame
from .supervised import supervised

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

_CLOSE_S = 15.0
"""Seconds for a connection to close, which takes some 7 at most if a server does not want to."""
ANSWER_S = 5.0
"""Seconds in which a server that lives lists its tools."""
_ENDED = "the tool's server ended during the call"
_LOG = logging.getLogger("penstock.tools")


_T = TypeVar("_T")


class ServerLost(Exception):
    """There is no server to call; its text is told to the model."""


@dataclass(frozen=True)
class McpAddress:
    """How to reach a server: a command to start, or a URL."""

    command: tuple[str, ...]
    url: str | None
    env: Mapping[str, str]
    start_limit_s: float


@contextlib.asynccontextmanager
async def connected(address: McpAddress, log: IO[str]) -> AsyncGenerator[Client]:
    """A client of a server that has answered.

    Args:
        address: Of the server, which is started if it is a command.
        log: What the server writes to standard error goes here.

    Raises:
        TimeoutError: If it does not answer in time.
        Exception: Of many kinds, if it fails.
    """
    import anyio
    from mcp import Client, StdioServerParameters, stdio_client

    tame("mcp", "client")
    SPEAKER.set(f"MCP server '{address.url or ' '.join(address.command)}'")
    if address.url is not None:
        client = Client(address.url, cache=None)
    else:
        first, *rest = supervised(address.command)
        parameters = StdioServerParameters(
            command=first, args=rest, env=dict(address.env), encoding_error_handler="replace"
        )
        client = Client(stdio_client(parameters, errlog=log), cache=None)  # pyright: ignore[reportArgumentType]
    # The deadline is around all of it, as what is inside may not outlive it, and lifted then.
    with anyio.move_on_after(address.start_limit_s) as limit:
        async with client:
            limit.deadline = math.inf
            yield client
    if limit.cancelled_caught:
        raise TimeoutError


class McpServer:
    """A server that is connected to when it is called, and again when it is lost.

    Args:
        address: Where it is.
        max_restarts: How often it may be connected to again.

    Attributes:
        num_made: Connections so far.
    """

    def __init__(self, address: McpAddress, max_restarts: int) -> None:
        self._address, self._max_restarts = address, max_restarts
        self._num_restarts = self.num_made = 0
        self._connection: _Connection | None = None
        self._closing: set[_Connection] = set()

    def which(self) -> int:
        """Number of the server that is called next: another one has seen nothing of earlier calls.

        Raises:
            ServerLost: If there is none any more.
        """
        self._connected()
        return self.num_made

    async def call(self, name: str, arguments: Mapping[str, Any], limit_s: float) -> CallToolResult:
        """Call a tool.

        Args:
            name: Of the tool.
            arguments: By name, as JSON.
            limit_s: Seconds that it may take, once there is a connection.

        Raises:
            ServerLost: If there is no server, or it is lost in the middle.
            TimeoutError: If it takes too long.
            Exception: Of many kinds, if the server refuses the call.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        connection = self._connected()
        client = await self._client(connection)
        try:
            return await connection.within(client.call_tool(name, dict(arguments)), limit_s)
        except TimeoutError:
            await self._look_after(connection, client)
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
        """Close what is open, and wait for that."""
        if self._connection is not None:
            self._lose(self._connection)
        for connection in tuple(self._closing):
            await connection.closed()
        self._closing.clear()

    def _connected(self) -> _Connection:
        """Return the connection, begun now if there is none."""
        loop = asyncio.get_running_loop()
        if self._connection is not None and self._connection.loop is not loop:
            self._connection = None  # it ended with its event loop; nobody is to blame
        if self._connection is not None and self._connection.is_closed:
            self._lose(self._connection)
        if self._connection is None:
            if self._num_restarts > self._max_restarts:
                raise ServerLost(
                    f"the tool's server is gone, after {self._max_restarts} restarts of it"
                )
            self._connection = _Connection(self._address)
            self.num_made += 1
        return self._connection

    async def _client(self, connection: _Connection) -> Client:
        """Return the client, once the connection is there."""
        try:
            return await connection.client()
        except Exception as error:
            self._lose(connection)
            raise ServerLost(f"the tool's server cannot be reached: {why_not(error)}") from error

    async def _look_after(self, connection: _Connection, client: Client) -> None:
        """Give up a server that answers nothing any more."""
        try:
            await connection.within(client.list_tools(), ANSWER_S)
        except Exception:  # whatever is wrong with it
            self._lose(connection)

    def _lose(self, connection: _Connection) -> None:
        """Close a connection, and have the next call make another."""
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
    """

    def __init__(self, address: McpAddress) -> None:
        self.loop = asyncio.get_running_loop()
        self._address = address
        self._stop = asyncio.Event()
        self._made: asyncio.Future[Client] = self.loop.create_future()
        self._task = self.loop.create_task(self._serve())

    async def client(self) -> Client:
        """The client, as soon as the server has answered.

        Raises:
            Exception: Of many kinds, if it does not.
        """
        return await asyncio.shield(self._made)

    async def within(self, awaitable: Awaitable[_T], limit_s: float) -> _T:
        """A result of the client's.

        Raises:
            TimeoutError: If there is none by then.
            ServerLost: If the connection ends before.
        """
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
        """Whether its task has ended."""
        return self._task.done()

    def stop(self) -> None:
        """Begin to close."""
        if not self.loop.is_closed():
            self._stop.set()

    async def closed(self) -> None:
        """Wait until it has closed."""
        if self.loop is not asyncio.get_running_loop():
            return
        _, left = await asyncio.wait({self._task}, timeout=_CLOSE_S)
        if left:
            self._task.cancel()
            _LOG.warning("an MCP server did not let go of its connection in %g s", _CLOSE_S)

    async def _serve(self) -> None:
        """Open the connection, keep it, close it."""
        try:
            with open(os.devnull, "w") as nowhere:
                async with connected(self._address, nowhere) as client:
                    self._made.set_result(client)
                    await self._stop.wait()
        except Exception as error:
            if not self._made.done():
                self._made.set_exception(error)
                self._made.exception()  # seen, should nobody wait for it any more
        finally:
            if not self._made.done():
                self._made.set_exception(ServerLost("its connection was closed"))
                self._made.exception()


def why_not(error: BaseException) -> str:
    """What an error says, of a group of them the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return f"{str(error)[:500] or type(error).__name__}"
