"""An environment of Gymnasium that speaks: its observations and its actions are texts.

A problem is a seed: the first observation after `reset(seed=...)` is the prompt, every further
observation is a message of a user, and a turn of the policy is an action. Rewards are the
environment's own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

import gymnasium as gym

from ....dataflow.errors import ConfigError, one_process
from ....dataflow.options import NonNegativeInt, PositiveFloat, PositiveInt, option_class
from ...data.task import Message
from ..environment import Environment, Reply, TurnResult
from ..tasks.generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment
from .env_thread import OwnThread, ThreadedEnvironment

T = TypeVar("T")


class TextEnvironment(Protocol):
    """The methods that are used of a `gymnasium.Env`."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """First observation, and further information."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Observation, reward, whether it is over, whether it was cut off, information."""
        ...

    def close(self) -> None:
        """End."""


@option_class
class GymnasiumTextTaskSpec(GeneratedSpec):
    """An environment, and the number of its seeds to use."""

    num_train: PositiveInt = 100
    """Training problems, exactly: seeds whose first observations differ."""
    num_held_out: NonNegativeInt = 20
    """Problems kept for evaluation, exactly."""
    env: str
    """Its registered name, `Name-v0`, or `module:name`: a function or class that makes it, or the
    name of one that the module registers."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environment."""
    max_steps: PositiveInt = 50
    """Turns after which a conversation is over."""
    step_limit_s: PositiveFloat = 10.0
    """Longest time of one call; an environment that takes longer ends its conversation, which
    has no score."""
    correct_score: float = 1.0
    """Conversations with at least this sum of rewards count as right."""
    unfinished_score: float = 0.0
    """The score of a response that ends before the environment does."""
    deterministic: bool = True
    """Whether what it does is a function of its seed and the turns alone; only its author knows."""
    characters: str = ""
    """Characters that the environment or the policy may write beyond those of the prompts, for a
    tokenizer whose alphabet is the task's."""

    def build(self) -> GymnasiumTextTask:
        return GymnasiumTextTask(self)

    @one_process()
    def make(self) -> TextEnvironment:
        try:
            module, _, name = self.env.rpartition(":")
            found = getattr(import_module(module), name, None) if module else None
            if found is None:
                return cast(TextEnvironment, gym.make(self.env, **self.options))
            return found(**self.options)
        except Exception as error:  # importing and making it runs whatever its author wrote
            raise ConfigError(
                f"'task.env': '{self.env}' cannot be made: {error!r}\n"
                "    give the name of a registered environment, or module:factory"
            ) from error


@dataclass(frozen=True)
class Seeded:
    """A seed that the environment is reset with, and its first observation."""

    seed: int
    prompt: str


class GymnasiumTextTask(GeneratedTask[Seeded]):
    """Seeds of an environment; see `GeneratedTask`. It knows no expert."""

    def __init__(self, spec: GymnasiumTextTaskSpec) -> None:
        self.spec = spec
        self.correct_score, self.unfinished_score = spec.correct_score, spec.unfinished_score
        self.deterministic = spec.deterministic
        self.further_characters = "\n" + spec.characters
        self._thread = OwnThread(f"prompts of {spec.env}")
        env: TextEnvironment | None = None
        try:
            env = self._env = self._limited(self._thread.submit(spec.make))
            super().__init__(f"gymnasium_text[{spec.env}]", spec)
        finally:
            if env is not None:
                self._thread.submit(env.close)
            self._thread.end()

    def make(self, number: int, rng: random.Random) -> Seeded:
        seed = rng.getrandbits(31)
        prompt = self._limited(self._thread.submit(_first_observation, self._env, seed))
        return Seeded(seed, prompt)

    def prompt_of(self, problem: Seeded) -> str:
        return problem.prompt

    def begin(self, index: int) -> PlainEnvironment:
        return TextEpisode(self.spec, self.problem(index).seed)

    def environment(self, problem: int) -> Environment:
        return ThreadedEnvironment(lambda: self.begin(problem), self.spec.step_limit_s)

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
    """One episode as the other side of a conversation."""

    def __init__(self, spec: GymnasiumTextTaskSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._env: TextEnvironment | None = None

    def reset(self, problem: int, seed: int) -> None:
        self._env = self._spec.make()
        _first_observation(self._env, self._seed)

    def step(self, reply: Reply) -> TurnResult:
        if self._env is None:
            raise RuntimeError("step() before reset()")
        if not reply.finished:
            return TurnResult(done=True, counts={"bad_replies": 1.0})
        observation, reward, over, cut_off, _ = self._env.step(reply.text)
        if not math.isfinite(reward):
            raise ValueError(f"a reward is {reward}")
        done = bool(over or cut_off) or reply.turn + 1 >= self._spec.max_steps
        said: Message = {"role": "user", "content": _text(observation)}
        return TurnResult(
            messages=() if done else [said], reward=float(reward), done=done, counts={"steps": 1.0}
        )

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _first_observation(env: TextEnvironment, seed: int) -> str:
    return _text(env.reset(seed=seed)[0])


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"an observation is a {type(observation).__name__}, and not a text")
    return observation
