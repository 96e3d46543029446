"""Tools that an MCP server offers, over standard input and output or HTTP.

Needs the package `mcp`. The server tells the schemas of its tools when the tools are built, by a
connection that is closed again; the one that calls use is made with the first call, in the event
loop of that call, and is shared by all conversations unless each is to have its own. A server that
vanishes or hangs costs its own calls; but one that is deterministic is started again, told what it
had been told of the conversation, and called again.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ....dataflow.errors import ConfigError
from ....dataflow.option_checks import check_range
from .function_child import cut
from .mcp_server import McpAddress, McpServer, ServerLost, connected, why_not
from .tool import Tool, ToolSession, ToolText

_ENDED = "the tool's server ended between two calls"
_OTHERWISE = "the tool's server was started again, and answers otherwise than before"
_MOST_PAGES = 100
"""Of a list of tools."""


@dataclass(frozen=True, kw_only=True)
class McpTools:
    """The tools of one MCP server.

    Example:
        `McpTools(command=("python", "-m", "my_server"), allowed=("search",))`

    Raises:
        ValueError: If a number is out of range.
    """

    command: tuple[str, ...] = ()
    """Program and arguments of a server that speaks over its standard input and output; or give
    `url`."""
    url: str | None = None
    """Of a server that speaks over HTTP."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the server finds in its environment besides a few harmless variables of ours."""
    time_limit_s: float = 30.0
    """Seconds one call may take."""
    start_limit_s: float = 30.0
    """Seconds a server may take to start and answer."""
    max_restarts: int = 3
    """How often a lost server is started again, in the whole run or in a conversation."""
    per_conversation: bool = False
    """Whether each conversation has a server of its own, for servers that remember."""
    max_bytes: int = 16_384
    """Of a result, as UTF-8; of a longer one the beginning is told, and how much is missing."""
    allowed: tuple[str, ...] | None = None
    """Names of the tools that a model may call; all if not given."""
    deterministic: bool = False
    """Whether what the server answers depends on the conversation alone; then a call whose server
    ends is made once more."""

    def __post_init__(self) -> None:
        check_range(self, "time_limit_s", "start_limit_s", above=0, at_most=86_400)
        check_range(self, "max_restarts", at_least=0)
        check_range(self, "max_bytes", at_least=1, at_most=1 << 26)

    def build(self) -> Tool:
        """Ask the server for its tools.

        Raises:
            ConfigError: If the package is missing, the server does not answer, or it lacks a tool.
        """
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
        """The server, for messages."""
        return f"'{self.url or ' '.join(self.command)}'"

    @property
    def address(self) -> McpAddress:
        """How to reach the server."""
        return McpAddress(self.command, self.url, self.env, self.start_limit_s)

    def _listed(self) -> Sequence[Mapping[str, Any]]:
        """Return the schemas of all tools, asked for by a connection of its own."""
        with tempfile.TemporaryFile("w+", errors="replace") as log:

            async def listed() -> Sequence[Mapping[str, Any]]:
                import anyio

                # Not asyncio.timeout(), which would break into the closing of the connection.
                async with connected(self.address, log) as client:
                    with anyio.fail_after(self.start_limit_s):
                        return await _schemas(client)

            try:  # in a thread: there may be a running event loop in this one
                with ThreadPoolExecutor(1, "mcp tools") as thread:
                    return thread.submit(asyncio.run, listed()).result()
            except Exception as error:  # of many kinds
                log.seek(0)
                said = log.read()[-500:].strip()
                raise ConfigError(
                    f"the MCP server {self.where} does not tell its tools: {why_not(error)}\n"
                    f"    see whether it runs by itself{f'; it said: {said}' if said else ''}"
                ) from error


class McpTool:
    """The tools of a server.

    Args:
        options: How to reach it, and limits.
        schemas: Of the tools that may be called.
    """

    def __init__(self, options: McpTools, schemas: Sequence[Mapping[str, Any]]) -> None:
        self.deterministic = options.deterministic
        self._options, self._schemas = options, tuple(schemas)
        self._shared = None if options.per_conversation else self._server()
        self._own: set[McpServer] = set()

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """As the server told them."""
        return self._schemas

    def open(self, seed: int) -> ToolSession:
        """Begin a conversation; a server is connected to with the first call."""
        names = frozenset(schema["function"]["name"] for schema in self._schemas)
        if self._shared is not None:
            return _Session(self._options, names, self._shared, None)
        server = self._server()
        self._own.add(server)
        return _Session(self._options, names, server, self._own)

    async def close(self) -> None:
        """Close all connections."""
        for server in (*self._own, *([self._shared] if self._shared else [])):
            await server.close()
        self._own.clear()

    def _server(self) -> McpServer:
        return McpServer(self._options.address, self._options.max_restarts)


class _Session:
    """The calls of one conversation; it closes the server if that is among its own."""

    def __init__(
        self,
        options: McpTools,
        names: frozenset[str],
        server: McpServer,
        own: set[McpServer] | None,
    ) -> None:
        self._options, self._names, self._server, self._own = options, names, server, own
        self._made: list[tuple[str, Mapping[str, Any], ToolText]] = []
        self._which = 0

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        """Call a tool of the server."""
        if name not in self._names:
            return ToolText(f"there is no tool {name!r}", error=True)
        try:
            return await self._call_once(name, arguments)
        except ServerLost as error:
            lost = error
        if self._options.deterministic:
            try:
                return await self._call_once(name, arguments)
            except ServerLost as error:
                lost = error
        return ToolText(cut(str(lost), self._options.max_bytes), error=True)

    async def _call_once(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        """Call a tool of a server that knows what was said before, if that matters to it."""
        if self._own is None or not self._options.deterministic:
            return await self._answer(name, arguments)
        which = self._server.which()
        known = self._made if which == self._which else await self._told_again(which)
        told = await self._noted(which, name, arguments)
        self._which, self._made = which, [*known, (name, arguments, told)]
        return told

    async def _told_again(self, which: int) -> list[tuple[str, Mapping[str, Any], ToolText]]:
        """Make all calls again of a server that knows nothing of them."""
        for name, arguments, told in self._made:
            if await self._noted(which, name, arguments) != told:
                raise ServerLost(_OTHERWISE)
        return self._made

    async def _noted(self, which: int, name: str, arguments: Mapping[str, Any]) -> ToolText:
        told = await self._answer(name, arguments)
        if self._server.num_made != which:
            raise ServerLost(_ENDED)
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

    async def close(self) -> None:
        """Close the connection that is this conversation's own."""
        if self._own is not None and self._server in self._own:
            self._own.remove(self._server)
            await self._server.close()


async def _schemas(client: Any) -> list[Mapping[str, Any]]:
    """Of all tools, page by page."""
    found: list[Mapping[str, Any]] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            function = {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            found.append({"type": "function", "function": function})
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
