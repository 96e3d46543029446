"""What generated conversation tasks share: problems by number, prompts, and a scripted expert.

A problem is made from a generator seeded with the task's name, its seed and the problem's number
alone, so it is the same in every process. Problems are taken in order and kept if their prompt is
new; the first `num_held_out` of them are held out, so the held-out set does not change with
`num_train`.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ....dataflow.errors import ConfigError
from ....dataflow.option_checks import check_range
from ...data.task import Message
from ..environment import Environment, Reply, TurnResult
from .conversation_task import ConversationTask

_MAX_IDLE_SAMPLES = 2000
"""Problems in a row without a new prompt after which a task counts as exhausted."""

P = TypeVar("P")


class PlainEnvironment(Protocol):
    """An `Environment` without coroutines."""

    def reset(self, problem: int, seed: int) -> None:
        """Begin."""

    def step(self, reply: Reply) -> TurnResult:
        """Answer a turn."""
        ...

    def close(self) -> None:
        """End."""


@dataclass(frozen=True, kw_only=True)
class GeneratedSpec:
    """How many problems to make, and from which seed."""

    num_train: int = 1000
    """Training problems, exactly."""
    num_held_out: int = 200
    """Problems kept for evaluation, exactly; their prompts are not in training."""
    seed: int = 0
    """Seed of the problems; the run's seed does not change them."""

    def __post_init__(self) -> None:
        check_range(self, "num_train", at_least=1)
        check_range(self, "num_held_out", at_least=0)


@dataclass(frozen=True)
class Played:
    """A conversation between scripted turns and an environment.

    Attributes:
        messages: What was said after the prompt, in order.
        reward: The sum over the turns.
        done: Whether the environment ended it.
        counts: What it counted, summed.
    """

    messages: list[Message]
    reward: float
    done: bool
    counts: Mapping[str, float]


def play(environment: PlainEnvironment, index: int, turns: Sequence[str]) -> Played:
    """Say these turns to an environment until it ends or nothing is left to say.

    Args:
        environment: A new one; it is closed.
        index: The problem's.
        turns: What the policy says.

    Raises:
        Exception: What the environment raises.
    """
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


@dataclass(frozen=True)
class _Numbered(Generic[P]):
    number: int
    prompt: str
    problem: P


class GeneratedTask(ConversationTask, Generic[P]):
    """Problems of a generator, answered in conversation; see `ConversationTask`.

    Args:
        task_id: Names the task; part of the seed of its problems.
        spec: How many problems, and their seed.

    Attributes:
        tells_calls: See `TellsCalls`.
        unfinished_score: The score of a conversation that its environment did not end.

    Raises:
        ConfigError: If there are fewer different prompts than are asked for.
    """

    tells_calls = True
    unfinished_score: float = 0.0

    def __init__(self, task_id: str, spec: GeneratedSpec) -> None:
        self.task_id, self._seed = task_id, spec.seed
        found = self._sample(spec.num_train + spec.num_held_out)
        held_out, train = found[: spec.num_held_out], found[spec.num_held_out :]
        self._problems = train + held_out
        super().__init__(task_id, [one.prompt for one in self._problems], spec.num_held_out)

    @abstractmethod
    def make(self, number: int, rng: random.Random) -> P:
        """The problem of this number; `rng` is all the randomness there is."""

    @abstractmethod
    def prompt_of(self, problem: P) -> str:
        """What the policy reads first."""

    @abstractmethod
    def begin(self, index: int) -> PlainEnvironment:
        """The other side of one conversation about a problem."""

    @property
    def further_characters(self) -> str:
        """See `HasTemplate`."""
        return "\n"

    def turns(self, problem: P, rng: random.Random) -> list[str] | None:
        """What the expert says, turn by turn; None if there is no expert."""
        return None

    def schemas(self) -> Sequence[Mapping[str, Any]] | None:
        """JSON schemas of what the policy may call, the same for every problem; or None."""
        return None

    def environment(self, problem: int) -> Environment:
        """A new environment for one conversation about a problem."""
        return self.begin(problem)

    def problem(self, index: int) -> P:
        """The problem itself."""
        return self._problems[index].problem

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """See `schemas`."""
        return self.schemas()

    def answer_text(self, index: int) -> str | None:
        """The expert's turns, one a line, as `score` reads them; None if there is no expert."""
        turns = self._expert(index)
        return None if turns is None else "\n".join(turns)

    def replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        """The expert's conversation; None if there is no expert."""
        turns = self._expert(index)
        return None if turns is None else [play(self.begin(index), index, turns).messages]

    def score(self, index: int, response: str) -> float:
        """The sum of the rewards of a conversation whose turns are the response's lines."""
        played = play(self.begin(index), index, response.split("\n"))
        return played.reward if played.done else self.unfinished_score

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """The problem's number, and the response."""
        return (self._problems[index].number, response)

    def where(self, index: int) -> str:
        """The task and the problem's number."""
        return f"{self.task_id}[{self._problems[index].number}]"

    def _expert(self, index: int) -> list[str] | None:
        numbered = self._problems[index]
        return self.turns(numbered.problem, self._rng(f"expert/{numbered.number}"))

    def _rng(self, what: str) -> random.Random:
        return random.Random(f"{self.task_id}/{self._seed}/{what}")

    def _sample(self, wanted: int) -> list[_Numbered[P]]:
        found: dict[str, _Numbered[P]] = {}
        number = idle = 0
        while len(found) < wanted:
            problem = self.make(number, self._rng(str(number)))
            prompt = self.prompt_of(problem)
            idle = idle + 1 if prompt in found else 0
            found.setdefault(prompt, _Numbered(number, prompt, problem))
            number += 1
            if idle == _MAX_IDLE_SAMPLES:
                raise ConfigError(
                    f"task '{self.task_id}' has only about {len(found)} different prompts, and "
                    f"{wanted} are asked for\n"
                    "    lower task.num_train or task.num_held_out, or make the task larger"
                )
        return list(found.values())
