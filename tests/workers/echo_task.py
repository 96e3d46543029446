"""A task to talk about: the other side answers after a while, or behaves badly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.workers.agents.environment import Reply, TurnResult
from penstock.workers.agents.tasks.generated_task import GeneratedSpec, GeneratedTask

WAIT: list[Callable[[int, int], float]] = [lambda problem, turn: 0.0]
"""Seconds that the answer to a turn takes; tests put others here."""


@dataclass(frozen=True, kw_only=True)
class EchoSpec(GeneratedSpec):
    """See `EchoTask`."""

    num_train: int = 40
    num_held_out: int = 4
    bad: str = ""
    """What the environments of odd problems do badly."""

    def build(self) -> EchoTask:
        return EchoTask(self)


class EchoTask(GeneratedTask[str]):
    """Prompts of letters; the other side says again what it heard."""

    further_characters = "abcdefgh.123456\n"

    def __init__(self, spec: EchoSpec) -> None:
        self._bad = spec.bad
        super().__init__("echo", spec)

    def make(self, number: int, rng: random.Random) -> str:
        return "".join(rng.choice("abcdefgh") for _ in range(3 + number % 5))

    def prompt_of(self, problem: str) -> str:
        return problem

    def begin(self, index: int) -> Any:
        bad = self._bad if index % 2 else ""
        if bad == "cannot be made":
            raise ValueError("no environment today")
        return Echo(bad)


def earned_by(turn: int, text: str) -> float:
    """More in later turns, and for an even number of characters."""
    return 0.25 * turn + 0.5 * (len(text) % 2 == 0)


class Echo:
    def __init__(self, bad: str) -> None:
        self._bad = bad
        self._problem = 0

    async def reset(self, problem: int, seed: int) -> None:
        self._problem, self._seed = problem, seed
        if self._bad == "fails on reset":
            raise OSError("no route to the world")
        if self._bad == "hangs on reset":
            await asyncio.sleep(1e6)

    async def step(self, reply: Reply) -> Any:
        await asyncio.sleep(WAIT[-1](self._problem, reply.turn))
        match self._bad:
            case "hangs":
                await asyncio.sleep(1e6)
            case "raises":
                raise RuntimeError("boom")
            case "exits":
                raise SystemExit(3)
            case "is cancelled":
                raise asyncio.CancelledError
            case "answers nothing":
                return None
            case "rewards with nan":
                return TurnResult(reward=float("nan"))
            case "rewards with a text":
                return TurnResult(reward="much")  # pyright: ignore[reportArgumentType]
            case "answers no messages":
                return TurnResult(messages=[3])  # pyright: ignore[reportArgumentType]
            case "shows no text":
                return TurnResult(messages=[{"role": "user", "content": 3}])
            case "shows too much":
                return TurnResult(messages=[{"role": "user", "content": "a" * 10_000}])
            case "counts badly":
                return TurnResult(counts={"x": "y"}, done=True)  # pyright: ignore[reportArgumentType]
            case _:
                pass
        said = [{"role": "user", "content": f"{reply.text[:1:-1][:4]}.{1 + self._seed % 6}"}]
        earned = earned_by(reply.turn, reply.text)
        return TurnResult(said, reward=earned, counts={"heard": len(reply.text)})

    async def close(self) -> None:
        if self._bad == "hangs on close":
            await asyncio.sleep(1e6)
        if self._bad == "fails on close":
            raise OSError("the door is stuck")
