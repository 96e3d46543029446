"""What may be asked of the server, and how the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from penstock.workers.agents.programs.chat_api import Refused, message_key, read_request

HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def read(**fields: Any) -> Any:
    return read_request(json.dumps({"model": "any", "messages": [HELLO], **fields}).encode())


def test_a_plain_request() -> None:
    request = read()
    assert request.messages == (HELLO,)
    assert (request.model, request.tools, request.max_tokens) == ("any", (), None)
    assert not request.stream
    assert not request.logprobs
    assert request.overridden == ()


def test_parts_developers_and_calls_become_what_templates_take() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    system, user, assistant, tool = read(messages=said, tools=[TOOL]).messages
    assert system == {"role": "system", "content": "be brief"}
    assert user["content"] == "ab"
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1"}


def test_how_a_client_samples_is_noted_and_left_aside() -> None:
    request = read(temperature=0, top_p=0.9, seed=None, max_completion_tokens=5, max_tokens=7)
    assert request.overridden == ("temperature", "top_p")
    assert request.max_tokens == 5


def test_no_tools_where_none_shall_be_called() -> None:
    assert read(tools=[TOOL]).tools == (TOOL,)
    assert read(tools=[TOOL], tool_choice="none").tools == ()


def test_clients_may_number_calls_anew_and_strip_texts() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    one = {"role": "assistant", "content": " yes\n", "tool_calls": [{**call, "id": "1"}]}
    other = {"role": "assistant", "content": "yes", "tool_calls": [{**call, "id": "2"}]}
    assert message_key(one) == message_key(other)
    assert message_key(one) != message_key({**one, "tool_calls": []})


def _called(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2}, "'n' is 2; give 1, or leave it out"),
        ({"stop": ["x"]}, "'stop' is [\"x\"]; give null, or leave it out"),
        (
            {"tool_choice": "required"},
            '\'tool_choice\' is "required"; give "auto", or leave it out',
        ),
        ({"response_format": {"type": "json_object"}}, "'response_format' is {\"type\": "),
        ({"top_logprobs": 3}, "'top_logprobs' is 3; give 0"),
        ({"audio": {}}, "'audio' is not known here; leave it out"),
        ({"stream": "yes"}, "'stream' is \"yes\"; true or false is expected"),
        ({"logprobs": 2}, "'logprobs' is 2; true or false is expected"),
        ({"tools": {}}, "'tools' is no list"),
        ({"tools": [{}]}, "'tools[0]' is no function with a name"),
        ({"max_tokens": 0}, "'max_tokens' is 0; a number above 0 is expected"),
        ({"max_tokens": True}, "'max_tokens' is true"),
    ],
)
def test_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as caught:
        read(**fields)
    assert str(caught.value).startswith(said)
    assert caught.value.status == 400


ARGUMENTS = "'messages[0].tool_calls[0].function.arguments'"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([_called('{"a": "\\ud800"}'), HELLO], f"{ARGUMENTS}: a text has half of a surrogate pair"),
        ([_called('{"a": 1, "a": 2}'), HELLO], f"{ARGUMENTS} is no JSON object"),
        ([_called("[")], f"{ARGUMENTS} is no JSON object"),
        ([], "'messages' is missing, or no list"),
        ("hello", "'messages' is missing, or no list"),
        ([3], "'messages[0].role' is null; one of system, developer"),
        ([{"role": "robot"}], "'messages[0].role' is \"robot\""),
        ([HELLO, {"role": "assistant", "content": "x"}], "the last message is the"),
        ([{**HELLO, "content": [{"type": "image_url"}]}], "'messages[0].content' has a part that"),
        (
            [{"role": "assistant", "tool_calls": [{}]}, HELLO],
            "'messages[0].tool_calls[0].function.name' is missing",
        ),
        ([{**HELLO, "tool_calls": 3}], "'messages[0].tool_calls' is no list"),
    ],
)
def test_messages_that_are_refused(messages: Any, said: str) -> None:
    test_refused({"messages": messages}, said)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is no JSON"),
        (b"\xff", "the body is no text in UTF-8"),
        (b"[]", "the body is not one JSON object"),
        (b"{} {}", "the body is not one JSON object"),
        (b'{"messages": [' + b"[" * 100_000, "the body is no JSON: lists and objects are nested"),
        (b'{"messages": ' + b"[" * 40 + b"]" * 40 + b"}", "lists and objects are nested deeper"),
        (b'{"temperature": NaN}', "the body is no JSON: NaN is no JSON number"),
        (b'{"user": "\\ud800"}', "a text has half of a surrogate pair"),
    ],
)
def test_no_request(body: bytes, said: str) -> None:
    with pytest.raises(Refused) as caught:
        read_request(body)
    assert str(caught.value).startswith(said)
