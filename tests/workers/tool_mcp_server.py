"""An MCP server made with the package, over standard input and output."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("penstock-tests")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two integers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("no such thing")


@server.tool()
def long() -> str:
    """Return a long text."""
    return "x" * 1_000_000


@server.tool()
def record() -> dict[str, int]:
    """Return what is no text."""
    return {"a": 1}


if __name__ == "__main__":
    server.run("stdio")
