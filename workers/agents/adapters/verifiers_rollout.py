"""One conversation with an environment of the verifiers package, 0.1.

The package runs a conversation itself and asks a client for each turn. The client here waits for
the turn that `step` brings, so everything else is the package's own: tools, stop conditions, time
limits and rubrics. The reward comes with the last turn, when the rubric has scored the whole.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from ...data.task import Message
from ...verifiers.child import as_score
from ..environment import BadCall, Reply, TurnResult
from .env_thread import FAILED

_log = logging.getLogger(__name__)


class _Turns:
    """A client of the package whose model is whoever calls `say`.

    The package calls `get_response` alone, so this is a client by its shape.
    """

    def __init__(self) -> None:
        clients: Any = import_module("verifiers.clients")  # an extra
        clients.Client.register(type(self))
        self.asked: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._said: asyncio.Queue[Reply] = asyncio.Queue()

    def say(self, reply: Reply) -> None:
        self._said.put_nowait(reply)

    async def get_response(self, prompt: list[Any], model: str, **others: Any) -> Any:
        self.asked.put_nowait(list(prompt))
        return _response(await self._said.get(), model)

    async def close(self) -> None:
        """End; nothing is held."""


class VerifiersEnvironment:
    """One conversation.

    Args:
        env: A `verifiers.Environment`; conversations share it.
        row: Of its data set.
        step_limit_s: Longest time between a turn and its answer.
    """

    def __init__(self, env: Any, row: Mapping[str, Any], step_limit_s: float) -> None:
        self._env, self._row, self._step_limit_s = env, row, step_limit_s
        self._turns = _Turns()
        self._rollout: asyncio.Task[Any] | None = None
        self._num_shown = 0

    async def reset(self, problem: int, seed: int) -> None:
        """Let the package begin. What goes wrong is told with the first turn."""
        self._rollout = asyncio.create_task(self._run())
        asked = await self._next_prompt()
        self._num_shown = len(asked or ())

    async def step(self, reply: Reply) -> TurnResult:
        """Give the turn to the package, until it asks for another or has scored the whole."""
        if self._rollout is None or self._rollout.done():
            return self._end()
        self._turns.say(reply)
        asked = await self._next_prompt()
        if asked is None:
            return self._end()
        # The prompt, the policy's own turn, and what the environment answered.
        new = asked[self._num_shown + 1 :]
        self._num_shown = len(asked)
        return TurnResult(messages=[plain_message(message) for message in new])

    async def close(self) -> None:
        """End the package's own loop if it still waits for a turn."""
        if self._rollout is None:
            return
        self._rollout.cancel()
        await asyncio.wait([self._rollout], timeout=self._step_limit_s)
        if self._rollout.done() and not self._rollout.cancelled():
            self._rollout.exception()  # looked at, or asyncio says that nobody did

    async def _run(self) -> Any:
        state = await self._env.rollout(dict(self._row), self._turns, "policy", {})
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return state

    async def _next_prompt(self) -> list[Any] | None:
        """What the package asks next; None if it does not, because it ended, failed or hangs."""
        assert self._rollout is not None
        asked = asyncio.create_task(self._turns.asked.get())
        try:
            await asyncio.wait(
                [asked, self._rollout],
                timeout=self._step_limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    def _end(self) -> TurnResult:
        rollout = self._rollout
        if rollout is None or not rollout.done() or rollout.cancelled():
            _log.warning("an environment took longer than %g s", self._step_limit_s)
            return FAILED
        error = rollout.exception() or rollout.result().get("error")
        if error is not None:
            _log.warning("an environment failed: %r", error)
            return FAILED
        state = rollout.result()
        try:
            reward = as_score(state["reward"])
        except ValueError as error:
            _log.warning("an environment failed: its reward is %s", error)
            return FAILED
        counts = {
            name: float(value)
            for name, value in (state.get("metrics") or {}).items()
            if isinstance(value, int | float)
        }
        return TurnResult(reward=reward, done=True, counts=counts)


def plain_message(message: Any) -> Message:
    """A message of the package, or one of its data sets, as a conversation here has it."""
    given: dict[str, Any] = message if isinstance(message, dict) else message.model_dump()
    found = {key: value for key, value in given.items() if value is not None}
    found["content"] = _text(found.get("content", ""))
    return found


def _text(content: str | Sequence[Any]) -> str:
    """The texts of a message; pictures and sounds are left out."""
    if isinstance(content, str):
        return content
    parts: list[Any] = [p if isinstance(p, dict) else p.model_dump() for p in content]
    return "".join(part["text"] for part in parts if part.get("type") == "text")


def _response(reply: Reply, model: str) -> Any:
    """A turn as the package has it. What could not be read as a call is left to its tools."""
    types: Any = import_module("verifiers.types")  # an extra
    calls: list[Any] = []
    for number, call in enumerate(reply.calls):
        bad = isinstance(call, BadCall)
        name = "" if bad else call.name
        arguments = call.text if bad else json.dumps(dict(call.arguments))
        made = types.ToolCall(id=f"call_{reply.turn}_{number}", name=name, arguments=arguments)
        calls.append(made)
    why = "tool_calls" if calls else "stop"
    message = types.ResponseMessage(
        content=reply.content if calls else reply.text,
        tool_calls=calls or None,
        finish_reason=why if reply.finished else "length",
        is_truncated=not reply.finished,
    )
    return types.Response(id=f"turn_{reply.turn}", created=0, model=model, message=message)
