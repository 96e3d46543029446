"""The base of generated conversation tasks: problems by number, prompts, and a scripted expert.

A problem is made from a generator seeded with the task's name, its seed and the problem's number
alone, so it is the same in every process. Problems are taken in order and kept if their prompt is
new; the first `num_held_out` of them are held out, so the held-out set does not change with
`num_train`.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from typing_extensions import override

from ....dataflow.errors import ConfigError
from ....dataflow.options import NonNegativeInt, PositiveInt, option_class
from ...data.task import Message, Task
from ..environment import Environment, Reply, TurnResult

_MAX_IDLE_SAMPLES = 2000
"""Problems in a row without a new prompt after which a task counts as exhausted."""

P = TypeVar("P")


class PlainEnvironment(ABC):
    """An `Environment` without coroutines."""

    def reset(self, problem: int, seed: int) -> None:  # noqa: B027 - most have nothing to begin
        """Begin."""

    @abstractmethod
    def step(self, reply: Reply) -> TurnResult:
        """Answer a turn."""

    def close(self) -> None:  # noqa: B027 - and hold nothing
        """End."""


def check_template(template: str, place: str, what: str) -> None:
    """Require a place in a task's template of prompts for what differs from prompt to prompt."""
    if place not in template:
        raise ConfigError(
            f"'task.prompt_template' is {template!r}, which has no place for the {what}\n"
            f"    write {place} where {'they stand' if what[-1] == 's' else 'it stands'}"
        )


@option_class
class GeneratedSpec:
    """Number and seed of problems."""

    num_train: PositiveInt = 1000
    """Training problems, exactly."""
    num_held_out: NonNegativeInt = 200
    """Problems kept for evaluation, exactly; their prompts are not in training."""
    seed: int = 0
    """Seed of the problems; the run's seed does not change them."""


@dataclass(frozen=True)
class Played:
    """A conversation between scripted turns and an environment; reward and counts are sums."""

    messages: list[Message]
    reward: float
    done: bool
    counts: Mapping[str, float]


def play(environment: PlainEnvironment, index: int, turns: Sequence[str]) -> Played:
    """Say these turns to an environment until it ends or nothing is left to say."""
    said: list[Message] = []
    counts: dict[str, float] = {}
    reward, done = 0.0, False
    try:
        environment.reset(index, 0)
        for number, text in enumerate(turns):
            result = environment.step(Reply(number, text, text))
            said += [{"role": "assistant", "content": text}, *result.messages]
            reward += math.nan if result.reward is None else result.reward
            for name, count in result.counts.items():
                counts[name] = counts.get(name, 0.0) + count
            done = result.done
            if done:
                break
    finally:
        environment.close()
    return Played(said, reward, done, counts)


class GeneratedTask(Task, ABC, Generic[P]):
    """Problems of a generator, answered in conversation.

    Attributes:
        unfinished_score: The score of a conversation that its environment did not end.
    """

    tells_calls = True
    further_characters: str | None = "\n"
    unfinished_score: float = 0.0

    def __init__(self, task_id: str, spec: GeneratedSpec) -> None:
        self.task_id, self._seed = task_id, spec.seed
        found = list(self._sample(spec.num_train + spec.num_held_out).items())
        ordered = found[spec.num_held_out :] + found[: spec.num_held_out]
        self._problems = [numbered for _, numbered in ordered]
        super().__init__(task_id, [prompt for prompt, _ in ordered], spec.num_held_out)

    @abstractmethod
    def make(self, number: int, rng: random.Random) -> P:
        """Make the problem of this number; `rng` is all the randomness there is."""

    @abstractmethod
    def prompt_of(self, problem: P) -> str:
        """Return the prompt."""

    @abstractmethod
    def begin(self, index: int) -> PlainEnvironment:
        """Return the other side of one conversation about a problem."""

    def turns(self, problem: P, rng: random.Random) -> list[str] | None:
        """Return the expert's turns; None if there is no expert."""
        return None

    def schemas(self) -> Sequence[Mapping[str, Any]] | None:
        """JSON schemas of what the policy may call, the same for every problem; or None."""
        return None

    @override
    def environment(self, problem: int) -> Environment:
        return self.begin(problem)

    def problem(self, index: int) -> P:
        return self._problems[index][1]

    @override
    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        return self.schemas()

    @override
    def answer_text(self, index: int) -> str | None:
        """The expert's turns, one a line, as `score` reads them; None if there is no expert."""
        turns = self._expert(index)
        return None if turns is None else "\n".join(turns)

    @override
    def replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        turns = self._expert(index)
        return None if turns is None else [play(self.begin(index), index, turns).messages]

    @override
    def score(self, index: int, response: str) -> float:
        played = play(self.begin(index), index, response.split("\n"))
        return played.reward if played.done else self.unfinished_score

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        return (self._problems[index][0], response)

    @override
    def where(self, index: int) -> str:
        return f"{self.task_id}[{self._problems[index][0]}]"

    def _expert(self, index: int) -> list[str] | None:
        number, problem = self._problems[index]
        return self.turns(problem, self._rng(f"expert/{number}"))

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self.task_id}/{self._seed}/{what}")

    def _sample(self, wanted: int) -> dict[str, tuple[int, P]]:
        """Return number and problem of so many different prompts."""
        found: dict[str, tuple[int, P]] = {}
        number = idle = 0
        while len(found) < wanted:
            problem = self.make(number, self._rng(str(number)))
            prompt = self.prompt_of(problem)
            idle = idle + 1 if prompt in found else 0
            found.setdefault(prompt, (number, problem))
            number += 1
            if idle == _MAX_IDLE_SAMPLES:
                raise ConfigError(
                    f"task '{self.task_id}' has only about {len(found)} different prompts, and "
                    f"{wanted} are asked for\n"
                    "    lower task.num_train or task.num_held_out, or make the task larger"
                )
        return found
