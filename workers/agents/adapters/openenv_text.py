"""Environments that an OpenEnv server holds, as tasks that are conversed with.

A conversation is a session of its own with the server at `task.url`. A problem is a seed: the
observation after `reset(seed=...)` is the prompt. One field of an observation is what the policy
reads, and what it says becomes one field of an action. A server that fails or takes too long ends
the conversation, which has no score, and is counted as `env_errors`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Coroutine, Mapping
from dataclasses import field
from importlib import import_module
from typing import Any, NoReturn

from ....dataflow.errors import ConfigError
from ....dataflow.options import NonNegativeInt, PositiveFloat, PositiveInt, option_class
from ...data.task import Message
from ..environment import Environment, Reply, TurnResult
from ..tasks.generated_task import GeneratedSpec, GeneratedTask
from .env_thread import FAILED, OwnThread
from .gymnasium_text import Seeded

_log = logging.getLogger(__name__)


@option_class
class OpenEnvTaskSpec(GeneratedSpec):
    """A server, and how texts become actions."""

    num_train: PositiveInt = 100
    """Training problems, exactly: seeds whose first observations differ."""
    num_held_out: NonNegativeInt = 20
    """Problems kept for evaluation, exactly."""
    url: str
    """Where the server listens: `http://localhost:8000`."""
    observation_field: str = "text"
    """The field of an observation that the policy reads; its value is a text."""
    action_field: str = "text"
    """The field of an action that holds what the policy said."""
    action: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of every action."""
    reset_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of every reset."""
    max_steps: PositiveInt = 50
    """Turns after which a conversation is over."""
    step_limit_s: PositiveFloat = 30.0
    """Longest time of one call of the server."""
    correct_score: float = 1.0
    """Conversations with at least this sum of rewards count as right."""
    deterministic: bool = False
    """Whether what it does is a function of its seed and the turns alone; only its author knows."""
    characters: str = ""
    """Characters that the environment or the policy may write beyond those of the prompts, for a
    tokenizer whose alphabet is the task's."""

    def build(self) -> OpenEnvTask:
        return OpenEnvTask(self)


class OpenEnvTask(GeneratedTask[Seeded]):
    """Seeds of a server's environment; see `GeneratedTask`. It knows no expert."""

    def __init__(self, spec: OpenEnvTaskSpec) -> None:
        self.spec = spec
        self.correct_score = spec.correct_score
        self.deterministic = spec.deterministic
        self.further_characters = "\n" + spec.characters
        self._session = _Session(spec)
        # A thread: a loop may be running in this one.
        self._thread = OwnThread(f"prompts of {spec.url}")
        self._runner = asyncio.Runner()
        try:
            super().__init__(f"openenv[{spec.url}]", spec)
        finally:
            self._thread.submit(self._runner.run, self._session.close()).result()
            self._thread.submit(self._runner.close).result()
            self._thread.end()

    def make(self, number: int, rng: random.Random) -> Seeded:
        seed = rng.getrandbits(31)
        return Seeded(seed, self._now(self._session.reset(seed)))

    def prompt_of(self, problem: Seeded) -> str:
        return problem.prompt

    def begin(self, index: int) -> NoReturn:
        raise ConfigError(
            f"task '{self.task_id}' scores whole conversations only\n"
            "    train it with an algorithm that converses"
        )

    def environment(self, problem: int) -> Environment:
        return OpenEnvEnvironment(self.spec, self.problem(problem).seed)

    def _now(self, call: Coroutine[Any, Any, str]) -> str:
        try:
            return self._thread.submit(self._runner.run, call).result()
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"'task.kind': openenv needs the module '{error.name}'\n"
                "    pip install penstock-rl[openenv]"
            ) from error
        except Exception as error:  # a server may do anything
            limit = self.spec.step_limit_s
            why = f"not within {limit:g} s" if isinstance(error, TimeoutError) else str(error)
            raise ConfigError(
                f"'task.url': '{self.spec.url}' gave no first observation: {why}\n"
                "    start an OpenEnv server there, and give task.observation_field and "
                "task.action_field as it has them"
            ) from error


class OpenEnvEnvironment:
    """One conversation."""

    def __init__(self, spec: OpenEnvTaskSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._session = _Session(spec)
        self._failed = False

    async def reset(self, problem: int, seed: int) -> None:
        try:
            await self._session.reset(self._seed)
        except Exception as error:  # a server may do anything
            self._fail("reset", error)

    async def step(self, reply: Reply) -> TurnResult:
        if self._failed:
            return FAILED
        if not reply.finished:
            return TurnResult(done=True, counts={"bad_replies": 1.0})
        try:
            text, reward, over = await self._session.step(reply.text)
        except Exception as error:  # a server may do anything
            self._fail("step", error)
            return FAILED
        done = over or reply.turn + 1 >= self._spec.max_steps
        said: Message = {"role": "user", "content": text}
        return TurnResult(
            messages=() if done else [said], reward=reward, done=done, counts={"steps": 1.0}
        )

    async def close(self) -> None:
        await self._session.close()

    def _fail(self, what: str, error: Exception) -> None:
        self._failed = True
        _log.warning("an environment at %s failed in %s: %r", self._spec.url, what, error)


class _Session:
    """A client of the package, with texts instead of objects and a limit on every call."""

    def __init__(self, spec: OpenEnvTaskSpec) -> None:
        self._spec = spec
        self._client: Any = None

    async def reset(self, seed: int) -> str:
        if self._client is None:
            core: Any = import_module("openenv.core")  # an extra
            limit = self._spec.step_limit_s
            self._client = core.GenericEnvClient(
                base_url=self._spec.url, connect_timeout_s=limit, message_timeout_s=limit
            )
            await self._client.connect()
        return self._text(await self._client.reset(seed=seed, **self._spec.reset_options))

    async def step(self, said: str) -> tuple[str, float, bool]:
        action = {**self._spec.action, self._spec.action_field: said}
        result = await self._client.step(action)
        reward = float(result.reward or 0.0)
        if not math.isfinite(reward):
            raise ValueError(f"a reward is {reward}")
        return self._text(result), reward, bool(result.done)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            await asyncio.wait_for(client.close(), self._spec.step_limit_s)
        except Exception as error:  # the conversation is over
            _log.warning("a session with %s was not closed: %r", self._spec.url, error)

    def _text(self, result: Any) -> str:
        name = self._spec.observation_field
        text = result.observation.get(name)
        if not isinstance(text, str):
            fields = ", ".join(sorted(result.observation))
            raise TypeError(f"field '{name}' of an observation is no text; it has: {fields}")
        return text
