"""Who speaks: the turns that conversations ask for, sampled as long as any conversation goes on."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from ...algorithms.roles.agents import Turn, TurnRequest, Turns


class Floor:
    """Gives conversations their turns to speak.

    Args:
        turns: Samples them.

    Attributes:
        waiting_s: Seconds in which nothing was sampled, as all waited for their other sides.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.waiting_s = 0.0
        self._speaking: dict[int, asyncio.Future[Turn]] = {}
        self._idle: set[int] = set()
        self._asked = asyncio.Event()

    async def speak(self, request: TurnRequest) -> Turn:
        """Have a turn sampled."""
        said = self._speaking[request.row] = asyncio.get_running_loop().create_future()
        self._idle.discard(request.row)
        self._turns.ask(request)
        self._asked.set()
        return await said

    def release(self, row: int) -> None:
        """Forget a row that is over; nothing of it is open."""
        self._idle.discard(row)
        self._turns.release(row)

    async def serve(self, running: set[asyncio.Task[Any]], *, frees: bool = False) -> None:
        """Sample until all conversations have ended; whatever goes wrong, none is left.

        Args:
            running: The conversations.
            frees: Whether a row that is asked for may need the place of one that waits: a
                conversation may have several, of which one waits for another.

        Raises:
            Exception: What is at fault here, and not on the other side.
        """
        try:
            await self._sample(running, frees=frees)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for task in running:
            task.result()

    async def _sample(self, running: set[asyncio.Task[Any]], *, frees: bool) -> None:
        while open_ := {task for task in running if not task.done()}:
            if frees and self._speaking and not self._turns.num_open:
                for row in sorted(self._idle):
                    self.release(row)
            if self._turns.num_open:
                for turn in self._turns.step():
                    self._idle.add(turn.row)
                    self._speaking.pop(turn.row).set_result(turn)
                await asyncio.sleep(0)  # whoever waits goes on as far as it can
                continue
            began = time.perf_counter()
            self._asked.clear()
            asked = asyncio.create_task(self._asked.wait())
            await asyncio.wait({*open_, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            self.waiting_s += time.perf_counter() - began
