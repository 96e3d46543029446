"""Environments of the verifiers package (Prime Intellect), 0.1, as tasks that are conversed with.

`task.env` names an environment as the package does: a module with a function `load_environment`.
Its data set becomes the training problems and its evaluation data set the held-out ones; a row is
kept once, and not for training if it is held out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from importlib import import_module
from typing import Any

from ....dataflow.errors import ConfigError, one_process
from ....dataflow.options import NonNegativeInt, PositiveFloat, PositiveInt, option_class
from ...data.task import Message, Task, check_messages, last_user_text
from ...isolation.child import as_score
from ..environment import FAILED, BadCall, Environment, Reply, TurnResult
from ..tools.tool import schema_of

_log = logging.getLogger(__name__)


class _Turns:
    """A client of the package whose model is the caller of `say`.

    The package calls `get_response` alone, so this is a client by its shape.
    """

    def __init__(self) -> None:
        clients: Any = import_module("verifiers.clients")  # an extra
        clients.Client.register(type(self))
        self.asked: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._said: asyncio.Queue[Reply] = asyncio.Queue()

    def say(self, reply: Reply) -> None:
        self._said.put_nowait(reply)

    async def get_response(self, prompt: list[Any], model: str, **others: Any) -> Any:
        self.asked.put_nowait(list(prompt))
        return _response(await self._said.get(), model)

    async def close(self) -> None:
        """End; nothing is held."""


class VerifiersEnvironment:
    def __init__(self, env: Any, row: Mapping[str, Any], step_limit_s: float) -> None:
        self._env, self._row, self._step_limit_s = env, row, step_limit_s
        self._turns = _Turns()
        self._rollout: asyncio.Task[Any] | None = None
        self._num_shown = 0

    async def reset(self, problem: int, seed: int) -> None:
        self._rollout = asyncio.create_task(self._run())
        asked = await self._next_prompt()
        self._num_shown = len(asked or ())

    async def step(self, reply: Reply) -> TurnResult:
        if self._rollout is None or self._rollout.done():
            return self._end()
        self._turns.say(reply)
        asked = await self._next_prompt()
        if asked is None:
            return self._end()
        # The prompt, the policy's own turn, and what the environment answered.
        new = asked[self._num_shown + 1 :]
        self._num_shown = len(asked)
        return TurnResult(messages=[plain_message(message) for message in new])

    async def close(self) -> None:
        if self._rollout is None:
            return
        self._rollout.cancel()
        await asyncio.wait([self._rollout], timeout=self._step_limit_s)
        if self._rollout.done() and not self._rollout.cancelled():
            self._rollout.exception()  # else asyncio warns that it was never retrieved

    async def _run(self) -> Any:
        state = await self._env.rollout(dict(self._row), self._turns, "policy", {})
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)
        return state

    async def _next_prompt(self) -> list[Any] | None:
        assert self._rollout is not None
        asked = asyncio.create_task(self._turns.asked.get())
        try:
            await asyncio.wait(
                [asked, self._rollout],
                timeout=self._step_limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    def _end(self) -> TurnResult:
        rollout = self._rollout
        if rollout is None or not rollout.done() or rollout.cancelled():
            _log.warning("an environment took longer than %g s", self._step_limit_s)
            return FAILED
        error = rollout.exception() or rollout.result().get("error")
        if error is not None:
            _log.warning("an environment failed: %r", error)
            return FAILED
        state = rollout.result()
        try:
            reward = as_score(state["reward"])
        except ValueError as error:
            _log.warning("an environment failed: its reward is %s", error)
            return FAILED
        counts = {
            name: float(value)
            for name, value in (state.get("metrics") or {}).items()
            if isinstance(value, int | float)
        }
        return TurnResult(reward=reward, done=True, counts=counts)


def plain_message(message: Any) -> Message:
    """A message of the package, or one of its data sets, as a conversation here has it."""
    given: dict[str, Any] = message if isinstance(message, dict) else message.model_dump()
    found = {key: value for key, value in given.items() if value is not None}
    found["content"] = _text(found.get("content", ""))
    return found


def _text(content: str | Sequence[Any]) -> str:
    """The texts of a message; pictures and sounds are left out."""
    if isinstance(content, str):
        return content
    parts: list[Any] = [p if isinstance(p, dict) else p.model_dump() for p in content]
    return "".join(part["text"] for part in parts if part.get("type") == "text")


def _response(reply: Reply, model: str) -> Any:
    """A turn as the package has it. What could not be read as a call is left to its tools."""
    types: Any = import_module("verifiers.types")  # an extra
    calls: list[Any] = []
    for number, call in enumerate(reply.calls):
        bad = isinstance(call, BadCall)
        name = "" if bad else call.name
        arguments = call.text if bad else json.dumps(dict(call.arguments))
        made = types.ToolCall(id=f"call_{reply.turn}_{number}", name=name, arguments=arguments)
        calls.append(made)
    why = "tool_calls" if calls else "stop"
    message = types.ResponseMessage(
        content=reply.content if calls else reply.text,
        tool_calls=calls or None,
        finish_reason=why if reply.finished else "length",
        is_truncated=not reply.finished,
    )
    return types.Response(id=f"turn_{reply.turn}", created=0, model=model, message=message)


@option_class
class VerifiersTaskSpec:
    """An environment, and the number of rows of its data sets."""

    env: str
    """Its name, as `verifiers.load_environment` takes it."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of its `load_environment`."""
    num_train: PositiveInt | None = None
    """The most training problems; all of them by default."""
    num_held_out: NonNegativeInt = 100
    """The most held-out problems. If the environment has no data set for evaluation, so many rows
    of the other one are held out."""
    step_limit_s: PositiveFloat = 60.0
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

    def build(self) -> VerifiersTask:
        return VerifiersTask(self)


class VerifiersTask(Task):
    def __init__(self, spec: VerifiersTaskSpec) -> None:
        self.spec = spec
        self.task_id = f"verifiers[{spec.env}]"
        self.correct_score = spec.correct_score
        self.deterministic = spec.deterministic
        self.further_characters = "\n" + spec.characters
        with one_process():
            self._env = _load(spec)
            train, held_out = self._split()
        self._rows = train + held_out
        # Two rows are told apart by the whole conversation before them.
        prompts = [_key(row) for row in self._rows]
        super().__init__(self.task_id, prompts, num_held_out=len(held_out))
        self._schemas = [
            schema_of(tool.name, tool.description, tool.parameters)
            for tool in self._env.tool_defs or ()
        ]

    def environment(self, problem: int) -> Environment:
        return VerifiersEnvironment(self._env, self._rows[problem], self.spec.step_limit_s)

    def prompt_text(self, index: int) -> str:
        return last_user_text(self.messages(index))

    def messages(self, index: int) -> Sequence[Message]:
        return check_messages([plain_message(message) for message in self._rows[index]["prompt"]])

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        return self._schemas or None

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        row = self._rows[index]
        return (row["example_id"], str(row.get("answer", "")), response)

    def where(self, index: int) -> str:
        return f"{self.task_id}[{self._rows[index]['example_id']}]"

    def _split(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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
