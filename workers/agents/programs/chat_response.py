"""Answers of the chat completions API: whole, or as events.

Events carry a turn that is complete: the API's clients take it token by token, in order, but the
first comes when the last has been sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..environment import Reply, ToolCall
from .chat_request import ChatRequest, Refused


@dataclass(frozen=True)
class Answer:
    """A turn of the policy.

    Attributes:
        name: Tells it from all others of the run.
        reply: What it said.
        with_calls: Whether calls are read as such.
        pieces: Text of each sampled token.
        logprobs: And its log-probability.
        num_prompt_tokens: What it had read before.
    """

    name: str
    reply: Reply
    with_calls: bool
    pieces: tuple[str, ...]
    logprobs: tuple[float, ...]
    num_prompt_tokens: int

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """What it called; what looks like a call and is none stays in the text."""
        calls = tuple(call for call in self.reply.calls if isinstance(call, ToolCall))
        return calls if self.with_calls and len(calls) == len(self.reply.calls) else ()

    @property
    def message(self) -> dict[str, Any]:
        """As chat templates have it: arguments are objects."""
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
        """Why it ends."""
        if self.calls:
            return "tool_calls"
        return "stop" if self.reply.finished else "length"


def completion(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """The answer as one object."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.message["content"]}
    message["refusal"] = None
    if answer.calls:
        message["tool_calls"] = _tool_calls(answer)
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(answer) if request.logprobs else None,
        "finish_reason": answer.finish_reason,
    }
    return {
        **_head(answer, request, "chat.completion"),
        "choices": [choice],
        "usage": _usage(answer),
    }


def events(answer: Answer, request: ChatRequest) -> Iterator[str]:
    """The answer as server-sent events."""
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
    """Why there is no answer, as clients of the API read it."""
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Any]:
    # No time: the same turn is the same answer.
    name = request.model or "policy"
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": 0, "model": name}


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{answer.name}_{n}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for n, call in enumerate(answer.calls)
    ]


def _logprobs(answer: Answer, own: slice = slice(None)) -> dict[str, Any]:
    """Of all sampled tokens, or of some."""
    found = zip(answer.pieces[own], answer.logprobs[own], strict=True)
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
            for text, logprob in found
        ],
        "refusal": None,
    }


def _usage(answer: Answer) -> dict[str, int]:
    read, said = answer.num_prompt_tokens, len(answer.logprobs)
    return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
