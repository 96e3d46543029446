"""The other side of a conversation: what an environment is told and answers.

An environment serves one conversation, from `reset` to `close`. What the policy is shown before it
first speaks is the task's prompt, which is rendered with the schemas of its tools; from then on the
environment answers each of its turns with messages, a reward, and whether that was the end.

A method may be a coroutine function or a plain one. A plain one is called where the policy samples,
so it must be quick; what waits for anything is a coroutine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...dataflow.errors import ConfigError
from ...dataflow.registry import Registry
from ..data.task import Message, Task

AGENT = "agent"

TASK_AGENTS = Registry[Any]({AGENT: "penstock.workers.agents.worker:AgentSpec"})
"""Every agent that a configuration can name, with its spec."""


def check_converses(task: Task) -> None:
    """Require a task whose problems are answered in conversation."""
    if not task.converses:
        raise ConfigError(
            f"task '{task.task_id}' has no environments to talk with\n    choose one that has, "
            "such as task=calculator, or give your task a method `environment`"
        )


@dataclass(frozen=True)
class ToolCall:
    name: str  # of the tool, be there one or not
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # by name


@dataclass(frozen=True)
class BadCall:
    """A piece of text that looks like a call and is none."""

    text: str  # what the model wrote
    why: str  # the error, in the words that the model is shown


@dataclass(frozen=True)
class Reply:
    """One turn of the policy.

    Attributes:
        turn: Its number, from 0.
        text: All that it said, without the token that ends a turn.
        content: What of that is no call.
        calls: What it called, in order; some of them may be none that can be made.
        finished: Whether it ended its turn, and was not cut off.
    """

    turn: int
    text: str
    content: str
    calls: tuple[ToolCall | BadCall, ...] = ()
    finished: bool = True


@dataclass(frozen=True)
class TurnResult:
    """The answer of an environment to a turn.

    Attributes:
        messages: What the policy is shown next, by "tool" or "user"; none where it is over.
        reward: For this turn; None, as nan, leaves the whole conversation without a score.
        done: Whether the conversation is over.
        counts: What is to be counted of it, such as `{"tool_errors": 1}`.
    """

    messages: Sequence[Message] = ()
    reward: float | None = 0.0
    done: bool = False
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


FAILED = TurnResult(reward=None, done=True, counts={"env_errors": 1.0})
"""The end of a conversation whose environment went wrong."""


class Environment(Protocol):
    """The other side of one conversation. Each method may be a coroutine function."""

    def reset(self, problem: int, seed: int) -> Awaitable[None] | None:
        """Begin.

        Args:
            problem: Index into the task.
            seed: 63 bits, all the randomness there is: the same for the same run, step, problem and
                sample.
        """
        ...

    def step(self, reply: Reply) -> Awaitable[TurnResult] | TurnResult:
        """Answer a turn."""
        ...

    def close(self) -> Awaitable[None] | None:
        """End; called once, whatever has happened, also where `reset` failed."""
        ...
