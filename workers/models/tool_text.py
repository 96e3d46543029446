"""Tools for chat templates that have none: schemas, calls and results as text, as Hermes has them.

The words are those of the templates of Hermes and Qwen, so a model that has seen such data, or is
to be served with such a template, reads what it knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "penstock9tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
"""A tool whose name every template writes that shows tools."""

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    system: bool,
) -> list[Mapping[str, Any]]:
    """Return the conversation with everything about tools in the contents of its messages."""
    written: list[Mapping[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        plain = _plain(message)
        if is_result and follows_result:  # results of one turn are one message
            plain = {**plain, "content": f"{written.pop()['content']}\n{plain['content']}"}
        written.append(plain)
        follows_result = is_result
    if not tools:
        return written
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _introduced(written, _INTRODUCTION.format(schemas=schemas), system=system)


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message about tools with a role and a content alone; others as they are."""
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in message["tool_calls"]]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join([content, *calls] if content else calls)}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI has them
        return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments or "{}"}}}'
    return json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)


def _introduced(
    messages: list[Mapping[str, Any]], text: str, *, system: bool
) -> list[Mapping[str, Any]]:
    first = messages[0] if messages else {}
    role = "system" if system else "user"
    if first.get("role") not in ("system", role):
        return [{"role": role, "content": text}, *messages]
    before, after = (first["content"], text) if system else (text, first["content"])
    return [{**first, "content": f"{before}\n\n{after}"}, *messages[1:]]
