"""A user's own functions for the cases of `same_bits.py`: a reward, a tool, a program, servers.

As an MCP server it is started by path: `python benchmarks/same_bits_parts.py`. Processes that start
with it have a deadline, so it imports nothing large.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def closeness(prompt: str, response: str, answer: str | None) -> float:
    """Score the share of the answer's characters that stand where they should."""
    wanted = answer or prompt
    return sum(a == b for a, b in zip(wanted, response, strict=False)) / (1 + len(wanted))


def doubles_verifier() -> Callable[[str, str], float]:
    """Make the verifier of `Doubles` in a process of its own."""
    return lambda response, answer: closeness("", response, answer)


def add(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return str(a + b)


def asking_twice(base_url: str, api_key: str, prompt: str) -> str:
    """Ask the policy, and ask again with its answer: an agent program."""
    said: list[dict[str, str]] = [{"role": "user", "content": prompt}]
    for follow_up in ("So?", ""):
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            json.dumps({"model": "policy", "messages": said}).encode(),
            {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.loads(reply.read())["choices"][0]["message"]["content"]
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
    return answer


class _JudgeHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Give a verdict that the request alone decides."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        verdict = sum(map(ord, asked["messages"][-1]["content"])) % 11
        body = {"choices": [{"message": {"role": "assistant", "content": f"Score: {verdict}"}}]}
        reply = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def judge() -> Generator[str]:
    """Serve verdicts on this machine; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _JudgeHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def rows(name: str) -> list[dict[str, Any]]:
    """Give the rows of a file that a case reads: `sums.jsonl`, or `calls.jsonl` of an expert."""
    pairs = [(a, b) for a in range(6) for b in range(6)]
    if name == "sums.jsonl":
        return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    return [{"answer": str(a + b), **_called(a, b)} for a, b in pairs]


def _called(a: int, b: int) -> dict[str, Sequence[dict[str, str]]]:
    call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    return {
        "prompt": [{"role": "user", "content": f"{a}+{b}"}],
        "response": [
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": str(a + b)},
        ],
    }


if __name__ == "__main__":
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("penstock-same-bits")
    server.tool()(add)
    server.run("stdio")
