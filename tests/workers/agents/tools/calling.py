"""Tools that tests call, one call in a conversation of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.workers.agents.tools.tool import Tool, ToolText


class Loop:
    """A tool, and the event loop in which it is called."""

    def __init__(self, options: Any) -> None:
        self.tool: Tool = options.build()
        self.runner = asyncio.Runner()
        self.is_closed = False

    def call(self, name: str, **arguments: Any) -> ToolText:
        return self.runner.run(self._call(name, arguments))

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolText:
        session = self.tool.open(0)
        try:
            return await session.call(name, arguments)
        finally:
            await session.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def close(self) -> None:
        if not self.is_closed:
            self.runner.run(self.tool.close())
            self.runner.close()
        self.is_closed = True
