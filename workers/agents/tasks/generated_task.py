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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from typing_extensions import override

from ....dataflow.errors import ConfigError
from ....dataflow.options import Fraction, NonNegativeInt, PositiveInt, option_class
from ...data.task import Message, Task
from ...models.tokenizer import PRINTABLE
from ..environment import Environment, Reply, ToolCall, TurnResult
from ..tools.tool import Tool, ToolEnvironment, ToolLimits

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


@dataclass(frozen=True)
class _Numbered(Generic[P]):
    number: int
    prompt: str
    problem: P


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
        found = self._sample(spec.num_train + spec.num_held_out)
        held_out, train = found[: spec.num_held_out], found[spec.num_held_out :]
        self._problems = train + held_out
        super().__init__(task_id, [one.prompt for one in self._problems], spec.num_held_out)

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
        return self._problems[index].problem

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
        return (self._problems[index].number, response)

    @override
    def where(self, index: int) -> str:
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


ReadCall = Callable[[str], ToolCall | None]
"""From a turn to the call that it is, or None."""


@option_class
class ToolQuestionsSpec(GeneratedSpec):
    """Number of questions, and how experts and policies answer them."""

    prompt_template: str = "{question}"
    """The prompt, with `{question}` where the question stands: a model that knows language needs to
    be told what to do."""
    expert_calls: Fraction = 1.0
    """Share of the demonstrations that call the tool; in the others the expert knows the answer and
    says it at once."""
    max_turns: PositiveInt = 8
    """Turns after which a conversation without an answer is over, and worth 0."""


def check_template(spec: ToolQuestionsSpec) -> None:
    if "{question}" not in spec.prompt_template:
        raise ConfigError(
            f"'task.prompt_template' is {spec.prompt_template!r}, which has no place for the "
            "question\n    write {question} where it stands"
        )


class ToolQuestions(GeneratedTask[P]):
    """Questions of a generator, answered with a tool at hand."""

    def __init__(self, task_id: str, spec: ToolQuestionsSpec, tool: Tool) -> None:
        self._options, self._tool = spec, tool
        self.deterministic = tool.deterministic
        self.further_characters = PRINTABLE
        super().__init__(task_id, spec)

    @abstractmethod
    def question(self, problem: P) -> str:
        """Return the question."""

    @abstractmethod
    def read(self, text: str) -> ToolCall | None:
        """Return the call that a turn is, if it is nothing else."""

    @abstractmethod
    def calls(self, problem: P) -> Sequence[str]:
        """Return the expert's calls, turn by turn, as `read` reads them."""

    @abstractmethod
    def result(self, problem: P, call: ToolCall) -> str:
        """Return the tool's result of the expert's calls, and of others that it is not known."""

    @abstractmethod
    def answer(self, problem: P) -> str:
        """Return the right answer, as the expert says it."""

    @abstractmethod
    def is_right(self, problem: P, said: str) -> bool:
        """Return whether a turn says the right answer."""

    def prompt_of(self, problem: P) -> str:
        return self._options.prompt_template.replace("{question}", self.question(problem))

    def turns(self, problem: P, rng: random.Random) -> list[str] | None:
        known = rng.random() >= self._options.expert_calls
        return [*(() if known else self.calls(problem)), self.answer(problem)]

    def schemas(self) -> Sequence[Mapping[str, Any]] | None:
        return self._tool.schemas

    def environment(self, problem: int) -> Environment:
        limits = ToolLimits(max_turns=self._options.max_turns)
        return PlainCalls(ToolEnvironment([self._tool], self._scored(problem), limits), self.read)

    def begin(self, index: int) -> PlainEnvironment:
        problem = self.problem(index)
        return ScriptedCalls(
            self.read,
            lambda call: self.result(problem, call),
            self._scored(index),
            self._options.max_turns,
        )

    async def close_environments(self) -> None:
        await self._tool.close()

    def _scored(self, index: int) -> Callable[[str], float]:
        problem = self.problem(index)
        return lambda said: float(self.is_right(problem, said))


class PlainCalls:
    """Lets a model without a format of calls make them; an `Environment`.

    A reply that was cut off is no answer: it ends the conversation and is worth 0.
    """

    def __init__(self, environment: ToolEnvironment, read: ReadCall) -> None:
        self._environment, self._read = environment, read

    def reset(self, problem: int, seed: int) -> None:
        self._environment.reset(problem, seed)

    async def step(self, reply: Reply) -> TurnResult:
        if not reply.finished:
            return TurnResult(done=True)
        call = None if reply.calls else self._read(reply.text)
        if call is not None:
            reply = replace(reply, content="", calls=(call,))
        return await self._environment.step(reply)

    async def close(self) -> None:
        await self._environment.close()


class ScriptedCalls(PlainEnvironment):
    """A conversation with a tool whose results are known beforehand."""

    def __init__(
        self,
        read: ReadCall,
        result: Callable[[ToolCall], str],
        score: Callable[[str], float],
        max_turns: int,
    ) -> None:
        self._read, self._result, self._score = read, result, score
        self._max_turns = max_turns

    def step(self, reply: Reply) -> TurnResult:
        call = self._read(reply.text) if reply.finished else None
        if call is None:
            reward = self._score(reply.text) if reply.finished else 0.0
            return TurnResult(reward=reward, done=True)
        done = reply.turn + 1 >= self._max_turns
        said = {"role": "tool", "name": call.name, "content": self._result(call)}
        return TurnResult(messages=() if done else [said], done=done)
