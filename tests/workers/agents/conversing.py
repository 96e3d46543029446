"""Conversations with environments, as tests hold them."""

from __future__ import annotations

import asyncio
from inspect import isawaitable
from typing import Any

from penstock.workers.agents.environment import Environment, Reply, TurnResult
from penstock.workers.data.task import Message


async def _results(environment: Any, replies: tuple[Reply | str, ...]) -> list[TurnResult]:
    begun = environment.reset(0, 7)
    if isawaitable(begun):
        await begun
    try:
        return [
            await environment.step(Reply(turn, said, said) if isinstance(said, str) else said)
            for turn, said in enumerate(replies)
        ]
    finally:
        await environment.close()


def converse(environment: Environment, *replies: Reply | str) -> list[TurnResult]:
    return asyncio.run(_results(environment, replies))


def held(task: Any, index: int, *replies: Reply | str) -> tuple[list[Message], TurnResult]:
    """A conversation with the task's real tool: what it said, and its last result."""

    async def hold() -> list[TurnResult]:
        results = await _results(task.environment(index), replies)
        await task.close_environments()
        return results

    results = asyncio.run(hold())
    return [message for result in results for message in result.messages], results[-1]
