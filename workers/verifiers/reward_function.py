"""Reward functions: what their parameters ask for, and how they are called.

A function is called with what its parameters name: columns of the row and what `GIVEN` lists. One
that names `responses`, or `completions` as TRL's do, is called once for a whole batch. A class is
made once in a process. `bind` reads a signature, and `RewardFunction` calls what was bound: alike
in the worker's own process and in one of a pool.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.registry import imported
from ..isolation.child import USER_ERRORS, as_reward, as_rewards, failure, reading, verdict
from ..isolation.pool import OwnThread
from .pool import VerifierSpec
from .verifiers import BUILT_IN, Reference, blame, called, load_verifier, place_of, warm_up

GIVEN = ("prompt", "messages", "response", "response_token_ids", "answer", "tokenizer", "step")
"""Parameters that are given besides columns, to a function of one response."""
BATCH = "responses"
"""In place of `response`, to be called once for a batch: all but tokenizer and step are lists."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state")
"""Parameters of a function with TRL's signature, besides columns."""
ALL = ("*",)
"""Columns that `**kwargs` asks for, before it is known which there are."""
_AT_ONCE = 256  # responses that one process awaits at once
_LIKE = {
    "prompt": ("question", "problem", "instruction", "query", "input", "task"),
    "response": ("completion", "output", "generat", "text", "reply", "prediction"),
    "answer": ("gold", "target", "reference", "solution", "expected", "label", "truth", "correct"),
}
"""Argument of a function of (prompt, response, answer), in order -> words in other names for it."""
_SOURCES = {  # of what other names stand for -> what must be known of a response
    "responses": "response",
    "prompts": "messages",
    "completions": "response",
    "completion_ids": "response_token_ids",
    "trainer_state": "step",
}


@dataclass(frozen=True)
class ArgumentPlan:
    """Arguments of a reward, and where each comes from."""

    arguments: tuple[tuple[str, str], ...]
    """Parameter, "" for one by its place, and its source: of `GIVEN` and the like, or a column's
    ":NAME"."""
    defaults: frozenset[str] = frozenset()
    """Parameters that may be left out."""
    is_async: bool = False

    @property
    def sources(self) -> frozenset[str]:
        return frozenset(source for _, source in self.arguments)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(sorted(source[1:] for source in self.sources if source[0] == ":"))

    @property
    def asks(self) -> frozenset[str]:
        """Names of `GIVEN` that must be known of a response."""
        own = {_SOURCES.get(source, source) for source in self.sources if source[0] != ":"}
        if self.is_trl or "messages" in own:
            own |= {"messages", "prompt"}
        return frozenset(own)

    @property
    def is_trl(self) -> bool:
        return "completions" in self.sources

    @property
    def is_batch(self) -> bool:
        """Whether the function is called once for a whole batch."""
        return self.is_trl or BATCH in self.sources


def bind(
    reference: str,
    function: Any,
    columns: Iterable[str] | None,
    read_as: Mapping[str, str | None] = {},  # noqa: B006 - it is not changed
) -> ArgumentPlan:
    """Find what each parameter of a reward is given.

    Args:
        reference: The reward's name, for messages.
        function: A function, an object that can be called, or a class of such objects.
        columns: Columns of the data; None if that is not known, and any name may be one.
        read_as: "prompt" and "answer" -> the column that is read as such.

    Raises:
        ConfigError: If a parameter names nothing that there is, or none takes the response.
    """
    runs = called(function)
    is_async = inspect.iscoroutinefunction(runs)
    is_method = runs is not getattr(function, "func", function)
    runs = runs if is_method else function
    try:
        parameters = [*inspect.signature(runs).parameters.values()][is_method:]
    except ValueError:  # a builtin without a signature
        return ArgumentPlan(tuple(("", own) for own in _LIKE))
    fixed = getattr(function, "keywords", {})
    known = None if columns is None else [*columns]
    names = {one.name for one in parameters}
    is_trl = "completions" in names
    by_place = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    given = TRL if is_trl else (*GIVEN, BATCH)
    places = () if is_trl or BATCH in names else tuple(_LIKE)
    found: list[tuple[str, str]] = []
    for place, one in enumerate(parameters):
        own = places[place] if place < len(places) and one.kind is not one.KEYWORD_ONLY else ""
        if one.kind is one.VAR_KEYWORD:
            taken = {*names, *fixed, *(source for _, source in found)}
            found += [(source.lstrip(":"), source) for source in _rest(given, known, taken)]
        elif one.kind is one.VAR_POSITIONAL:
            found += [("", source) for source in places[place:]]
        elif one.name not in fixed:
            source = _source(one.name, own, given, known, {} if is_trl else read_as)
            in_place = one.kind is one.POSITIONAL_ONLY or (
                by_place and one.kind is one.POSITIONAL_OR_KEYWORD
            )
            if source is not None:
                found.append(("" if in_place else one.name, source))
            elif one.default is one.empty:
                raise ConfigError(
                    f"reward '{reference}' has a parameter '{one.name}', which nothing gives"
                    f"{nearest(one.name, [*given, *(known or ())])}\n    a parameter is one of "
                    f"{', '.join(given)}, or a column of the data: "
                    f"{', '.join(known or ()) or 'it has none'}"
                )
    defaults = frozenset(one.name for one in parameters if one.default is not one.empty)
    plan = ArgumentPlan(tuple(found), defaults, is_async)
    takes = {"response", BATCH, "completions", "response_token_ids"}
    if columns is not None and not plan.sources & takes:
        raise ConfigError(
            f"reward '{reference}' takes {inspect.signature(runs)}, and none of it is the response"
            f"\n    name it `response`, `response_token_ids`, or `{BATCH}` for a whole batch"
        )
    return plan


def _rest(given: Sequence[str], columns: Sequence[str] | None, taken: set[str]) -> list[str]:
    """Sources that `**kwargs` takes: of a function of one response or a batch, and of TRL's."""
    own = TRL if given is TRL else ("prompt", BATCH if BATCH in taken else "response", "answer")
    left_out = {*taken, *given, "prompt", "completion", "completion_ids"}
    there = ALL if columns is None else columns
    further = [f":{name}" for name in there if name not in left_out]
    return [*(source for source in own if source not in taken), *further]


def _source(
    name: str,
    own: str,
    given: Sequence[str],
    columns: Sequence[str] | None,
    read_as: Mapping[str, str | None],
) -> str | None:
    if name in given:
        return name
    for part, field in read_as.items():
        if name == field:
            return part
    if columns is None or name in columns:
        return f":{name}"
    words = (own, *_LIKE.get(own, ()))
    like = name.startswith("_") or any(word in name or word.startswith(name) for word in words)
    return own if own and like else None


class RewardFunction:
    """A reward that was made in this process, called with what its plan says."""

    def __init__(
        self, reference: str, function: Any, plan: ArgumentPlan, tokenizer: Any, time_limit_s: float
    ) -> None:
        self._plan, self._tokenizer, self._limit_s = plan, tokenizer, time_limit_s
        self._thread: OwnThread | None = None
        self._runner = asyncio.Runner()
        try:
            is_class = isinstance(getattr(function, "func", function), type)
            self._function = function() if is_class else function
            self._awaited(getattr(self._function, "start", lambda: None)())
        except USER_ERRORS as error:
            raise ConfigError(
                f"reward '{reference}': it cannot be started {blame(error)}\n    fix the class: it "
                "is made once in each process, and then its `start` is called"
            ) from error

    def answers(
        self,
        step: int,
        rows: Sequence[Mapping[str, Any]],
        *,
        caught: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
    ) -> list[dict[str, Any]]:
        """Return what the reward says of each response, as `verdict` does, or `{"late": True}`.

        Args:
            step: Number of the step.
            rows: Of each response, the plan's `asks` by their names, and its `columns`.
            caught: Errors of the reward that count as its failure.
        """
        plan = self._plan
        if plan.is_batch:
            limit_s, read = self._limit_s * len(rows), partial(as_rewards, len(rows))
            found = self._said([(self._arguments(step, rows), limit_s)], read, caught)[0]
            return found["value"] if "value" in found else [found] * len(rows)
        calls = [(self._arguments(step, row), self._limit_s) for row in rows]
        return self._said(calls, as_reward, caught)

    def close(self) -> None:
        self._awaited(getattr(self._function, "close", lambda: None)())
        if self._thread is not None:
            self._thread.submit(self._runner.close)
            self._thread.end()

    def _said(
        self,
        calls: Sequence[tuple[tuple[list[Any], dict[str, Any]], float]],
        read: Callable[[Any], Any],
        caught: Any,
    ) -> list[dict[str, Any]]:
        if not self._plan.is_async:
            return [
                verdict(partial(self._function, *args, **named), (), caught=caught, read=read)
                for (args, named), _ in calls
            ]

        async def together() -> list[dict[str, Any]]:
            turns = asyncio.Semaphore(_AT_ONCE)

            async def one(args: list[Any], named: dict[str, Any], limit_s: float) -> Any:
                async with turns:
                    limit = asyncio.timeout(limit_s)
                    try:
                        async with limit:
                            value = await self._function(*args, **named)
                        return reading(read, value)
                    except caught as error:
                        return {"late": True} if limit.expired() else failure(error)

            return await asyncio.gather(*(one(*call, limit_s) for call, limit_s in calls))

        return self._awaited(together())

    def _arguments(self, step: int, given: Any) -> tuple[list[Any], dict[str, Any]]:
        shared = {
            "step": step,
            "tokenizer": self._tokenizer,
            "trainer_state": SimpleNamespace(global_step=step),
        }
        args: list[Any] = []
        named: dict[str, Any] = {}
        may_lack = self._plan.defaults
        for name, source in self._plan.arguments:
            if source in shared:
                value = shared[source]
            elif self._plan.is_batch:
                value = [_value(source, row) for row in given]
            elif name in may_lack and source[0] == ":" and source[1:] not in given["columns"]:
                continue
            else:
                value = _value(source, given)
            if name:
                named[name] = value
            else:
                args.append(value)
        return args, named

    def _awaited(self, value: Any) -> Any:
        """Return a value, or what it comes to if it is to be awaited: always in one event loop."""
        if not inspect.isawaitable(value):
            return value
        self._thread = self._thread or OwnThread("reward")

        async def wait(one: Awaitable[Any]) -> Any:
            return await one

        return self._thread.submit(self._runner.run, wait(value)).result()


def _value(source: str, row: Mapping[str, Any]) -> Any:
    if source[0] == ":":
        return row["columns"].get(source[1:])
    if source == "messages":
        return row["messages"] or [{"role": "user", "content": row["prompt"]}]
    if source == "prompts":
        return row["messages"] or row["prompt"]
    if source == "completions":
        said = row["response"]
        return [{"role": "assistant", "content": said}] if row["messages"] else said
    return row[_SOURCES.get(source, source)]


class RewardFunctions:
    """Rewards of a process in a pool, by key: a factory, by name, and its arguments make each."""

    def __init__(self, functions: Mapping[str, Sequence[Any]]) -> None:
        self._made = {key: imported(make)(**given) for key, (make, given) in functions.items()}
        atexit.register(self.close)  # the process ends by itself if it is given the time

    def answers(self, key: str, *arguments: Any) -> list[dict[str, Any]]:
        """Return what a reward says of each response; one of a task's own is called as it is."""
        answers = getattr(self._made[key], "answers", None)
        if answers is None:
            return [verdict(self._made[key], arguments, caught=BaseException)]
        return answers(*arguments)

    def close(self) -> None:
        for one in self._made.values():
            getattr(one, "close", lambda: None)()


def make_reward(
    reward: Reference,
    options: Mapping[str, Any] | None = None,
    columns: Iterable[str] = (),
    read_as: Mapping[str, str | None] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    time_limit_s: float = 5.0,
) -> RewardFunction:
    """A reward in this process; `columns` are those of the data that it may name."""
    name = name_of(reward)
    function = load_verifier(reward, options)
    plan = bind(name, function, columns, read_as or {})
    backend = None
    if tokenizer is not None:
        spec = imported("penstock.workers.models.tokenizer:TokenizerSpec")(**tokenizer)
        backend = spec.build().backend
    if isinstance(reward, str):
        warm_up(reward, function, options)
    return RewardFunction(name, function, plan, backend, time_limit_s)


Rewards = Reference | Sequence[Reference] | Mapping[str, Reference]
"""One reward, several, or several by names of one's own."""


def by_name(rewards: Rewards) -> dict[str, Reference]:
    """Name -> reward: "" for one alone, and else that of its function."""
    if isinstance(rewards, str) or callable(rewards):
        return {"": rewards}
    if isinstance(rewards, Mapping):
        return dict(rewards)
    named: dict[str, Reference] = {}
    for one in rewards:
        name = name_of(one).rpartition(":")[2]
        if name in named:
            raise ConfigError(
                f"two rewards are called '{name}'\n    name them apart: "
                f"{{{name}: '{name_of(named[name])}', {name}_2: '{name_of(one)}'}}"
            )
        named[name] = one
    return named


def is_batch(rewards: Any) -> bool:
    """Return whether one of some rewards, or what was given for them, takes a whole batch."""
    if not isinstance(rewards, str | Sequence | Mapping) and not callable(rewards):
        return False  # which is refused later
    return any(one.together == "batch" for one in reward_specs(rewards, in_process=True).values())


def name_of(reward: Reference) -> str:
    return reward if isinstance(reward, str) else getattr(reward, "__name__", repr(reward))


def reward_specs(
    rewards: Rewards,
    columns: Iterable[str] | None = None,
    *,
    read_as: Mapping[str, str | None] | None = None,
    options: Mapping[str, Any] | None = None,
    in_process: bool = False,
) -> dict[str, VerifierSpec]:
    """Name -> how each of some rewards is made and called, in this process or in another.

    Raises:
        ConfigError: If one cannot be loaded, or names what nothing gives.
    """
    found: dict[str, VerifierSpec] = {}
    for name, reward in by_name(rewards).items():
        function = load_verifier(reward, options)
        # Options of a built-in one may have the names of columns.
        known = () if reward in BUILT_IN else columns
        plan = bind(name_of(reward), function, known, read_as or {})
        here = in_process or reward == "exact_match"
        arguments = {
            "reward": reward if here else place_of(reward),
            "options": dict(options or {}),
            "columns": list(plan.columns),
            "read_as": dict(read_as or {}),
        }
        found[name] = VerifierSpec(
            factory=f"{__name__}:make_reward",
            arguments={key: value for key, value in arguments.items() if value},
            asks=plan.asks,
            columns=plan.columns,
            together="batch" if plan.is_batch else "async" if plan.is_async else "",
            in_process=here,
            closes=hasattr(getattr(function, "func", function), "close"),
        )
    return found
