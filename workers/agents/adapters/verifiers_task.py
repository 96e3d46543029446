"""Environments of the verifiers package (Prime Intellect), 0.1, as tasks that are conversed with.

`task.env` names an environment as the package does: a module with a function `load_environment`.
Its data set becomes the training problems and its evaluation data set the held-out ones; a row is
kept once, and not for training if it is held out.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ....dataflow.errors import ConfigError, one_process
from ....dataflow.option_checks import check_range
from ...data.messages import check_messages, last_user_text
from ...data.task import Message
from ..environment import Environment
from ..tasks.conversation_task import ConversationTask
from .verifiers_rollout import VerifiersEnvironment, plain_message


@dataclass(frozen=True, kw_only=True)
class VerifiersTaskSpec:
    """Which environment, and how many rows of its data sets."""

    env: str
    """Its name, as `verifiers.load_environment` takes it."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of its `load_environment`."""
    num_train: int | None = None
    """The most training problems; all of them by default."""
    num_held_out: int = 100
    """The most held-out problems. If the environment has no data set for evaluation, so many rows
    of the other one are held out."""
    step_limit_s: float = 60.0
    """Longest time between a turn and its answer; a conversation whose environment takes longer
    ends without a score."""
    correct_score: float = 1.0
    """Conversations with at least this reward count as right."""
    deterministic: bool = False
    """Whether what it does is a function of the problem and the turns alone; only its author
    knows."""
    characters: str = ""
    """Characters that it or the policy may write beyond those of the prompts, for a tokenizer whose
    alphabet is the task's."""

    def __post_init__(self) -> None:
        check_range(self, "num_train", at_least=1)
        check_range(self, "num_held_out", at_least=0)
        check_range(self, "step_limit_s", above=0)

    def build(self) -> VerifiersTask:
        """Load the environment and read its data sets.

        Raises:
            ConfigError: If the package or the environment is missing, the environment cannot be
                used, or there is no row to train on.
        """
        return VerifiersTask(self)


class VerifiersTask(ConversationTask):
    """Rows of an environment's data sets; see `ConversationTask`."""

    def __init__(self, spec: VerifiersTaskSpec) -> None:
        self.spec = spec
        self.task_id = f"verifiers[{spec.env}]"
        self.correct_score = spec.correct_score
        self.deterministic = spec.deterministic
        with one_process():
            self._env = _load(spec)
            train, held_out = self._split()
        self._rows = train + held_out
        # Two rows are told apart by the whole conversation before them.
        prompts = [_key(row) for row in self._rows]
        super().__init__(self.task_id, prompts, num_held_out=len(held_out))
        self._schemas = [_schema(tool) for tool in self._env.tool_defs or ()]

    @property
    def further_characters(self) -> str:
        """The option `characters`, and the line feed that ends a message."""
        return "\n" + self.spec.characters

    def environment(self, problem: int) -> Environment:
        """A conversation about a row."""
        return VerifiersEnvironment(self._env, self._rows[problem], self.spec.step_limit_s)

    def prompt_text(self, index: int) -> str:
        """What the user said last."""
        return last_user_text(self.messages(index))

    def messages(self, index: int) -> Sequence[Message]:
        """The row's prompt."""
        return check_messages([plain_message(message) for message in self._rows[index]["prompt"]])

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """The environment's tools, the same for every row."""
        return self._schemas or None

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """The row's number, its answer and the response."""
        row = self._rows[index]
        return (row["example_id"], str(row.get("answer", "")), response)

    def where(self, index: int) -> str:
        """The environment and the row's number."""
        return f"{self.task_id}[{self._rows[index]['example_id']}]"

    def _split(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows to train on and rows held out, no prompt twice."""
        rows = _distinct(self._env.get_dataset())
        if self._env.build_eval_dataset() is None:
            keys = list(rows)[: self.spec.num_held_out]
            held_out = {key: rows[key] for key in keys}
        else:
            both = _distinct(self._env.get_eval_dataset())
            held_out = dict(list(both.items())[: self.spec.num_held_out])
        train = [row for key, row in rows.items() if key not in held_out]
        if not train:
            raise ConfigError(
                f"task '{self.task_id}' has no row left to train on\n"
                "    lower task.num_held_out, or give the environment more rows: task.options"
            )
        return train[: self.spec.num_train], list(held_out.values())


def _distinct(rows: Any) -> dict[str, dict[str, Any]]:
    """Prompt -> the first row with it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(_key(row), dict(row))
    return found


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps([plain_message(message) for message in row["prompt"]])


def _load(spec: VerifiersTaskSpec) -> Any:
    try:
        package: Any = import_module("verifiers")  # an extra
        with _signals_kept():
            env = package.load_environment(spec.env, **spec.options)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"'task.env': '{spec.env}' needs the module '{error.name}'\n"
            "    pip install penstock-rl[verifiers], and the environment's own package"
        ) from error
    except Exception as error:  # loading it runs whatever its author wrote
        raise ConfigError(
            f"'task.env': verifiers cannot load '{spec.env}': {error!r}\n"
            "    give the name of an installed environment, and task.options that it takes"
        ) from error
    if not hasattr(env, "env_response") and not hasattr(env, "rollout"):
        raise ConfigError(
            f"'task.env': '{spec.env}' is a {type(env).__name__}, which has no rollout()\n"
            "    give an environment of verifiers 0.1"
        )
    if env.requires_group_rollouts:
        raise ConfigError(
            f"'task.env': the rubric of '{spec.env}' compares conversations with each other\n"
            "    give an environment whose rubric scores each by itself"
        )
    return env


@contextmanager
def _signals_kept() -> Generator[None]:
    """An environment of the package takes SIGINT and SIGTERM for itself; give them back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _schema(tool: Any) -> Mapping[str, Any]:
    """A tool of the package, as chat templates take it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }
