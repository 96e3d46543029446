"""Readers of calls, for each way in which models write them.

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

import ast
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast

from ....dataflow.errors import ConfigError
from ...models.tokenizer import END_MARK, PROBE_TOOL, ChatTemplateError
from ..environment import BadCall, ToolCall

if TYPE_CHECKING:
    from ...models.tokenizer import Tokenizer


FormatName: TypeAlias = Literal["hermes", "llama", "pythonic", "brackets", "tokenizer"]
FORMATS: tuple[FormatName, ...] = ("hermes", "llama", "pythonic", "brackets", "tokenizer")

Call: TypeAlias = ToolCall | BadCall
CallParser: TypeAlias = Callable[[str], tuple[str, tuple[Call, ...]]]
"""From what a model said to what of it is no call, and the calls in order."""

MOST_CALLS = 64  # calls that are read of one turn: what follows them is one bad call

_DEEPEST = 32  # lists and objects within each other
_LONGEST_NAME = 256
_MOST_BITS = 4096  # of an integer; Python itself refuses to print much larger ones
_SHOWN = 2000  # characters of a bad call that are kept
_SPACE = re.compile(r"\s*")


class _Refused(ValueError):
    """A value that is refused; the model is told the text."""


def skip_space(text: str, start: int) -> int:
    """Return the place of the next character that is no white space."""
    found = _SPACE.match(text, start)
    assert found is not None, "it matches nothing, too"
    return found.end()


def read_json(text: str, start: int) -> tuple[Any, int] | str:
    """Read a JSON value at the beginning of some text; a text says why there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            return "the JSON is cut off"
        return f"this is not JSON: {error.msg} at character {error.pos - start}"
    except _Refused as error:
        return str(error)
    except RecursionError:
        return f"lists and objects are nested deeper than {_DEEPEST}"
    except ValueError:  # an integer of thousands of digits
        return "a number is too large"


def call_of(written: str, name: object, arguments: object) -> Call:
    """A call, if these are a name and arguments."""
    try:
        if not isinstance(name, str) or not name:
            raise _Refused("the name of the tool is missing, or no text")
        if len(name) > _LONGEST_NAME:
            raise _Refused(f"the name of the tool is longer than {_LONGEST_NAME} characters")
        if not isinstance(arguments, dict):
            raise _Refused("the arguments are not an object")
        _check(name, 0)
        _check(cast(object, arguments), 0)
    except _Refused as error:
        return bad_call(written, str(error))
    return ToolCall(name, cast("dict[str, Any]", arguments))


def bad_call(written: str, why: str) -> BadCall:
    """A call that cannot be made; of a long one the beginning is kept."""
    return BadCall(written[:_SHOWN], why)


def _check(value: object, depth: int) -> None:
    if depth > _DEEPEST:
        raise _Refused(f"lists and objects are nested deeper than {_DEEPEST}")
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                why = "a text has half of a surrogate pair, which is no character"
                raise _Refused(why) from None
        case int() if value.bit_length() > _MOST_BITS:
            raise _Refused("a number is too large")
        case float() if not math.isfinite(value):
            raise _Refused("a number is not finite")
        case Mapping():
            for key, item in cast("Mapping[object, object]", value).items():
                if not isinstance(key, str):
                    raise _Refused("a key of an object is no text")
                _check(key, depth + 1)
                _check(item, depth + 1)
        case list() | tuple():
            for item in cast("Sequence[object]", value):
                _check(item, depth + 1)
        case int() | float() | None:
            pass
        case _:
            raise _Refused(f"a {type(value).__name__} is no JSON value")


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no JSON number")


def distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _Refused(f"the key {twice[:_LONGEST_NAME]!r} stands twice in an object")
    return found


_DECODER = json.JSONDecoder(parse_constant=_constant, object_pairs_hook=distinct)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_UNTAGGED = re.compile(r'\{\s*"(?:name|type)"\s*:')
"""Beginning of a call that has no tag; another object may be an answer."""


def _scanned(
    text: str, opening: str, read: Callable[[str, int], tuple[Call, int]]
) -> tuple[str, tuple[Call, ...]]:
    """Read a call, and where it ends, wherever its opening stands; the rest is content."""
    content: list[str] = []
    calls: list[Call] = []
    place = 0
    while (start := text.find(opening, place)) >= 0:
        content.append(text[place:start])
        if len(calls) == MOST_CALLS:
            calls.append(bad_call(text[start:], f"a turn may make {MOST_CALLS} calls"))
            place = len(text)
            break
        call, place = read(text, start)
        calls.append(call)
    content.append(text[place:])
    return "".join(content).strip(), tuple(calls)


def hermes_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times."""
    return _scanned(text, _OPEN, _tagged)


def _tagged(text: str, start: int) -> tuple[Call, int]:
    """The call at a tag, and where it ends.

    The value decides where it ends, as its texts may contain the tags. Where there is no value,
    the next tag does.
    """
    place = skip_space(text, start + len(_OPEN))
    read = read_json(text, place)
    if not isinstance(read, str):
        value, end = read
        end = skip_space(text, end)
        if text.startswith(_CLOSE, end):
            end += len(_CLOSE)
            return _named(text[start:end], value, "arguments"), end
        read = f"there is no {_CLOSE} after the object"
    end = text.find(_CLOSE, place)
    again = text.find(_OPEN, place, end if end >= 0 else len(text))
    if again >= 0:
        return bad_call(text[start:again], read), again
    end = len(text) if end < 0 else end + len(_CLOSE)
    return bad_call(text[start:end], read), end


def _named(written: str, value: object, *keys: str) -> Call:
    """The call that an object describes; its arguments are at the first of these keys it has."""
    if not isinstance(value, dict):
        return bad_call(written, "a call is an object with a name and arguments")
    fields = cast("dict[str, Any]", value)
    arguments = next((fields[key] for key in keys if key in fields), None)
    if arguments is None:
        return bad_call(written, f"the object has no {keys[0]}")
    return call_of(written, fields.get("name"), arguments)


def llama_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    """A turn that is `{"name": ..., "parameters": {...}}`, or several of them with `;` between.

    A turn that has the tag `<|python_tag|>` must be calls from there on. Another turn is an answer
    unless it begins like a call; so an answer may be JSON.
    """
    content, tag, said = text.partition(_PYTHON_TAG)
    if not tag:
        content, said = "", text
        if not _UNTAGGED.match(text, skip_space(text, 0)):
            return text.strip(), ()
    calls: list[Call] = []
    place = skip_space(said, 0)
    while not calls or place < len(said):
        if len(calls) == MOST_CALLS:
            calls.append(bad_call(said[place:], f"a turn may make {MOST_CALLS} calls"))
            break
        read = read_json(said, place)
        if isinstance(read, str):
            calls.append(bad_call(said[place:], read))
            break
        end = skip_space(said, read[1])
        calls.append(_named(said[place:end], read[0], "parameters", "arguments"))
        if end < len(said) and said[end] != ";":
            calls.append(bad_call(said[end:], "calls are separated by a semicolon"))
            break
        place = skip_space(said, end + 1)
    return content.strip(), tuple(calls)


_TAGS = ("<|python_start|>", "<|python_end|>")
_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_TOKENS = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<text>'''(?:[^'\\]++|\\[\s\S]|'(?!''))*'''"
    r'|"""(?:[^"\\]++|\\[\s\S]|"(?!""))*"""'
    r"|'(?:[^'\\\n]++|\\[\s\S])*'"
    r'|"(?:[^"\\\n]++|\\[\s\S])*")'
    rf"|(?P<name>{_NAME})"
    r"|(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<open>[\[({])|(?P<close>[\])}])|(?P<mark>[,:=])",
    re.ASCII,
)
_VALUES = ("text", "name", "number")
_LONGEST = 1 << 17
"""Characters that are read; Python's parser takes most of a second for as many small literals."""
_MOST_BRACKETS = 40  # within each other


def pythonic_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    """Read a turn that is a list of calls of functions.

    Nothing is evaluated. The text must first be made of a few kinds of tokens, nested no deeper
    than some bound, so that Python's parser can neither run out of stack nor take long; of the tree
    only literals and calls with named arguments are accepted.
    """
    said = text.strip()
    if said.startswith(_TAGS[0]):
        said = said.removeprefix(_TAGS[0]).removesuffix(_TAGS[1]).strip()
    if not _BEGINS.match(said):
        return text.strip(), ()
    try:
        return "", _calls(said)
    except _Refused as error:
        return "", (bad_call(said, str(error)),)


def _calls(said: str) -> tuple[Call, ...]:
    _check_tokens(said)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of an escape that is none
            tree = ast.parse(said, mode="eval").body
    except SyntaxError as error:
        raise _Refused(f"this is not a list of calls: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError):  # such as a number of 5,000 digits
        raise _Refused("this cannot be read as a list of calls") from None
    if not isinstance(tree, ast.List):
        raise _Refused("a turn that makes calls is one list of them")
    if len(tree.elts) > MOST_CALLS:
        raise _Refused(f"a turn may make {MOST_CALLS} calls")
    return tuple(_call(said, node) for node in tree.elts)


def _check_tokens(said: str) -> None:
    """Refuse what literals and calls are not made of, before Python's parser sees it."""
    if len(said) > _LONGEST:
        raise _Refused(f"the calls are longer than {_LONGEST} characters")
    place = depth = 0
    before = ""
    while place < len(said):
        token = _TOKENS.match(said, place)
        if token is None:
            raise _Refused(f"{said[place]!r} at character {place} belongs to no literal")
        kind = token.lastgroup or ""
        depth += (kind == "open") - (kind == "close")
        if kind in _VALUES and before in _VALUES:
            raise _Refused(f"there is no comma before character {place}")
        if kind == "name" and token.end() - place > _LONGEST_NAME:
            raise _Refused(f"a name is longer than {_LONGEST_NAME} characters")
        if depth > _MOST_BRACKETS:
            raise _Refused(f"brackets are nested deeper than {_MOST_BRACKETS}")
        before = before if kind == "space" else kind
        place = token.end()
    if depth > 0:
        raise _Refused("the list of calls is cut off")


def _call(said: str, node: ast.expr) -> Call:
    start, end = node.col_offset, node.end_col_offset
    single = node.lineno == node.end_lineno == 1 and said.isascii()
    written = said[start:end] if single else said
    try:
        if not isinstance(node, ast.Call):
            raise _Refused("the list may hold calls only")
        if node.args:
            raise _Refused("name every argument, as in f(a=1)")
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise _Refused("every argument has a name of its own")
            arguments[keyword.arg] = _value(keyword.value)
        return call_of(written, _dotted(node.func), arguments)
    except _Refused as error:
        return bad_call(written, str(error))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise _Refused("what is called has no name")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="true" | "false" as name):
            return name == "true"
        case ast.Name(id="null"):
            return None
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return distinct([*zip(map(_key, keys), map(_value, values), strict=True)])
        case ast.Name(id=name):
            raise _Refused(f"{name} is no literal; write texts in quotes")
        case _:
            raise _Refused(f"a {type(node).__name__} is no JSON value")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _Refused("a key of an object is a text")


_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NAMED = re.compile(r"([A-Za-z_]\w*)(?:\s+(.*))?", re.DOTALL)
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_MOST_TEMPLATE_CHARS = 1 << 16
"""Longest turn that a tokenizer's own parser is given: how long it takes is not ours to say."""


def call_parser(format: FormatName, tokenizer: Tokenizer | None = None) -> CallParser:
    """The reader of a format, which leaves a thought at the beginning of a turn unread."""
    if format == "tokenizer":
        read = _template_parser(tokenizer)
    else:
        read = {
            "hermes": hermes_calls,
            "llama": llama_calls,
            "pythonic": pythonic_calls,
            "brackets": bracket_calls,
        }[format]

    def parse(text: str) -> tuple[str, tuple[Call, ...]]:
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


def format_of(chat_template: str) -> FormatName | None:
    """The format that a chat template renders calls in, as far as its marks tell."""
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
            if call_parser(name)(turn)[1] == (call,):
                return name
    template = variables.get("chat_template") or tokenizer.backend.chat_template
    if (name := format_of(str(template))) is not None:
        return name
    return "tokenizer" if getattr(tokenizer.backend, "response_template", None) else None


def bracket_calls(text: str) -> tuple[str, tuple[Call, ...]]:
    """`[name text]` anywhere in a turn."""
    return _scanned(text, "[", _bracketed)


def _bracketed(text: str, start: int) -> tuple[Call, int]:
    found = _BRACKETS.match(text, start)
    if found is None:
        again = text.find("[", start + 1)
        why = "there is no ] at its end" if again < 0 else "a call stands within a call"
        end = len(text) if again < 0 else again
        return bad_call(text[start:end], why), end
    named = _NAMED.fullmatch(found[1].strip())
    if named is None:
        return bad_call(found[0], "a call begins with the name of a tool"), found.end()
    return call_of(found[0], named[1], {"text": named[2] or ""}), found.end()


def _template_parser(tokenizer: Tokenizer | None) -> CallParser:
    template = None if tokenizer is None else getattr(tokenizer.backend, "response_template", None)
    if tokenizer is None or template is None:
        raise ConfigError(
            "calls in format 'tokenizer' need a tokenizer with a response_template\n"
            f"    use one of {', '.join(FORMATS[:-1])}"
        )
    backend: Any = tokenizer.backend

    def parse(text: str) -> tuple[str, tuple[Call, ...]]:
        if len(text) > _MOST_TEMPLATE_CHARS:
            return "", (bad_call(text, f"longer than {_MOST_TEMPLATE_CHARS} characters"),)
        try:
            # The prompt is left out: what it begins of a turn, such as a thought, is not ours.
            message: Any = backend.parse_response(text, prefix="", tools=None)
            said = message.get("content") or ""
            made = [call["function"] for call in message.get("tool_calls") or ()]
            calls = tuple(call_of(text, call["name"], call["arguments"]) for call in made)
        except Exception as error:  # of many kinds
            return "", (bad_call(text, f"the turn cannot be read: {error!s:.200}"),)
        return str(said).strip(), calls

    return parse
