"""What generated questions share that are answered with one tool: how calls are written, experts.

A model whose chat template has calls writes them as it does; they are read before an environment
sees them. For others, each task says how a turn is written that is nothing but a call, short enough
for a small model. A turn without a call is the answer, worth 1 if it is right.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ....dataflow.errors import ConfigError
from ....dataflow.option_checks import check_range
from ..environment import Environment, Reply, ToolCall, TurnResult
from ..tools.tool import Tool
from ..tools.tool_environment import ToolEnvironment, ToolLimits
from .generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment

ReadCall = Callable[[str], ToolCall | None]
"""From a turn to the call that it is, or None."""

_PRINTABLE = "".join(chr(code) for code in range(32, 127))

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class ToolQuestionsSpec(GeneratedSpec):
    """How many questions, and how experts and policies answer them."""

    prompt_template: str = "{question}"
    """The prompt, with `{question}` where the question stands: a model that knows language needs to
    be told what to do."""
    expert_calls: float = 1.0
    """Share of the demonstrations that call the tool; in the others the expert knows the answer and
    says it at once."""
    max_turns: int = 8
    """Turns after which a conversation without an answer is over, and worth 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_turns", at_least=1)
        check_range(self, "expert_calls", at_least=0, at_most=1)


def check_template(spec: ToolQuestionsSpec) -> None:
    """See to it that the question has a place in the prompt.

    Raises:
        ConfigError: If it has none.
    """
    if "{question}" not in spec.prompt_template:
        raise ConfigError(
            f"'task.prompt_template' is {spec.prompt_template!r}, which has no place for the "
            "question\n    write {question} where it stands"
        )


class ToolQuestions(GeneratedTask[P]):
    """Questions of a generator, answered with a tool at hand; see `GeneratedTask`.

    Args:
        task_id: Names the task.
        spec: How many questions, and how they are answered.
        tool: What may be called.

    Attributes:
        deterministic: As the tool.
    """

    def __init__(self, task_id: str, spec: ToolQuestionsSpec, tool: Tool) -> None:
        self._options, self._tool = spec, tool
        self.deterministic = tool.deterministic
        super().__init__(task_id, spec)

    @abstractmethod
    def question(self, problem: P) -> str:
        """What is asked."""

    @abstractmethod
    def read(self, text: str) -> ToolCall | None:
        """The call that a turn is, if it is nothing else."""

    @abstractmethod
    def calls(self, problem: P) -> Sequence[str]:
        """What the expert calls, turn by turn, as `read` reads it."""

    @abstractmethod
    def result(self, problem: P, call: ToolCall) -> str:
        """What the tool says to the expert's calls, and to others that it is not known."""

    @abstractmethod
    def answer(self, problem: P) -> str:
        """The right answer, as the expert says it."""

    @abstractmethod
    def is_right(self, problem: P, said: str) -> bool:
        """Whether a turn says the right answer."""

    @property
    def further_characters(self) -> str:
        """Whatever calls, results and errors may be written with."""
        return f"{_PRINTABLE}\n"

    def prompt_of(self, problem: P) -> str:
        """The template filled with the question."""
        return self._options.prompt_template.replace("{question}", self.question(problem))

    def turns(self, problem: P, rng: random.Random) -> list[str] | None:
        """Call the tool and say what follows from its results; or know the answer."""
        known = rng.random() >= self._options.expert_calls
        return [*(() if known else self.calls(problem)), self.answer(problem)]

    def schemas(self) -> Sequence[Mapping[str, Any]] | None:
        """The tool's."""
        return self._tool.schemas

    def environment(self, problem: int) -> Environment:
        """The tool itself, and the score of the answer."""
        limits = ToolLimits(max_turns=self._options.max_turns)
        return PlainCalls(ToolEnvironment([self._tool], self._scored(problem), limits), self.read)

    def begin(self, index: int) -> PlainEnvironment:
        """What the expert rehearses with: the tool's results as far as they are known."""
        problem = self.problem(index)
        return ScriptedCalls(
            self.read,
            lambda call: self.result(problem, call),
            self._scored(index),
            self._options.max_turns,
        )

    async def close_environments(self) -> None:
        """End what the tool has started."""
        await self._tool.close()

    def _scored(self, index: int) -> Callable[[str], float]:
        problem = self.problem(index)
        return lambda said: float(self.is_right(problem, said))


class PlainCalls:
    """Lets a model without a format of calls make them; an `Environment`.

    A reply that was cut off is no answer: it ends the conversation and is worth 0.

    Args:
        environment: Answers calls.
        read: Finds the call in a turn that has none in a format.
    """

    def __init__(self, environment: ToolEnvironment, read: ReadCall) -> None:
        self._environment, self._read = environment, read

    def reset(self, problem: int, seed: int) -> None:
        """Begin."""
        self._environment.reset(problem, seed)

    async def step(self, reply: Reply) -> TurnResult:
        """Make the calls of a turn, or score an answer."""
        if not reply.finished:
            return TurnResult(done=True)
        call = None if reply.calls else self._read(reply.text)
        if call is not None:
            reply = replace(reply, content="", calls=(call,))
        return await self._environment.step(reply)

    async def close(self) -> None:
        """End the conversation in the tool."""
        await self._environment.close()


class ScriptedCalls:
    """A conversation with a tool whose results are known beforehand; a `PlainEnvironment`.

    Args:
        read: Finds the call in a turn.
        result: What a call says.
        score: Of an answer.
        max_turns: Turns that it answers at most.
    """

    def __init__(
        self,
        read: ReadCall,
        result: Callable[[ToolCall], str],
        score: Callable[[str], float],
        max_turns: int,
    ) -> None:
        self._read, self._result, self._score = read, result, score
        self._max_turns = max_turns

    def reset(self, problem: int, seed: int) -> None:
        """Begin; there is nothing to remember."""

    def step(self, reply: Reply) -> TurnResult:
        """The result of a call, or the end with the score of the answer."""
        call = self._read(reply.text) if reply.finished else None
        if call is None:
            reward = self._score(reply.text) if reply.finished else 0.0
            return TurnResult(reward=reward, done=True)
        done = reply.turn + 1 >= self._max_turns
        said = {"role": "tool", "name": call.name, "content": self._result(call)}
        return TurnResult(messages=() if done else [said], done=done)

    def close(self) -> None:
        """End; nothing is held."""
