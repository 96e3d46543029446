"""A badly behaved MCP server of the standard library alone, which starts at once.

Its argument says what is wrong with it from the beginning; its tools misbehave when called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

TOOLS = ("add", "vanish", "hang", "ignore", "babble", "refuse", "odd", "flood", "count", "leave")


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "bad", "version": "0"},
        }
    if method == "tools/list":
        schema = {"type": "object", "properties": {}}
        return {"tools": [{"name": name, "inputSchema": schema} for name in TOOLS]}
    return called(params["name"], params.get("arguments") or {})


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    text: str = name
    if name == "add":
        text = str(arguments["a"] + 1)
    elif name == "count":
        COUNTED.append(name)
        text = str(len(COUNTED))
    elif name == "vanish":
        mark = arguments.get("once")
        if mark is None or not os.path.exists(mark):
            if mark is not None:
                open(mark, "w").close()
            os._exit(3)
    elif name == "hang":
        time.sleep(1000)
    elif name == "ignore":
        return None
    elif name == "babble":
        os.write(1, b"hello there\n\xff\xff\n{}\n[1\n")
        os.write(1, b'{"jsonrpc": "2.0", "id": 999, "result": {}}\n')
    elif name == "odd":
        return {"content": "not a list"}
    elif name == "flood":
        text = "x" * 5_000_000
    elif name == "leave":
        text = str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    return {"content": [{"type": "text", "text": text}]}


COUNTED: list[str] = []


def serve() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        name = message.get("params", {}).get("name")
        if message["method"] in ("initialize", "tools/list", "tools/call") and name != "refuse":
            result = answer(message["method"], message.get("params") or {})
            if result is None:
                continue
            reply["result"] = result
        else:
            reply["error"] = {"code": -32601, "message": "this server does not do that"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if "mute" in sys.argv:
        time.sleep(1000)
    if "dead" in sys.argv:
        sys.exit("this server does not want to")
    serve()
