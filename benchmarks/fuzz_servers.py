"""Hostile clients of the page and of the endpoint of programs, and hostile MCP servers."""

from __future__ import annotations

import random
import sys

from fuzz_case import SCRIPT, Case, Content
from fuzz_ground import Ground, as_json, chat_words, fifo, kind, link, sparse

_WATCH = """\
import os, sys, time, urllib.error, urllib.request
from penstock.launch.main import main

read, write = os.pipe()
child = os.fork()
if child == 0:
    os.dup2(write, 1)
    os._exit(main(["watch"]))
try:
    url = ""
    while "http://" not in url:
        url = os.read(read, 4096).decode()
    url = url.splitlines()[-1].rstrip("/")
    late = []
    for view in ({views}):
        started = time.monotonic()
        try:
            with urllib.request.urlopen(url + "/" + view, timeout=10) as answer:
                answer.read()
        except urllib.error.HTTPError:
            pass  # an error status is an answer, too
        except OSError as error:
            late.append(f"{{view}}: {{error}}")
    if late:
        print("penstock: the page did not answer: " + late[0].partition("?")[0], file=sys.stderr)
        sys.exit(1)
finally:
    os.kill(child, 9)
    os.waitpid(child, 0)
"""
_OF_A_RUN = ("metrics", "curve", "run", "more", "timeline", "samples", "steps")
_VIEWS = ("api/runs", *(f"api/{name}?run=two&metric=step_s" for name in _OF_A_RUN), "graph?run=two")


@kind("watch: files that are none, or have holes")
def _(ground: Ground, chance: random.Random) -> Case:
    names = ("summary.json", "plan.json", "metrics.jsonl", "run.json", "trace.json", "events.jsonl",
             "groups.json", "scale.json", "graph.svg", "tags.json")  # fmt: skip
    name = chance.choice(names)
    content: Content = chance.choice((fifo, link("/dev/zero"), sparse(50 << 30, b'{"step": 1}\n')))
    views = ", ".join(map(repr, _VIEWS))
    files: dict[str, Content] = {f"runs/two/{name}": content}
    what = f"{name} is {getattr(content, '__qualname__', content)}"
    return Case((SCRIPT, _WATCH.format(views=views)), ground.runs, files, what, must_succeed=True)


_PROGRAM = """\
import http.client, json, socket
from urllib.parse import urlsplit


def answer(base_url, api_key, prompt):
    at = urlsplit(base_url)
    head = {{"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}}

    def ask(method, path, body=None, head=head):
        client = http.client.HTTPConnection(at.hostname, at.port, timeout=5)
        try:
            client.request(method, path, body, head)
            return client.getresponse().read()
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            client.close()

    path = at.path + "/chat/completions"
    said = [{{"role": "user", "content": prompt}}]
    {hostile}
    found = json.loads(ask("POST", path, json.dumps({{"model": "x", "messages": said}})) or "{{}}")
    return found["choices"][0]["message"]["content"] if "choices" in found else ""
"""
_HOSTILE = (
    'ask("GET", "/c/" + "9" * 5000 + "/v1/models", head={})',
    'ask("GET", "/c/" + "9" * 5000 + "/v1/models")',
    'ask("POST", path, b"\\xff\\xfe")',
    'ask("POST", path, b"[" * 100000)',
    'ask("POST", path, json.dumps({"model": "x", "messages": said + [{"role": "assistant", '
    '"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '
    '"{\\"a\\": \\"\\\\\\\\ud800\\"}"}}]}, {"role": "user", "content": "x"}]}))',
    'ask("POST", path, json.dumps({"model": "x", "messages": [{"role": "user", '
    '"content": "\\ud800"}]}))',
    'ask("POST", path, json.dumps({"model": 5, "messages": 5}))',
    'ask("POST", path, json.dumps({"model": "x", "messages": said, "max_tokens": 10**400}))',
    'ask("POST", path, json.dumps({"model": "x", "messages": said, "tools": [{"a": [[]]}]}))',
    'ask("GET", "/" + "a/" * 30000)',
    'ask("BREW", path)',
    "for _ in range(40):\n"
    "        s = socket.create_connection((at.hostname, at.port), 5)\n"
    '        key = b"Authorization: Bearer " + api_key.encode() + b"\\r\\n"\n'
    '        s.sendall(b"POST " + path.encode() + b" HTTP/1.1\\r\\nHost: x\\r\\n" + key'
    ' + b"Content-Length: 9999\\r\\n\\r\\n{")\n'
    "        s.close()",
    "for _ in range(40):\n"
    "        s = socket.create_connection((at.hostname, at.port), 5)\n"
    '        s.sendall(b"\\x16\\x03\\x01 no HTTP at all\\r\\n\\r\\n")\n'
    "        s.close()",
)


def _conversation_words(*words: str) -> tuple[str, ...]:
    """Return the words of a step of conversations, on the ground's model and rows of messages."""
    kept = [w for w in chat_words() if not w.startswith(("task", "algorithm=", "algorithm.cfg"))]
    return (
        *kept,
        "algorithm=agent_grpo",
        "algorithm.cfg.sampling.num_samples=2",
        *("task.max_response_tokens=4", "task.max_total_tokens=100"),
        *words,
    )


@kind("endpoint: requests of a hostile program")
def _(ground: Ground, chance: random.Random) -> Case:
    hostile = chance.choice(_HOSTILE)
    words = _conversation_words(
        "task=program", "task.function=mine:answer", "task.task={kind: file, path: chat.jsonl}"
    )
    files: dict[str, Content] = {"mine.py": _PROGRAM.format(hostile=hostile).encode()}
    return Case(words, ground.model, files, hostile[:80], must_succeed=True)


_MCP = """\
import json, sys
{before}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method = asked["method"]
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {{"protocolVersion": version, "capabilities": {{"tools": {{}}}}}}
        result["serverInfo"] = {{"name": "x", "version": "0"}}
    elif method == "tools/list":
        result = {{"tools": {tools}}}
    else:
        result = {{"content": [{{"type": "text", "text": "x"}}]}}
    {each}
    print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": result}}), flush=True)
"""


@kind("MCP: servers that write what is no message")
def _(ground: Ground, chance: random.Random) -> Case:
    before = chance.choice(
        (
            "pass",
            'print("starting", flush=True)',
            'for _ in range(100): print("debug", flush=True)',
            'for _ in range(20000): print("debug" * 10, flush=True)',
            'print("{", flush=True)',
            'print("[" * 5000, flush=True)',
            'sys.stdout.buffer.write(b"\\xff\\xfe\\n"); sys.stdout.flush()',
            'print("no\\n" * 3, file=sys.stderr)',
        )
    )
    each = chance.choice(("pass", 'print("called", flush=True)', "print({}, flush=True)"))
    tool = {"name": "f", "inputSchema": {"type": "object", "properties": {}}}
    tools = chance.choice(([tool], [], [{"name": 5}], 5, [tool, tool], [{"name": "f" * 10_000}]))
    server = _MCP.format(before=before, each=each, tools=repr(tools))
    command = f"[{sys.executable}, -P, server.py]"
    words = _conversation_words(
        "task=tools",
        "task.task={kind: file, path: chat.jsonl}",
        f"task.tools={{mine: {{kind: mcp, command: {command}}}}}",
        "algorithm.roles.agent.options.calls=hermes",
    )
    files: dict[str, Content] = {"server.py": server.encode()}
    template = "{{ tools }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    config = ground.text("tokenizer_config.json") | {"chat_template": template}
    files["m/tokenizer_config.json"] = as_json(config)
    return Case(words, ground.model, files, f"{before[:50]}; {each[:30]}; {tools!r:.40}")
