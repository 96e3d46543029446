"""From what a model said in a turn to its calls, for each way in which models write them.

| format | a call |
|---|---|
| `hermes` | `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`: Hermes, Qwen |
| `llama` | `{"name": "f", "parameters": {"a": 1}}` as the whole turn: Llama 3 |
| `pythonic` | `[f(a=1), g(b="x")]` as the whole turn: Llama 3.2 and 4 |
| `brackets` | `[f text]` anywhere: short enough for a small model to learn |
| `tokenizer` | whatever the tokenizer's `response_template` says |

What looks like a call and is none becomes a `BadCall`, with a reason that the model can be told. No
reader of ours raises anything or takes time out of proportion to the text. A thought, which ends
with `</think>`, makes no calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ....dataflow.errors import ConfigError, nearest
from ...models.tokenizer import END_MARK, ChatTemplateError
from ...models.tool_text import PROBE_TOOL
from ..environment import BadCall, ToolCall
from .call_values import MOST_CALLS, bad_call, call_of
from .json_calls import hermes_calls, llama_calls
from .pythonic_calls import pythonic_calls

if TYPE_CHECKING:
    from ...models.tokenizer import Tokenizer

FormatName: TypeAlias = Literal["hermes", "llama", "pythonic", "brackets", "tokenizer"]
FORMATS: tuple[FormatName, ...] = ("hermes", "llama", "pythonic", "brackets", "tokenizer")

CallParser: TypeAlias = Callable[[str], tuple[str, tuple[ToolCall | BadCall, ...]]]
"""From what a model said to what of it is no call, and the calls in order."""

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NAMED = re.compile(r"([A-Za-z_]\w*)(?:\s+(.*))?", re.DOTALL)
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_MOST_TEMPLATE_CHARS = 1 << 16
"""What a tokenizer's own parser is given: how long it takes is not ours to say."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls.

    Raises:
        ConfigError: If there is no such format.
    """

    format: FormatName
    """One of `FORMATS`."""
    function: str | None = None
    """For `brackets`: what every bracket calls, so that `[12*7]` is a call; else the first word in
    the brackets names it."""
    argument: str = "text"
    """For `brackets`: the name of the only argument."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(
                f"format '{self.format}' of calls is not known{nearest(self.format, FORMATS)}\n"
                f"    use one of {', '.join(FORMATS)}"
            )

    def build(
        self, tokenizer: Tokenizer | None = None, schemas: Sequence[Mapping[str, Any]] = ()
    ) -> CallParser:
        """Make the parser.

        Args:
            tokenizer: For `tokenizer`: whose `response_template` is used.
            schemas: For `tokenizer`: those of the tools, by which texts become numbers.

        Raises:
            ConfigError: If the tokenizer does not say how to parse what the model says.
        """
        if self.format == "tokenizer":
            return _after_thought(_template_parser(tokenizer, schemas))
        if self.format == "brackets":
            return _after_thought(lambda text: _bracket_calls(text, self.function, self.argument))
        readers = {"hermes": hermes_calls, "llama": llama_calls, "pythonic": pythonic_calls}
        return _after_thought(readers[self.format])


def parse_calls(text: str, format: FormatName) -> tuple[str, tuple[ToolCall | BadCall, ...]]:
    """What of a turn is no call, and the calls in order; see `CallFormat` for options.

    Args:
        text: What a model said.
        format: Any of `FORMATS` but `tokenizer`.
    """
    return CallFormat(format=format).build()(text)


def format_of(chat_template: str) -> FormatName | None:
    """The format that a chat template renders calls in, as far as its marks tell.

    Args:
        chat_template: Source of the template.

    Returns:
        None if nothing in it tells.
    """
    if "<tool_call>" in chat_template and '"arguments"' in chat_template.replace("\\", ""):
        return "hermes"
    if "<|python_start|>" in chat_template or "[func_name1(" in chat_template:
        return "pythonic"
    if '"parameters"' in chat_template.replace("\\", "") and "ipython" in chat_template:
        return "llama"
    return None


def format_shown(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> FormatName | None:
    """Return the format of calls of a tokenizer whose chat template shows tools.

    A call is rendered and read again: the format is the one whose reader finds it. Where none does,
    marks in the template tell, and then whether the tokenizer has a `response_template`.

    Args:
        tokenizer: Holds the template.
        variables: Further ones of the template.

    Returns:
        None if calls could not be read.
    """
    call = ToolCall(PROBE_TOOL["function"]["name"], {"penstock9key": 1})
    function = {"name": call.name, "arguments": dict(call.arguments)}
    made = {"role": "assistant", "content": ""}
    made = {**made, "tool_calls": [{"type": "function", "function": function}]}
    asked = [{"role": "user", "content": "a"}]
    with suppress(ChatTemplateError):
        begun = tokenizer.render(asked, tools=[PROBE_TOOL], **variables)
        text = tokenizer.render(
            [*asked, made], tools=[PROBE_TOOL], add_generation_prompt=False, **variables
        )
        turn = text.removeprefix(begun).replace(str(tokenizer.backend.eos_token), END_MARK)
        turn = turn.partition(END_MARK)[0]
        for name in ("hermes", "llama", "pythonic"):
            if parse_calls(turn, name)[1] == (call,):
                return name
    template = variables.get("chat_template") or tokenizer.backend.chat_template
    if (name := format_of(str(template))) is not None:
        return name
    return "tokenizer" if getattr(tokenizer.backend, "response_template", None) else None


def _after_thought(read: CallParser) -> CallParser:
    """A parser that leaves a thought at the beginning unread."""

    def parse(text: str) -> tuple[str, tuple[ToolCall | BadCall, ...]]:
        thought, mark, said = text.partition(_THOUGHT_END)
        if mark and not text.lstrip().startswith(_THOUGHT):  # a prompt may have begun the thought
            content, calls = read(text)
            if mark not in content and all(isinstance(call, ToolCall) for call in calls):
                return content, calls  # it stands in an argument
        if mark:
            content, calls = read(said)
            return f"{thought}{mark}{said if not calls else content}".strip(), calls
        if text.lstrip().startswith(_THOUGHT):  # it was cut off while it thought
            return text.strip(), ()
        return read(text)

    return parse


def _bracket_calls(
    text: str, function: str | None, argument: str
) -> tuple[str, tuple[ToolCall | BadCall, ...]]:
    """`[name text]`, or `[text]` if the function is given, anywhere in a turn."""
    content: list[str] = []
    calls: list[ToolCall | BadCall] = []
    place = 0
    while (start := text.find("[", place)) >= 0:
        content.append(text[place:start])
        found = _BRACKETS.match(text, start)
        if len(calls) == MOST_CALLS:
            calls.append(bad_call(text[start:], f"a turn may make {MOST_CALLS} calls"))
            place = len(text)
        elif found is None:
            again = text.find("[", start + 1)
            place = len(text) if again < 0 else again
            why = "there is no ] at its end" if again < 0 else "a call stands within a call"
            calls.append(bad_call(text[start:place], why))
        else:
            place = found.end()
            calls.append(_bracket_call(found, function, argument))
    content.append(text[place:])
    return "".join(content).strip(), tuple(calls)


def _bracket_call(found: re.Match[str], function: str | None, argument: str) -> ToolCall | BadCall:
    inner = found[1].strip()
    if function is not None:
        return call_of(found[0], function, {argument: inner})
    named = _NAMED.fullmatch(inner)
    if named is None:
        return bad_call(found[0], "a call begins with the name of a tool")
    return call_of(found[0], named[1], {argument: named[2] or ""})


def _template_parser(
    tokenizer: Tokenizer | None, schemas: Sequence[Mapping[str, Any]]
) -> CallParser:
    """A parser that asks the tokenizer, which is a library's and may raise anything."""
    template = None if tokenizer is None else getattr(tokenizer.backend, "response_template", None)
    if tokenizer is None or template is None:
        raise ConfigError(
            "calls in format 'tokenizer' need a tokenizer with a response_template\n"
            f"    use one of {', '.join(FORMATS[:-1])}"
        )
    backend: Any = tokenizer.backend
    tools = [dict(schema) for schema in schemas]

    def parse(text: str) -> tuple[str, tuple[ToolCall | BadCall, ...]]:
        if len(text) > _MOST_TEMPLATE_CHARS:
            return "", (bad_call(text, f"longer than {_MOST_TEMPLATE_CHARS} characters"),)
        try:
            # The prompt is left out: what it begins of a turn, such as a thought, is not ours.
            message: Any = backend.parse_response(text, prefix="", tools=tools or None)
            said = message.get("content") or ""
            made = [call["function"] for call in message.get("tool_calls") or ()]
            calls = tuple(call_of(text, call["name"], call["arguments"]) for call in made)
        except Exception as error:  # of many kinds
            return "", (bad_call(text, f"the turn cannot be read: {error!s:.200}"),)
        return str(said).strip(), calls

    return parse
