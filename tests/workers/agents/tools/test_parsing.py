"""Reading calls: what is rendered is read back, and nothing that a model writes is too much."""

from __future__ import annotations

import json
import keyword
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import BadCall, ToolCall
from penstock.workers.agents.tools.parsing import FORMATS, Call, FormatName, call_parser, format_of
from penstock.workers.models.tokenizer import TokenizerSpec

OURS: tuple[FormatName, ...] = FORMATS[:-1]


def parse_calls(text: str, format: FormatName) -> tuple[str, tuple[Call, ...]]:
    return call_parser(format)(text)


_NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name) and name not in ("false", "null", "true")
)
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS
    | st.sampled_from(["</tool_call>", "<tool_call>", "[f(a=1)]", '"; {"', "\\", "'''", "\n\r"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)
_CALLS = st.lists(
    st.builds(ToolCall, _NAMES, st.dictionaries(_NAMES, _VALUES, max_size=3)),
    min_size=1,
    max_size=4,
)
_PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<|python_start|>"),
    *('{"name": "f", ', '"arguments": {', '"parameters": {}}', "}", "{", "[", "]", "(", ")", "f("),
    *("a=1", ",", ";", '"', "'", "\\", "\n", "1e999", "NaN", "-", "9" * 50, "\ud800", "é", "f.g"),
    *("lambda: 0", "**{}", "*[]", "__import__", "0x10", "1_0", "b''", "f'{x}'", "...", "{1}", "#"),
]


def _rendered(calls: list[ToolCall], format: FormatName) -> str:
    if format == "hermes":
        return "\n".join(
            f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>"
            for c in calls
        )
    if format == "llama":
        return "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)
    written = (
        f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})"
        for c in calls
    )
    return f"[{', '.join(written)}]"


@pytest.mark.slow
@pytest.mark.parametrize("format", ["hermes", "llama", "pythonic"])
@given(calls=_CALLS)
@example(calls=[ToolCall("f", {"a": "</think>"})])
def test_a_rendered_call_is_read_back(format: FormatName, calls: list[ToolCall]) -> None:
    content, read = parse_calls(_rendered(calls, format), format)

    assert content == ""
    assert list(read) == calls


@given(name=_NAMES, text=_TEXTS)
def test_a_bracket_is_read_back(name: str, text: str) -> None:
    inner = text.replace("[", "(").replace("]", ")").strip()

    content, read = parse_calls(f"so [{name} {inner}] is", "brackets")

    assert content == "so  is"
    assert read == (ToolCall(name, {"text": inner}),)


@pytest.mark.parametrize("format", OURS)
@given(text=st.text() | st.lists(st.sampled_from(_PIECES) | st.text(max_size=3)).map("".join))
@example(text="")
@example(text="[f(a=-'x')]")
@example(text="[f(a=--1)]")
@example(text='[f(a="\\N{x}")]')
@example(text='[f(a="\\x")]')
@example(text="[f(a='\x00')]")
@example(text="[f(a=1)][0]")
@example(text="[f(a=1) for]")
@example(text="[f(a=)]")
@example(text="[f(a=1, a=1)]")
@example(text="[class(a=1)]")
@example(text='<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>')
def test_no_text_is_too_much(format: FormatName, text: str) -> None:
    content, calls = parse_calls(text, format)

    assert len(content) <= len(text)
    for call in calls:
        assert isinstance(call, ToolCall) or (call.why and len(call.why) < 300)
        if isinstance(call, ToolCall):
            json.dumps(
                [call.name, dict(call.arguments)], allow_nan=False, ensure_ascii=False
            ).encode()


_LONG = 1 << 20
_FLOODS = {
    "tags": "<tool_call>" * (_LONG // 11),
    "open calls": '<tool_call>{"name": "f", ' * (_LONG // 25),
    "calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * (_LONG // 53),
    "nested lists": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * _LONG,
    "nested objects": '{"name": "f", "parameters": ' + '{"a":' * (_LONG // 5),
    "spaces": "<tool_call>" + " " * _LONG,
    "digits": '{"name": "f", "parameters": {"a": ' + "9" * _LONG + "}}",
    "llama calls": '{"name": "f", "parameters": {}};' * (_LONG // 31),
    "semicolons": '{"name": "f", "parameters": {}}' + ";" * _LONG,
    "brackets": "[" * _LONG,
    "open bracket": "[f " + "x" * _LONG,
    "pythonic calls": "[" + "f(a=1)," * 15_000 + "]",
    "pythonic nested": "[f(a=" + "[" * 100_000,
    "pythonic minus": "[f(a=" + "-" * 100_000 + "1)]",
    "pythonic not": "[f(a=" + "not " * 30_000 + "1)]",
    "pythonic attributes": "[f(a=x" + ".x" * 50_000 + ")]",
    "pythonic braces": "[f(a=" + "{[(" * 12 + "1",
    "pythonic quotes": "[f(a=" + "'" * 100_000 + ")]",
    "pythonic open text": "[f(a='" + "\\'" * 60_000,
    "pythonic digits": "[f(a=" + "9" * 100_000 + ")]",
    "pythonic long": '[f(a="' + "x" * _LONG + '")]',
    "thoughts": "<think>" * (_LONG // 7),
}


@pytest.mark.parametrize("format", OURS)
@pytest.mark.parametrize("flood", _FLOODS)
def test_a_flood_is_read_in_little_time_and_into_few_calls(format: FormatName, flood: str) -> None:
    _, calls = parse_calls(_FLOODS[flood], format)

    assert len(calls) <= 65
    assert sum(len(call.text) for call in calls if isinstance(call, BadCall)) <= 65 * 2000


@pytest.mark.parametrize(
    ("format", "text", "why"),
    [
        ("hermes", '<tool_call>{"name": "f", "argum', "the JSON is cut off"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}',
         "there is no </tool_call> after the object"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "the object has no arguments"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>',
         "the name of the tool is missing, or no text"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
         "the arguments are not an object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
         "the key 'a' stands twice in an object"),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
         "the key 'name' stands twice in an object"),
        ("llama", '{"name": "f", "parameters": {"a": [{"b": 1, "c": 2, "b": 1}]}}',
         "the key 'b' stands twice in an object"),
        ("pythonic", '[f(a={"b": 1, "b": 2})]', "the key 'b' stands twice in an object"),
        ("pythonic", "[f(a=1, a=2)]",
         "every argument has a name of its own"),
        ("hermes", "<tool_call>[1]</tool_call>", "a call is an object with a name and arguments"),
        ("hermes", "<tool_call>f(1)</tool_call>",
         "this is not JSON: Expecting value at character 0"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
         "NaN is no JSON number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
         "a number is not finite"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
         "a text has half of a surrogate pair, which is no character"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 40 + "]" * 40
         + "}}</tool_call>", "lists and objects are nested deeper than 32"),
        ("llama", '{"name": "f", "parameters": {}} and so on',
         "calls are separated by a semicolon"),
        ("llama", "<|python_tag|>", "the JSON is cut off"),
        ("pythonic", "[f(a=1)", "the list of calls is cut off"),
        ("pythonic", "[f(1)]", "name every argument, as in f(a=1)"),
        ("pythonic", "[f(a=x)]", "x is no literal; write texts in quotes"),
        ("pythonic", "[f(a=g(b=1))]", "a Call is no JSON value"),
        ("pythonic", "[f(a={1})]", "a Set is no JSON value"),
        ("pythonic", "[f(a={1: 2})]", "a key of an object is a text"),
        ("pythonic", "[f(a=b'x')]", "there is no comma before character 6"),
        ("pythonic", "[f(a=1+1)]", "'+' at character 6 belongs to no literal"),
        ("pythonic", "[f(a=1), 2]", "the list may hold calls only"),
        ("brackets", "[12*7]", "a call begins with the name of a tool"),
        ("brackets", "[f 12", "there is no ] at its end"),
        ("brackets", "[f [g 1]]", "a call stands within a call"),
    ],
)  # fmt: skip
def test_why_a_call_is_none(format: FormatName, text: str, why: str) -> None:
    _, calls = parse_calls(text, format)

    assert [call.why for call in calls if isinstance(call, BadCall)] == [why]


def test_text_around_calls_is_the_content_and_a_thought_makes_no_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    assert parse_calls(f"Let me see. {call} ", "hermes") == ("Let me see.", (ToolCall("f"),))
    assert parse_calls(f"<think>{call}</think>42", "hermes") == (f"<think>{call}</think>42", ())
    assert parse_calls(f"hm</think>{call}", "hermes") == ("hm</think>", (ToolCall("f"),))
    assert parse_calls(f"<think>{call}", "hermes") == (f"<think>{call}", ())
    assert parse_calls('{"answer": 3}', "llama") == ('{"answer": 3}', ())
    assert parse_calls("[1, 2]", "pythonic") == ("[1, 2]", ())


def test_of_nested_calls_the_inner_one_counts() -> None:
    _, calls = parse_calls(
        '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>', "hermes"
    )

    assert isinstance(calls[0], BadCall)
    assert calls[1:] == (ToolCall("f"),)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}', "hermes"),
        (
            "{%- if message.role == 'ipython' %}'{\"name\": \"' + n + '\", \"parameters\": '",
            "llama",
        ),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_a_template_tells_its_format(template: str, format: str | None) -> None:
    assert format_of(template) == format


def test_a_tokenizer_without_a_response_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="need a tokenizer with a response_template"):
        call_parser("tokenizer", TokenizerSpec(kind="byte").build())


def test_a_tokenizer_may_say_how_to_read_calls() -> None:
    tokenizer = TokenizerSpec(kind="byte").build()
    vars(tokenizer.backend)["response_template"] = {
        "start_anchor": "<assistant>",
        "fields": {
            "content": {"repeats": True, "join": ""},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    parse = call_parser("tokenizer", tokenizer)

    assert parse(f"so {_rendered([ToolCall('f', {'a': 1}), ToolCall('g')], 'hermes')}") == (
        "so",
        (ToolCall("f", {"a": 1}), ToolCall("g")),
    )
    assert parse("42") == ("42", ())
    for text in (
        "<tool_call>{",
        "<tool_call>3</tool_call>",
        "<tool_call>" + "[" * 5000,
        "x" * 70_000,
    ):
        content, (call,) = parse(text)
        assert content == ""
        assert isinstance(call, BadCall)
        assert len(call.why) < 300
