"""Served reward models behind a real local server: batches, a pool of servers, and failures."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.own_text import OwnText
from penstock.workers.rewards.served import ServedReward, ServedRewardSpec
from torch_models import BASE

from .responses import CONTEXT, rows, scores_of
from .test_judge import Reply, Server, fails, running, send


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with running() as one, running() as other:
        yield one, other


@pytest.fixture
def task(tmp_path: Path) -> FileTaskSpec:
    asked = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": asked, "answer": "a"}))
    TokenizerSpec(kind="byte").build().save(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return FileTaskSpec(path=str(tmp_path / "rows.jsonl"))


def counts(field: str, *, longest: int = 100) -> Reply:
    """Score each text of bytes by its length, last row first; refuse a request with a long one."""

    def reply(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
        given: Any = request.get("input") or [[*request["messages"][-1]["content"]]]
        if max(map(len, given)) > longest:
            send(handler, 400, b"too long")
            return
        numbers = [float(len(ids)) for ids in given]
        wrapped = [[[0.0], [n]] if field == "data" else [n] for n in numbers]
        rows = [{"index": i, field: value} for i, value in enumerate(wrapped)]
        send(handler, 200, json.dumps({"data": rows[::-1]}).encode())

    return reply


def reward(task: FileTaskSpec, *servers: Server, **options: Any) -> ServedReward:
    first, *more = [server.url for server in servers]
    given: dict[str, Any] = {"pause_s": 0.0, "deadline_s": 5.0, **options}
    spec = ServedRewardSpec(
        url=first, more_urls=more, model="m", task=task, tokenizer=TokenizerSpec(), **given
    )
    return spec.build(CONTEXT)


def test_conversations_are_sent_one_by_one(
    servers: tuple[Server, Server], task: FileTaskSpec
) -> None:
    server, _ = servers
    server.reply = counts("probs")
    made = reward(task, server)
    assert scores_of(made, "abc", "a") == [3.0, 1.0]
    assert sorted(request["path"] for request in server.requests) == ["/v1/classify"] * 2
    request = server.requests[0]
    assert [message["role"] for message in request["messages"]] == ["system", "user", "assistant"]
    assert (request["model"], request["use_activation"]) == ("m", False)


def test_texts_of_its_own_tokens_are_sent_together_and_in_turn(
    servers: tuple[Server, Server], task: FileTaskSpec, tmp_path: Path
) -> None:
    for server in servers:
        server.reply = counts("data")
    own = str(tmp_path / "own")
    made = reward(task, *servers, endpoint="pooling", folder=own, batch_size=2, concurrency=1)
    # All bytes of the prompt's text and of the response, and an end.
    before = len("Count.How many?") + 1
    assert scores_of(made, "abc", "a", "ab", "abcd", "") == [
        before + 3, before + 1, before + 2, before + 4, before + 0
    ]  # fmt: skip
    assert [len(server.requests) for server in servers] == [2, 1]
    assert drain_metrics(made)["reward/unscored"].value == 0


def test_a_text_that_is_too_long_costs_its_own_score(
    servers: tuple[Server, Server], task: FileTaskSpec, tmp_path: Path
) -> None:
    server, _ = servers
    server.reply = counts("probs", longest=20)
    made = reward(task, server, folder=str(tmp_path / "own"))
    assert scores_of(made, "abc", "abcdefgh", "a") == [19.0, None, 17.0]
    metrics = drain_metrics(made)
    assert metrics["reward/errors"].value == pytest.approx(1 / 3)
    assert metrics["reward/retries"].value == 0


def test_another_server_takes_over_from_one_that_fails(
    servers: tuple[Server, Server], task: FileTaskSpec
) -> None:
    broken, sound = servers
    broken.reply, sound.reply = fails(503), counts("probs")
    assert scores_of(reward(task, *servers), "abc", "a", "ab") == [3.0, 1.0, 2.0]
    assert len(broken.requests) == 2  # requests 1 and 3 begin there
    assert len(sound.requests) == 3


REPLIES = {
    "three labels": b'{"data": [{"index": 0, "probs": [0.1, 0.2, 0.7]}]}',
    "no number": b'{"data": [{"index": 0, "probs": ["high"]}]}',
    "nan": b'{"data": [{"index": 0, "probs": [NaN]}]}',
    "no row": b'{"data": []}',
    "no object": b"[1]",
    "an empty list": b'{"data": [{"index": 0, "probs": []}]}',
}


@pytest.mark.parametrize("name", REPLIES)
def test_replies_without_one_number_each_give_no_score(
    name: str, servers: tuple[Server, Server], task: FileTaskSpec
) -> None:
    server, _ = servers
    server.reply = lambda handler, request: send(handler, 200, REPLIES[name])
    made = reward(task, server)
    assert scores_of(made, "a") == [None]
    assert drain_metrics(made)["reward/errors"].value == 1


def test_time_is_bounded_and_a_refusal_ends_the_run(
    servers: tuple[Server, Server], task: FileTaskSpec
) -> None:
    server, _ = servers
    server.reply = fails(503)
    made = reward(task, server, deadline_s=0.2, pause_s=0.15, max_attempts=100)
    assert scores_of(made, "a") == [None]
    assert drain_metrics(made)["reward/timeouts"].value == 1
    server.reply = fails(404)
    with pytest.raises(WorkerError, match="the served reward model at .* refuses requests"):
        scores_of(reward(task, server), "a")


@pytest.mark.nightly
@pytest.mark.parametrize("endpoint", ["classify", "pooling"])
def test_a_classifier_that_vllm_serves_scores_as_it_does_here(
    endpoint: str, task: FileTaskSpec, tmp_path: Path
) -> None:
    """The tokens are sent, so that both read the same ones."""
    pytest.importorskip("vllm")
    config = transformers.AutoConfig.for_model(
        "qwen2", **{**BASE, "vocab_size": 260, "num_labels": 1, "hidden_size": 128}
    )
    model: Any = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "own")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--model", str(tmp_path / "own"), "--runner", "pooling", "--port", str(port)]
    words += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "128"]
    words += ["--served-model-name", "m", "--enforce-eager"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, server, tmp_path / "log")
        own = OwnText(folder=str(tmp_path / "own"), task=task, tokenizer=TokenizerSpec())
        spec = ServedRewardSpec(
            url=url, model="m", task=task, tokenizer=TokenizerSpec(), folder=own.folder,
            endpoint=endpoint, batch_size=2,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        responses = ("abc", "a", "a longer one")
        scores = scores_of(spec.build(CONTEXT), *responses)
        assert None not in scores, (tmp_path / "log").read_text()[-4000:]
        here = TorchRewardModelSpec(model=ModelSpec(folder=own.folder), own_text=own)
        expected = here.build(CONTEXT).score(*rows(*responses))
        torch.testing.assert_close(
            torch.tensor(scores), expected, atol=1e-4, rtol=0
        )  # kernels of its own
    finally:
        server.terminate()
        server.wait(60)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
