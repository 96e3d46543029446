"""A real OpenEnv server, where the package is installed: sessions, faults and time limits."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.adapters.text_environments import OpenEnvTaskSpec
from penstock.workers.agents.environment import Reply, TurnResult
from penstock.workers.data.task import Task, fingerprint

from ..conversing import converse

pytest.importorskip("openenv.core", reason="an extra: penstock-rl[openenv]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SERVER = '''
import random, sys, time
import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    text: str

class Told(Observation):
    text: str

class Backwards(Environment):
    """Shows a word, and wants to hear it backwards."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others):
        self.word = "".join(random.Random(seed).choices("abcdefgh", k=4))
        return Told(text=self.word, reward=None, done=False)

    def step(self, action, timeout_s=None, **others):
        if action.text == "raise":
            raise ZeroDivisionError("on purpose")
        if action.text == "hang":
            time.sleep(6)
        right = action.text == self.word[::-1]
        return Told(text=f"not {action.text}", reward=float(right), done=right)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Backwards, Said, Told, max_concurrent_envs=32)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
'''


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    script: Path = tmp_path_factory.mktemp("server") / "server.py"
    script.write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port)])
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(20)


def spec(url: str, **others: Any) -> OpenEnvTaskSpec:
    return OpenEnvTaskSpec(url=url, num_train=4, num_held_out=2, **others)


def test_the_first_observation_is_the_prompt(url: str) -> None:
    task = spec(url).build()
    assert isinstance(task, Task)
    prompts = {task.prompt_text(index) for index in (*task.train, *task.held_out)}
    assert len(prompts) == 6
    assert all(len(prompt) == 4 for prompt in prompts)
    assert fingerprint(task) == fingerprint(spec(url).build())


def test_a_conversation(url: str) -> None:
    task = spec(url).build()
    right = task.prompt_text(2)[::-1]
    assert converse(task.environment(2), "x", right) == [
        TurnResult(messages=[{"role": "user", "content": "not x"}], counts={"steps": 1.0}),
        TurnResult(reward=1.0, done=True, counts={"steps": 1.0}),
    ]


def test_a_conversation_ends_after_so_many_steps(url: str) -> None:
    task = spec(url, max_steps=2).build()
    assert [result.done for result in converse(task.environment(0), "x", "y")] == [False, True]


def test_sessions_are_apart(url: str) -> None:
    task = spec(url).build()

    async def one(index: int) -> float:
        waits: Any = task.environment(index)
        await waits.reset(index, 0)
        await asyncio.sleep(0.2)
        answer = task.prompt_text(index)[::-1]
        result = await waits.step(Reply(0, answer, answer))
        await waits.close()
        return result.reward

    async def run() -> list[float]:
        return await asyncio.gather(*(one(index) for index in range(6)))

    assert asyncio.run(run()) == [1.0] * 6


@pytest.mark.parametrize("said", ["raise", "hang"])
def test_a_server_that_goes_wrong_ends_the_conversation(
    url: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = spec(url, step_limit_s=2.0).build()
    with caplog.at_level(logging.WARNING):
        (result,) = converse(task.environment(0), said)
    assert result == TurnResult(reward=None, done=True, counts={"env_errors": 1.0})
    assert "failed in step" in caplog.text


def test_a_server_that_is_gone_ends_the_conversation(url: str) -> None:
    task = spec(url).build()
    object.__setattr__(task, "spec", spec("http://127.0.0.1:1", step_limit_s=2.0))
    failed = TurnResult(reward=None, done=True, counts={"env_errors": 1.0})
    assert converse(task.environment(0), "x") == [failed]


def test_no_server_is_one_message() -> None:
    with pytest.raises(ConfigError) as refused:
        spec("http://127.0.0.1:1", step_limit_s=2.0).build()
    said = str(refused.value)
    assert said.startswith("'task.url': 'http://127.0.0.1:1' gave no first observation: ")
    assert said.endswith(
        "\n    start an OpenEnv server there, and give task.observation_field and "
        "task.action_field as it has them"
    )


def test_another_field_is_one_message(url: str) -> None:
    with pytest.raises(ConfigError, match="field 'message' of an observation is no text; it has: "):
        spec(url, observation_field="message").build()
