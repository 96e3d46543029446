"""Python functions as tools: described by their signature and docstring, and called with JSON.

A function's schema is made by `transformers.utils.get_json_schema` from its type hints and its
docstring, which says in an `Args:` section what each argument is. What a model calls it with is
checked against the hints before it runs; it is given JSON values (a list also where a tuple is
hinted at). A text that it returns is the result as it is, all else as JSON, or as `repr` shows it.

A class in place of a function is made anew for each conversation, without arguments; its public
methods are tools, and what they remember in it is the conversation's own.
"""

from __future__ import annotations

import ast
import inspect
import json
import signal
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from ....dataflow.errors import ConfigError
from ....dataflow.options import FiniteFloat, Int, option_class
from ...isolation.child import text_of
from ...isolation.pool import CallResult, NotSaid, NotStarted, ProcessPool
from .tool import Tool, ToolSession, ToolText

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_CHANGES = frozenset(
    (
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add"),
        *("discard", "update", "setdefault", "popitem", "appendleft", "popleft", "subtract"),
    )
)
"""Methods that change a container."""
_CONTAINERS = (list, dict, set, bytearray)
_SHOWN = 80  # characters of a wrong argument that are shown


@option_class
class FunctionTools:
    """Functions that a model may call, by where they are.

    Example:
        `FunctionTools(functions=("tools.calendar:events", "tools.calendar:Notes"))`
    """

    functions: tuple[str, ...]
    """`module:function` or `module:Class` each; a process of ours imports them. With a class, each
    conversation has a process of its own, from its first call to its end."""
    quick: bool = False
    """Whether they run in this process, where nothing bounds them: for pure functions of ours that
    take no time. Else each call runs in a process that is killed, with all it has started, when it
    overruns its time."""
    time_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 5.0
    """Seconds one call may take, from its turn on."""
    start_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 120.0
    """Seconds a process may take to start and import the functions."""
    num_processes: Annotated[Int, Ge(1), Le(256)] = 2
    """Calls at once."""
    max_bytes: Annotated[Int, Ge(1), Le(1 << 26)] = 16_384
    """Largest result, as UTF-8; of a longer one the model gets the beginning and a count."""
    deterministic: bool | None = None
    """Whether what they return follows from the calls of their conversation alone. By default yes,
    unless a function is seen to change what its module keeps: all conversations share that."""

    def build(self) -> Tool:
        if not self.functions:
            raise ConfigError("no functions are given\n    name some, as module:function")
        found = [made for place in self.functions for made in _functions_at(place)]
        changed = [f"{one.name} changes {', '.join(one.changes)}" for one in found if one.changes]
        why = "" if self.deterministic or not changed else f"tool {changed[0]} of its module"
        deterministic = not changed if self.deterministic is None else self.deterministic
        return FunctionTool(
            found,
            self.max_bytes,
            pool=None if self.quick else self._pool,
            deterministic=deterministic,
            why_not=why,
        )

    def _pool(self, tool: FunctionTool, keeps_state: bool) -> ProcessPool:
        places = {name: one.place for name, one in tool.functions.items()}
        return ProcessPool(
            {"functions": places, "max_bytes": self.max_bytes},
            runs="a function",
            num_processes=1 if keeps_state else self.num_processes,
            time_limit_s=self.time_limit_s,
            start_limit_s=self.start_limit_s,
            most_bytes=6 * self.max_bytes + 1000,  # as JSON a byte takes 6 at most
            accepts=lambda value: isinstance(value, str),
            repeats=tool.deterministic and not keeps_state,
            keeps_state=keeps_state,
        )


class Function:
    """One function or method of `owner`, its schema, and the check of its arguments.

    Attributes:
        changes: Names of its module that it changes, as far as its source shows.
    """

    def __init__(
        self, function: Callable[..., Any], place: str = "", owner: type | None = None
    ) -> None:
        from pydantic import TypeAdapter
        from transformers.utils.chat_template_utils import get_json_schema

        self.function, self.place, self.owner = function, place, owner
        self.changes = changed_names(function)
        self.name: str = getattr(function, "__name__", "")
        try:
            parameters = inspect.signature(function).parameters
            if inspect.iscoroutinefunction(function):
                raise ValueError("it is a coroutine function")
            if any(p.kind not in _BY_NAME for p in parameters.values()):
                raise ValueError("it has arguments that cannot be named")
            self.schema = get_json_schema(function)
            self.schema["function"].pop("return", None)  # chat templates do not show it
            hints = get_type_hints(function)
            self._adapters: dict[str, TypeAdapter[Any]] = {
                name: TypeAdapter(hints[name]) for name in parameters
            }
        except Exception as error:  # of several libraries
            raise ConfigError(
                f"function '{self.name}' cannot be a tool: {error}\n"
                "    write a plain function with type hints, and a docstring that describes each "
                "argument below 'Args:'"
            ) from error
        empty = inspect.Parameter.empty
        self._required = [name for name, p in parameters.items() if p.default is empty]

    def wrong(self, arguments: Mapping[str, Any]) -> str | None:
        from pydantic import ValidationError

        for name in arguments:
            if name not in self._adapters:
                known = ", ".join(self._adapters) or "none"
                return f"{self.name} has no argument {name!r}; its arguments: {known}"
        for name in self._required:
            if name not in arguments:
                return f"{self.name} needs the argument '{name}'"
        for name, value in arguments.items():
            written = ""
            try:
                written = json.dumps(value)
            except (TypeError, ValueError, RecursionError):
                return f"argument '{name}' of {self.name} is no JSON value"
            try:
                self._adapters[name].validate_json(written, strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = "".join(f"[{part!r}]" for part in first["loc"])
                shown = written if len(written) <= _SHOWN else f"{written[:_SHOWN]}..."
                return f"argument '{name}'{place} of {self.name}: {first['msg']}; got {shown}"
        return None


class FunctionTool(Tool):
    """Functions by name, whose calls are checked before they are made.

    Args:
        functions: What may be called.
        max_bytes: Of a result.
        pool: Makes processes for the calls, of this tool and perhaps of one conversation; without
            it, functions run where they are called, and must take no time.
        deterministic: See `Tool`.
        why_not: The same.
    """

    def __init__(
        self,
        functions: Sequence[Function | Callable[..., Any]],
        max_bytes: int = 16_384,
        *,
        pool: Callable[[FunctionTool, bool], ProcessPool] | None = None,
        deterministic: bool = True,
        why_not: str = "",
    ) -> None:
        made = [one if isinstance(one, Function) else Function(one) for one in functions]
        self.functions, self.max_bytes = _by_name(made), max_bytes
        self.deterministic, self.why_not_deterministic = deterministic, why_not
        self.schemas = tuple(one.schema for one in made)
        self._pool, self._shared = pool, pool(self, False) if pool else None

    @override
    def open(self, seed: int) -> ToolSession:
        """Begin a conversation, in a process of its own if there are classes."""
        if self._pool and any(one.owner for one in self.functions.values()):
            return _Session(self, self._pool(self, True))
        return _Session(self, self._shared)

    @override
    async def close(self) -> None:
        if self._shared:
            await self._shared.close()


class _Session(ToolSession):
    def __init__(self, tool: FunctionTool, pool: ProcessPool | None) -> None:
        self._tool, self._pool = tool, pool
        self._made: dict[type, Any] = {}

    @override
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        function = self._tool.functions.get(name)
        if function is None:
            return ToolText(f"there is no tool {name!r}", error=True)
        if (wrong := function.wrong(arguments)) is not None:
            return ToolText(wrong, error=True)
        if self._pool is None:

            def quick(**given: Any) -> Any:
                if (owner := function.owner) is None:
                    return function.function(**given)
                if owner not in self._made:
                    self._made[owner] = owner()
                return getattr(self._made[owner], function.name)(**given)

            return _told(CallResult(**text_of(quick, dict(arguments), self._tool.max_bytes)))
        try:
            return _told(await self._pool.call(name=name, arguments=dict(arguments)))
        except NotStarted as error:
            why = error.why
            if isinstance(why, OSError):
                why = f"no more processes can be started: {why.strerror}"
            return ToolText(f"{name} cannot be started: {why}", error=True)
        except NotSaid as error:
            if error.timed_out:
                text = f"{name} took longer than {self._pool.time_limit_s:g} s and was stopped"
                return ToolText(text, error=True, timed_out=True)
            return ToolText(f"{name} failed: {error}{_how(error)}", error=True)

    @override
    async def close(self) -> None:
        if self._pool and self._pool.keeps_state:
            await self._pool.close()


def _told(answer: CallResult) -> ToolText:
    error = answer.error
    return ToolText(answer.value) if error is None else ToolText(error, error=True)


def _how(error: NotSaid) -> str:
    if not error.ended:
        return ""
    code = -signal.SIGKILL if error.exit_code is None else error.exit_code
    if -code in {*signal.Signals}:
        return f" by {signal.Signals(-code).name}"
    return f" with exit code {code}"


def imported(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # a module may fail in any way
        raise ConfigError(
            f"function '{place}' cannot be imported: {error}\n"
            "    name it as module:function, with a module that this Python finds"
        ) from error


def _functions_at(place: str) -> list[Function]:
    found = imported(place)
    if not inspect.isclass(found):
        return [Function(found, place)]
    names = [name for name, _ in inspect.getmembers(found, inspect.isfunction) if name[0] != "_"]
    if not names:
        raise ConfigError(
            f"class '{place}' has no public methods to be tools\n    give it some, each with type "
            "hints and a docstring"
        )
    unmade: Any = object.__new__(found)  # only signatures of its methods are read
    return [Function(getattr(unmade, name), f"{place}.{name}", found) for name in names]


def _by_name(functions: Sequence[Function]) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for one in functions:
        if one.name in found:
            raise ConfigError(f"two functions are called '{one.name}'\n    rename one of them")
        found[one.name] = one
    return found


def changed_names(function: Callable[..., Any]) -> list[str]:
    """Return names of its module that a function assigns to, or whose contents it changes; sorted.

    Functions that it calls are not looked at, so an empty list promises nothing.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    code = getattr(function, "__code__", None)
    local = set(code.co_varnames) if code is not None else set[str]()
    module: dict[str, Any] = getattr(function, "__globals__", {})
    kept = {name for name, value in module.items() if isinstance(value, _CONTAINERS)} - local
    declared, stored, filled = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names):
                declared |= {*names}
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                stored.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if (
                method in _CHANGES
            ):
                filled.add(name)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                filled.add(name)
            case _:
                pass
    return sorted({*(declared & stored), *(kept & filled)})
