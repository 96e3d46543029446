"""An LLM judge behind a real local server: verdicts, failures of every kind, and no hung step."""

from __future__ import annotations

import errno
import json
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest
from penstock.algorithms.roles import Reward
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.judge import (
    ChatClient,
    ChatClientOptions,
    ChatError,
    Judge,
    JudgeSpec,
    filled,
    in_loop,
    read_score,
)

from .responses import CONTEXT, scores_of

Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


class Server:
    """A local chat server whose replies a test scripts."""

    def __init__(self) -> None:
        self.reply: Reply = says("Score: 10")
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.handle(self)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append({"path": handler.path, **request})
            self.headers.append(dict(handler.headers))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            self.reply(handler, request)
        except OSError:
            handler.close_connection = True  # the client went away
        finally:
            with self._lock:
                self._at_once -= 1


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def says(text: str) -> Reply:
    return lambda handler, request: send(handler, 200, completion(text))


def fails(status: int, body: bytes = b"no", **headers: str) -> Reply:
    return lambda handler, request: send(handler, status, body, **headers)


def in_turn(*replies: Reply) -> Reply:
    """Each request gets the next reply, and the last one stays."""
    left = list(replies)

    def reply(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler, request)

    return reply


@contextmanager
def running() -> Generator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join(timeout=5)


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as made:
        yield made


@pytest.fixture
def task(tmp_path: Path) -> FileTaskSpec:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+{answer}=", "answer": "4"}\n')
    return FileTaskSpec(path=str(tmp_path / "rows.jsonl"))


def judge(server: Server, task: FileTaskSpec, **options: Any) -> Judge:
    given: dict[str, Any] = {
        "url": server.url,
        "model": "tiny",
        "pause_s": 0.01,
        "attempt_s": 5.0,
        **options,
    }
    return JudgeSpec(task=task, tokenizer=TokenizerSpec(), **given).build(CONTEXT)


def shares(reward: Reward) -> dict[str, float]:
    return {n.removeprefix("reward/"): m.value for n, m in drain_metrics(reward).items()}


def test_a_verdict_is_a_score_from_0_to_1(server: Server, task: FileTaskSpec) -> None:
    def by_length(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        content = request["messages"][-1]["content"]
        inside = content.split("<response>\n")[1].split("\n</response>")[0]
        send(handler, 200, completion(f"Hm, score: 1. So **Score: {len(inside)}**"))

    server.reply = by_length
    spec = JudgeSpec(
        task=task, tokenizer=TokenizerSpec(), url=server.url, model="tiny", system="Be fair."
    )
    reward = pickle.loads(pickle.dumps(spec)).build(CONTEXT)
    assert isinstance(reward, Reward)
    assert scores_of(reward, "1234", "1234567890", "") == pytest.approx([0.4, 1.0, 0.0])
    request = server.requests[0]
    assert request["path"] == "/v1/chat/completions"
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("tiny", 0, 256)
    assert request["messages"][0] == {"role": "system", "content": "Be fair."}
    assert "2+{answer}=" in request["messages"][1]["content"], "parts are not templates"
    metrics = shares(reward)
    assert metrics.pop("judge_s") > 0
    assert metrics == pytest.approx(
        {
            "mean": 1.4 / 3,
            "mean_square": 1.16 / 3,
            "equal_groups": 0.0,
            "retries": 0,
            "errors": 0,
            "timeouts": 0,
            "parse_errors": 0,
            "unscored": 0,
        }
    )


def test_what_passes_is_tried_again(server: Server, task: FileTaskSpec) -> None:
    server.reply = in_turn(fails(503), fails(429, Retry_After="0.05"), says("Score: 5"))
    reward = judge(server, task)
    assert scores_of(reward, "a") == [0.5]
    assert shares(reward)["retries"] == 2
    assert len(server.requests) == 3


def test_rows_that_fail_are_counted_and_get_a_score(
    server: Server, task: FileTaskSpec, caplog: pytest.LogCaptureFixture
) -> None:
    server.reply = in_turn(
        says("Score: 10"),
        says("I would rather not."),
        says("Score: 11"),
        fails(400, b"too long"),
        fails(200, b"not json"),
        fails(200, b'{"choices": []}'),
        fails(200, b'{"choices": [{"message": {"content": null}}]}'),
    )
    reward = judge(server, task, concurrency=1, unscored=-1.0)
    with caplog.at_level(logging.WARNING, logger="penstock.reward"):
        assert scores_of(reward, *"abcdefg") == [1.0, -1, -1, -1, -1, -1, -1]
    metrics = shares(reward)
    assert metrics["parse_errors"] == pytest.approx(2 / 7)
    assert metrics["errors"] == pytest.approx(4 / 7)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the judge failed on a response. Such responses get -1, and are never correct; "
        "reward/unscored counts them. It was:\nstatus 400: too long"
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", ["nothing", "headers", "body"])
def test_a_server_that_says_nothing_or_drips_does_not_hold_up_the_step(
    server: Server, task: FileTaskSpec, part: str
) -> None:
    """Every byte starts a socket's own time limit again."""

    def drips(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        if part == "nothing":
            time.sleep(3)
        if part == "body":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
        else:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        for _ in range(60):
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.05)

    server.reply = drips
    reward = judge(server, task, attempt_s=0.3, deadline_s=0.5)
    start = time.monotonic()
    assert scores_of(reward, "a", "b") == [None, None]
    assert time.monotonic() - start < 2
    assert shares(reward)["timeouts"] == 1.0


def test_connections_that_break_are_tried_again(server: Server, task: FileTaskSpec) -> None:
    def breaks(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
        handler.close_connection = True

    server.reply = in_turn(breaks, says("Score: 10"))
    assert scores_of(judge(server, task), "a") == [1.0]


def test_nobody_listens(server: Server, task: FileTaskSpec) -> None:
    reward = judge(server, task, url="http://127.0.0.1:1/v1", max_attempts=2)
    assert scores_of(reward, "a") == [None]
    metrics = shares(reward)
    assert (metrics["errors"], metrics["retries"]) == (1.0, 1.0)


def test_a_fault_before_anything_is_asked_is_raised(
    server: Server, task: FileTaskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row counts as late only if the judge was."""

    def none_left() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    reward = judge(server, task)
    monkeypatch.setattr("asyncio.new_event_loop", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        scores_of(reward, "a")


def test_requests_at_once_are_bounded(server: Server, task: FileTaskSpec) -> None:
    def slowly(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        time.sleep(0.05)
        says("Score: 10")(handler, request)

    server.reply = slowly
    assert scores_of(judge(server, task, concurrency=3), *"abcdefghijkl") == [1.0] * 12
    assert 2 <= server.most_at_once <= 3
    assert scores_of(judge(server, task), *[]) == []


def test_the_key_comes_from_the_environment_and_is_in_no_message(
    server: Server,
    task: FileTaskSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError) as raised:
        judge(server, task, api_key_env="JUDGE_KEY")
    assert str(raised.value) == (
        "environment variable JUDGE_KEY, which is to hold the judge's API key, is not set where "
        "the reward runs\n    set it, or leave api_key_env out"
    )
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    reward = judge(server, task, api_key_env="JUDGE_KEY")
    assert scores_of(reward, "a") == [1.0]
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    server.reply = fails(400, b"bad key sk-very-secret")
    with caplog.at_level(logging.DEBUG):
        scores_of(reward, "a")
    server.reply = fails(401, b"bad key sk-very-secret")
    with pytest.raises(WorkerError) as refused:
        scores_of(reward, "a", "b")
    assert str(refused.value) == (
        f"the judge at {server.url} refuses requests: status 401: bad key ***\n"
        "    see its url, model and api_key_env"
    )
    assert caplog.records
    assert "secret" not in caplog.text
    assert "secret" not in f"{reward!r}{vars(reward)}"


def test_what_a_server_says_is_shown_without_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    client = ChatClient(ChatClientOptions(url=server.url, model="m", api_key_env="JUDGE_KEY"))
    for text, shown in {
        "a sk-very-secret": "a ***'",
        "x" * 193 + " sk-very-secret": "x ***'",
    }.items():
        server.reply = fails(200, text.encode())  # of the second, the cut is amid the key
        with pytest.raises(ChatError) as error:
            in_loop(client.ask([]))
        assert str(error.value).startswith("the reply is no chat completion: '")
        assert str(error.value).endswith(shown)
    server.reply = says("I was given sk-very-secret.")
    assert in_loop(client.ask([])) == "I was given ***."


@pytest.mark.slow
def test_a_judge_that_never_works_ends_the_run(server: Server, task: FileTaskSpec) -> None:
    server.reply = says("No idea.")
    reward = judge(server, task)
    scores_of(reward, *["a"] * 40)
    with pytest.raises(
        WorkerError,
        match="(?s)gave 0 of the last 80 responses a score: it said no score on 80.*no verd",
    ):
        scores_of(reward, *["a"] * 40)


def test_verdicts_in_words(server: Server, task: FileTaskSpec) -> None:
    server.reply = in_turn(says("Verdict: YES"), says("Verdict: no"), says("Verdict: maybe"))
    options: dict[str, Any] = {
        "pattern": r"verdict:\s*(\w+)",
        "words": {"yes": 1, "no": 0},
        "high": 1.0,
    }
    reward = judge(server, task, concurrency=1, unscored=0.5, **options)
    assert scores_of(reward, *"abc") == [1.0, 0.0, 0.5]


def test_templates_and_scores_are_read() -> None:
    latex = '{response} \\boxed{N} \\frac{a}{b} x_{i} {"score": 1} {}'  # holds braces of its own
    given: Any = {"task": FileTaskSpec(path=""), "tokenizer": TokenizerSpec(), "model": "m"}
    JudgeSpec(**given, url="http://h", template=latex)
    assert filled("{a}-{b}-{c}", {"a": "{b}", "b": "x"}) == "{b}-x-{c}"
    spec: Any = JudgeSpec(**given, url="http://h")
    assert read_score("score = 2\nSCORE: 7.5", spec) == 0.75
    assert read_score("Score: -1", spec) is None
    assert read_score("Score: ten", spec) is None
    assert read_score("Score: **\n 3", spec) == 0.3
    began = time.monotonic()
    for tail in (" ", "*", "score:", "score: ", "score: 9", "9", "score: -", " *"):
        read_score("score:" + tail * 1_000_000, spec)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"},
         "a judge needs an address and a model, got url='127.0.0.1:8000'"),
        ({"model": ""}, "got url='http://h', model=''"),
        ({"url": "http://me:key@h"}, "url holds a name or a password"),
        ({"pattern": "score"}, "pattern 'score' has no group"),
        ({"pattern": "("}, "is no regular expression"),
        ({"template": "{prompt}"}, "template does not show the judge the {response}"),
        ({"high": 0.0}, "high is 0.0; expected above 0"),
        ({"high": 1e300}, "high is 1e+300; expected at least -3.40282e+38 and at most 3.40282e+38"),
        ({"unscored": -1e39}, "unscored is -1e+39; expected a number within float32, null or nan"),
        ({"concurrency": 0}, "concurrency is 0; expected at least 1"),
        ({"concurrency": 1025}, "concurrency is 1025; expected at least 1 and at most 1024"),
        ({"max_attempts": 101}, "max_attempts is 101; expected at least 1 and at most 100"),
        ({"attempt_s": 1e-4}, "attempt_s is 0.0001; expected at least 0.001 and at most 86400"),
        ({"deadline_s": 1e5}, "deadline_s is 100000.0; expected at least 0.001"),
        ({"words": {"yes": float("nan")}}, "words gives 'yes' nan; expected a finite number"),
        ({"words": {"no": -1e39}}, "words gives 'no' -1e+39; expected a finite number"),
        ({"extra": {"seed": 0, "model": "x", "messages": []}},
         "extra holds messages, model, which would not reach the server"),
        ({"template": "{response} {nope}"},
         "template names {nope}, which nothing fills in; it may name {prompt}, {response}, "
         "{answer}"),
        ({"url": "http://h/a b"}, "url 'http://h/a b' holds a blank or a control character"),
        ({"url": "http://h/a\n"}, r"url 'http://h/a\n' holds a blank or a control character"),
    ],
)  # fmt: skip
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"url": "http://h", "model": "m", **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        JudgeSpec(task=FileTaskSpec(path=""), tokenizer=TokenizerSpec(), **given)
