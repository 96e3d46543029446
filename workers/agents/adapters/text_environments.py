"""Environments that speak, of Gymnasium or an OpenEnv server: observations and actions are texts.

A problem is a seed: the first observation after `reset(seed=...)` is the prompt, every further
observation is a message of a user, and a turn of the policy is an action. Rewards are the
environment's own. An environment that raises or takes too long ends its conversation, which has no
score, and is counted as `env_errors`.

An environment of Gymnasium is called in a thread of its own, always the same for a conversation,
because some ask for that. A thread that hangs cannot be stopped: it is left alone, ends when its
call returns, and does not keep the process from ending. Each conversation with a server is a
session of its own; one field of an observation is what the policy reads, and what it says becomes
one field of an action.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn, TypeVar

import gymnasium as gym

from ....dataflow.errors import ConfigError, one_process
from ....dataflow.options import NonNegativeInt, PositiveFloat, PositiveInt, option_class
from ...data.task import Message
from ...isolation.pool import OwnThread
from ..environment import FAILED, Environment, Reply, TurnResult
from ..tasks.generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@option_class
class SeededSpec(GeneratedSpec):
    """Seeds of an environment, and how it is conversed with."""

    num_train: PositiveInt = 100
    """Training problems, exactly: seeds whose first observations differ."""
    num_held_out: NonNegativeInt = 20
    """Problems kept for evaluation, exactly."""
    max_steps: PositiveInt = 50
    """Turns after which a conversation is over."""
    step_limit_s: PositiveFloat = 10.0
    """Longest time of one call; an environment that takes longer ends its conversation, which
    has no score."""
    correct_score: float = 1.0
    """Conversations with at least this sum of rewards count as right."""
    deterministic: bool = True
    """Whether what it does is a function of its seed and the turns alone; only its author knows."""
    characters: str = ""
    """Characters that the environment or the policy may write beyond those of the prompts, for a
    tokenizer whose alphabet is the task's."""


@dataclass(frozen=True)
class Seeded:
    """A seed that the environment is reset with, and its first observation."""

    seed: int
    prompt: str


class SeededTask(GeneratedTask[Seeded]):
    """Seeds of an environment; see `GeneratedTask`. It knows no expert."""

    def __init__(self, name: str, spec: SeededSpec) -> None:
        self.correct_score = spec.correct_score
        self.deterministic = spec.deterministic
        self.further_characters = "\n" + spec.characters
        super().__init__(name, spec)

    def make(self, number: int, rng: random.Random) -> Seeded:
        seed = rng.getrandbits(31)
        return Seeded(seed, self.first_observation(seed))

    def first_observation(self, seed: int) -> str:
        raise NotImplementedError

    def prompt_of(self, problem: Seeded) -> str:
        return problem.prompt


def _turn(spec: SeededSpec, turn: int, text: str, reward: float, over: bool) -> TurnResult:
    if not math.isfinite(reward):
        raise ValueError(f"a reward is {reward}")
    done = over or turn + 1 >= spec.max_steps
    said: Message = {"role": "user", "content": text}
    return TurnResult(
        messages=() if done else [said], reward=reward, done=done, counts={"steps": 1.0}
    )


_UNFINISHED = TurnResult(done=True, counts={"bad_replies": 1.0})


@option_class
class GymnasiumTextTaskSpec(SeededSpec):
    """An environment, and the number of its seeds to use."""

    env: str
    """Its registered name, `Name-v0`, or `module:name`: a function or class that makes it, or the
    name of one that the module registers."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environment."""
    unfinished_score: float = 0.0
    """The score of a response that ends before the environment does."""

    def build(self) -> GymnasiumTextTask:
        return GymnasiumTextTask(self)

    @one_process()
    def make(self) -> gym.Env[Any, Any]:
        try:
            module, _, name = self.env.rpartition(":")
            found = getattr(import_module(module), name, None) if module else None
            if found is None:
                return gym.make(self.env, **self.options)
            return found(**self.options)
        except Exception as error:  # importing and making it runs whatever its author wrote
            raise ConfigError(
                f"'task.env': '{self.env}' cannot be made: {error!r}\n"
                "    give the name of a registered environment, or module:factory"
            ) from error


class GymnasiumTextTask(SeededTask):
    def __init__(self, spec: GymnasiumTextTaskSpec) -> None:
        self.spec, self.unfinished_score = spec, spec.unfinished_score
        self._thread = OwnThread(f"prompts of {spec.env}")
        env: gym.Env[Any, Any] | None = None
        try:
            env = self._env = self._limited(self._thread.submit(spec.make))
            super().__init__(f"gymnasium_text[{spec.env}]", spec)
        finally:
            if env is not None:
                self._thread.submit(env.close)
            self._thread.end()

    def first_observation(self, seed: int) -> str:
        return self._limited(self._thread.submit(_first_observation, self._env, seed))

    def begin(self, index: int) -> PlainEnvironment:
        return TextEpisode(self.spec, self.problem(index).seed)

    def environment(self, problem: int) -> Environment:
        return ThreadedEnvironment(self.begin(problem), self.spec.step_limit_s)

    def _limited(self, future: Future[T]) -> T:
        limit = self.spec.step_limit_s
        try:
            return future.result(limit)
        except ConfigError:
            raise
        except Exception as error:  # an environment is a program: it may fail in any way
            why = f"not within {limit:g} s" if isinstance(error, TimeoutError) else repr(error)
            raise ConfigError(
                f"'task.env': '{self.spec.env}' gave no first observation: {why}\n"
                "    it must return a text from reset(seed=...); task.step_limit_s is the time it "
                "may take"
            ) from error


class TextEpisode(PlainEnvironment):
    def __init__(self, spec: GymnasiumTextTaskSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._env: gym.Env[Any, Any] | None = None

    def reset(self, problem: int, seed: int) -> None:
        self._env = self._spec.make()
        _first_observation(self._env, self._seed)

    def step(self, reply: Reply) -> TurnResult:
        if self._env is None:
            raise RuntimeError("step() before reset()")
        if not reply.finished:
            return _UNFINISHED
        observation, reward, over, cut_off, _ = self._env.step(reply.text)
        over = bool(over or cut_off)
        return _turn(self._spec, reply.turn, _text(observation), float(reward), over)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _first_observation(env: gym.Env[Any, Any], seed: int) -> str:
    return _text(env.reset(seed=seed)[0])


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"an observation is a {type(observation).__name__}, and not a text")
    return observation


class ThreadedEnvironment:
    """An `Environment` that is called in a thread, with a limit on each call."""

    def __init__(self, inner: PlainEnvironment, timeout_s: float) -> None:
        self._inner, self._timeout_s = inner, timeout_s
        self._thread: OwnThread | None = None
        self._failed = False

    async def reset(self, problem: int, seed: int) -> None:
        """Begin; an error is reported with the first turn."""
        self._thread = OwnThread(f"environment of problem {problem}")
        try:
            await self._within(self._thread.submit(self._inner.reset, problem, seed))
        except Exception as error:  # an environment is a program: it may fail in any way
            self._fail("reset", error)

    async def step(self, reply: Reply) -> TurnResult:
        """Answer a turn, or end the conversation because the environment went wrong."""
        if self._failed or self._thread is None:
            return FAILED
        try:
            return await self._within(self._thread.submit(self._inner.step, reply))
        except Exception as error:  # an environment is a program: it may fail in any way
            self._fail("step", error)
            return FAILED

    async def close(self) -> None:
        """Close the environment; one that hangs is closed when its call returns."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        closed = thread.submit(self._inner.close)
        thread.end()
        if self._failed:
            return
        try:
            await self._within(closed)
        except Exception as error:  # as above; the conversation is over
            self._fail("close", error)

    async def _within(self, future: Future[T]) -> T:
        return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)

    def _fail(self, what: str, error: Exception) -> None:
        self._failed = True
        late = isinstance(error, TimeoutError)
        why = f"took longer than {self._timeout_s:g} s" if late else repr(error)
        _LOG.warning("an environment failed in %s: %s", what, why)


@option_class
class OpenEnvTaskSpec(SeededSpec):
    """A server, and how texts become actions."""

    url: str
    """Address of the server: `http://localhost:8000`."""
    observation_field: str = "text"
    """The field of an observation that the policy reads; its value is a text."""
    action_field: str = "text"
    """The field of an action that holds what the policy said."""
    action: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of every action."""
    reset_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of every reset."""
    step_limit_s: PositiveFloat = 30.0
    """Longest time of one call of the server."""
    deterministic: bool = False
    """Whether what it does is a function of its seed and the turns alone; only its author knows."""

    def build(self) -> OpenEnvTask:
        return OpenEnvTask(self)


class OpenEnvTask(SeededTask):
    def __init__(self, spec: OpenEnvTaskSpec) -> None:
        self.spec = spec
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

    def first_observation(self, seed: int) -> str:
        return self._now(self._session.reset(seed))

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
            return _UNFINISHED
        try:
            text, reward, over = await self._session.step(reply.text)
            return _turn(self._spec, reply.turn, text, reward, over)
        except Exception as error:  # a server may do anything
            self._fail("step", error)
            return FAILED

    async def close(self) -> None:
        await self._session.close()

    def _fail(self, what: str, error: Exception) -> None:
        self._failed = True
        _LOG.warning("an environment at %s failed in %s: %r", self._spec.url, what, error)


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
        return self._text(result), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        try:
            await asyncio.wait_for(client.close(), self._spec.step_limit_s)
        except Exception as error:  # the conversation is over
            _LOG.warning("a session with %s was not closed: %r", self._spec.url, error)

    def _text(self, result: Any) -> str:
        name = self._spec.observation_field
        text = result.observation.get(name)
        if not isinstance(text, str):
            fields = ", ".join(sorted(result.observation))
            raise TypeError(f"field '{name}' of an observation is no text; it has: {fields}")
        return text
