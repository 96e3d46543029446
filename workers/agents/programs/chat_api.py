"""Chat completions in OpenAI's format: reading requests, and writing replies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...data.task import Message
from ..environment import BadCall, Reply, ToolCall
from ..tools.parsing import call_of, read_json

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias"),
)
"""Options of sampling, which the run decides."""
_WITHOUT_EFFECT = frozenset(
    (
        *("model", "messages", "tools", "stream", "stream_options", "logprobs", "max_tokens"),
        *("max_completion_tokens", "user", "metadata", "store", "service_tier", "reasoning_effort"),
        *("safety_identifier", "prompt_cache_key", "verbosity", "prompt_cache_retention"),
    )
)
"""Fields that are read below, or that ask for nothing that an answer would show."""
_ONE_VALUE: Mapping[str, tuple[Any, ...]] = {
    "n": (1, None),
    "tool_choice": ("auto", "none", None),
    "parallel_tool_calls": (True, None),
    "response_format": ({"type": "text"}, None),
    "top_logprobs": (0, None),
    "stop": (None, "", []),
    "modalities": (["text"], None),
}
"""Fields with what alone can be done; the first is what to give."""


class Refused(Exception):
    """A request that is not answered, with the status of the response and a code of the API."""

    def __init__(self, why: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(why)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ChatRequest:
    """A turn that a client asks for."""

    messages: tuple[Message, ...]  # the conversation so far
    keys: tuple[str, ...]  # what of each message tells it from others, in the same order
    # Schemas of what the policy may call; none if it shall not.
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    model: str = ""
    stream: bool = False  # whether the answer comes as events
    include_usage: bool = False  # whether the last event counts tokens
    logprobs: bool = False
    overridden: tuple[str, ...] = ()  # fields of sampling that the client gave


def read_request(body: bytes) -> ChatRequest:
    given = _object(body)
    for name, allowed in _ONE_VALUE.items():
        if given.get(name) not in allowed:
            raise Refused(
                f"'{name}' is {_shown(given[name])}; give {_shown(allowed[0])}, or leave it out"
            )
    known = {*_WITHOUT_EFFECT, *_ONE_VALUE, *_SAMPLING}
    if unknown := sorted(given.keys() - known):
        raise Refused(f"'{unknown[0]}' is not known here; leave it out")
    said = given.get("messages")
    if not isinstance(said, list) or not said:
        raise Refused("'messages' is missing, or no list")
    messages = tuple(_message(one, f"messages[{n}]") for n, one in enumerate(cast(Any, said)))
    if messages[-1]["role"] == "assistant":
        raise Refused("the last message is the assistant's, not one to answer")
    for name in ("stream", "logprobs"):
        if given.get(name) not in (None, True, False):
            raise Refused(f"'{name}' is {_shown(given[name])}; true or false is expected")
    options = given.get("stream_options") or {}
    return ChatRequest(
        messages,
        tuple(map(message_key, messages)),
        () if given.get("tool_choice") == "none" else _tools(given.get("tools")),
        _max_tokens(given),
        str(given.get("model", "")),
        stream=given.get("stream") is True,
        include_usage=isinstance(options, dict) and bool(cast(Any, options).get("include_usage")),
        logprobs=given.get("logprobs") is True,
        overridden=tuple(name for name in _SAMPLING if given.get(name) is not None),
    )


def message_key(message: Message) -> str:
    """Identify a message; clients may number calls anew, and strip texts."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return json.dumps([message["role"], message["content"].strip(), calls], sort_keys=True)


def _object(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode().strip()
    except UnicodeDecodeError:
        raise Refused("the body is no text in UTF-8") from None
    found = read_json(text, 0)
    if isinstance(found, str):
        raise Refused(f"the body is no JSON: {found}")
    value, end = found
    if text[end:].strip() or not isinstance(value, dict):
        raise Refused("the body is not one JSON object")
    checked = call_of("", "request", cast(object, value))  # bounded depth, numbers, characters
    if isinstance(checked, BadCall):
        raise Refused(checked.why.replace("arguments", "fields"))
    return cast("dict[str, Any]", value)


def _message(given: Any, at: str) -> Message:
    role = given.get("role") if isinstance(given, dict) else None
    if role not in _ROLES:
        raise Refused(f"'{at}.role' is {_shown(role)}; one of {', '.join(_ROLES)} is expected")
    message: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(given.get("content"), f"{at}.content"),
    }
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Refused(f"'{at}.tool_calls' is no list")
    if role == "assistant" and calls:
        message["tool_calls"] = [
            _call(call, f"{at}.tool_calls[{n}]") for n, call in enumerate(cast("list[Any]", calls))
        ]
    if role == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id", ""))
    if isinstance(given.get("name"), str):
        message["name"] = given["name"]
    return message


def _text(content: Any, at: str) -> str:
    """Join a content, which may be in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in cast("Sequence[Any]", content if isinstance(content, list) else [content]):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise Refused(f"'{at}' has a part that is no text; the policy reads texts alone")
        texts.append(text)
    return "".join(texts)


def _function_of(given: Any) -> dict[str, Any] | None:
    """The function that a call or a tool names; None if it names nothing."""
    function = given.get("function") if isinstance(given, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return cast("dict[str, Any]", function) if named else None


def _call(given: Any, at: str) -> dict[str, Any]:
    """A call that the assistant made, with its arguments as an object."""
    function = _function_of(given)
    if function is None:
        raise Refused(f"'{at}.function.name' is missing")
    arguments = function.get("arguments") or "{}"
    found = read_json(arguments, 0) if isinstance(arguments, str) else (arguments, 0)
    if isinstance(found, str) or not isinstance(found[0], dict):
        raise Refused(f"'{at}.function.arguments' is no JSON object")
    checked = call_of("", function["name"], found[0])  # as the whole body, of which it is a text
    if isinstance(checked, BadCall):
        raise Refused(f"'{at}.function.arguments': {checked.why}")
    return {"type": "function", "function": {"name": function["name"], "arguments": found[0]}}


def _tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise Refused("'tools' is no list")
    for n, tool in enumerate(cast("list[Any]", given)):
        if _function_of(tool) is None:
            raise Refused(f"'tools[{n}]' is no function with a name")
    return tuple(given)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = given.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refused(f"'{name}' is {_shown(value)}; a number above 0 is expected")
        return value
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True)
class ChatAnswer:
    name: str  # tells it from all others of the run
    reply: Reply
    with_calls: bool  # whether calls are read as such
    pieces: tuple[str, ...]  # text of each sampled token
    logprobs: tuple[float, ...]
    num_prompt_tokens: int

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Its calls; what looks like a call and is none stays in the text."""
        calls = tuple(call for call in self.reply.calls if isinstance(call, ToolCall))
        return calls if self.with_calls and len(calls) == len(self.reply.calls) else ()

    @property
    def message(self) -> dict[str, Any]:
        if not self.calls:
            return {"role": "assistant", "content": self.reply.text}
        made = [{"name": call.name, "arguments": dict(call.arguments)} for call in self.calls]
        return {
            "role": "assistant",
            "content": self.reply.content,
            "tool_calls": [{"type": "function", "function": one} for one in made],
        }

    @property
    def finish_reason(self) -> str:
        if self.calls:
            return "tool_calls"
        return "stop" if self.reply.finished else "length"


def completion(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    content = answer.message["content"]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.calls:
        message["tool_calls"] = _tool_calls(answer)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(answer) if request.logprobs else None,
        "finish_reason": answer.finish_reason,
    }
    head = _head(answer, request, "chat.completion")
    return {**head, "choices": [choice], "usage": _usage(answer)}


def events(answer: ChatAnswer, request: ChatRequest) -> Iterator[str]:
    head = _head(answer, request, "chat.completion.chunk")

    def event(delta: Mapping[str, Any], reason: str | None = None, own: slice = slice(0)) -> str:
        shown = _logprobs(answer, own) if request.logprobs and own != slice(0) else None
        choice = {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": reason}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    yield event({"role": "assistant", "content": ""})
    if answer.calls:
        calls = [{"index": n, **call} for n, call in enumerate(_tool_calls(answer))]
        delta = {"content": answer.message["content"], "tool_calls": calls}
        yield event(delta, own=slice(None))
    elif "".join(answer.pieces) == answer.reply.text:
        for number, text in enumerate(answer.pieces):
            yield event({"content": text}, own=slice(number, number + 1))
    else:  # a character of several tokens: they spell it together alone
        yield event({"content": answer.reply.text}, own=slice(None))
    yield event({}, answer.finish_reason)
    if request.include_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _usage(answer)})}\n\n"
    yield "data: [DONE]\n\n"


def error_body(refused: Refused) -> dict[str, Any]:
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def _head(answer: ChatAnswer, request: ChatRequest, kind: str) -> dict[str, Any]:
    # No time: the same turn is the same answer.
    name = request.model or "policy"
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": 0, "model": name}


def _tool_calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{answer.name}_{n}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for n, call in enumerate(answer.calls)
    ]


def _logprobs(answer: ChatAnswer, own: slice = slice(None)) -> dict[str, Any]:
    found = zip(answer.pieces[own], answer.logprobs[own], strict=True)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logprob in found
        ],
        "refusal": None,
    }


def _usage(answer: ChatAnswer) -> dict[str, int]:
    read, said = answer.num_prompt_tokens, len(answer.logprobs)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
