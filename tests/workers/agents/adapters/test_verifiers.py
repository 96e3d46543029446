"""Environments of the real verifiers package, where it is installed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.adapters.verifiers_task import VerifiersTaskSpec
from penstock.workers.agents.environment import BadCall, Reply, ToolCall, TurnResult
from penstock.workers.data.task import Task, fingerprint

from ..conversing import converse

# Not "verifiers": pytest takes the folder of tests of that name for it.
pytest.importorskip("verifiers.envs", reason="an extra: penstock-rl[verifiers]")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODULE = '''
import time
import verifiers as vf
from datasets import Dataset

def guess(info, size):
    rows = [{"question": f"{name}{n}?", "answer": str(n)} for n in range(size) for name in "ab"]
    return Dataset.from_list(rows)

class Guess(vf.MultiTurnEnv):
    """Says higher or lower until the number is said."""

    async def setup_state(self, state):
        state["left"] = 5

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "raise":
            raise ValueError("on purpose")
        if said == "error":
            raise vf.Error("on purpose")
        if said == "hang":
            import asyncio
            await asyncio.sleep(60)
        number = int(said) if said.isdigit() else -1
        if number == int(state["answer"]):
            state["final_env_response"] = [vf.UserMessage(content="right")]
            return state["final_env_response"]
        word = "higher" if number < int(state["answer"]) else "lower"
        return [vf.UserMessage(content=word)]

def right(completion, answer):
    if any(message.content == "nan" for message in completion):
        return float("nan")
    return 1.0 if completion[-1].content == "right" else 0.25

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b

def last_is_answer(completion, answer):
    return float(completion[-1].content == answer)

def load_environment(kind="guess", size=6, held_out=True):
    extra = {"eval_dataset": guess("eval", 2)} if held_out else {}
    data = guess("train", size)
    if kind == "guess":
        return Guess(dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=4, **extra)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[last_is_answer]), **extra)
    if kind == "group":
        def all_alike(completions): return [0.0 for _ in completions]
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[all_alike]), **extra)
    return vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[last_is_answer]), **extra)
'''


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    (tmp_path / "guess_my_number.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def spec(**options: Any) -> VerifiersTaskSpec:
    return VerifiersTaskSpec(env="guess-my-number", options=options)


def test_rows_become_problems() -> None:
    task = spec().build()
    assert isinstance(task, Task)
    train = [task.prompt_text(index) for index in task.train]
    held_out = [task.prompt_text(index) for index in task.held_out]
    assert held_out == ["a0?", "b0?", "a1?", "b1?"]
    assert train == ["a2?", "b2?", "a3?", "b3?", "a4?", "b4?", "a5?", "b5?"]
    assert task.messages(0) == [{"role": "user", "content": "a2?"}]
    assert task.tools(0) is None
    assert fingerprint(task) == fingerprint(spec().build())


def test_without_a_data_set_for_evaluation_rows_are_held_out() -> None:
    task = VerifiersTaskSpec(
        env="guess-my-number", options={"held_out": False}, num_held_out=3, num_train=4
    ).build()
    assert [task.prompt_text(index) for index in task.held_out] == ["a0?", "b0?", "a1?"]
    assert [task.prompt_text(index) for index in task.train] == ["b1?", "a2?", "b2?", "a3?"]


def test_a_conversation_of_several_turns() -> None:
    results = converse(spec().build().environment(2), "9", "1", "3")
    assert [message["content"] for r in results for message in r.messages] == ["lower", "higher"]
    assert [(r.reward, r.done) for r in results] == [(0, False), (0, False), (1, True)]
    assert results[-1].counts == {"right": 1.0, "num_turns": 3.0}


def test_the_limit_of_the_environment_ends_the_conversation() -> None:
    results = converse(spec().build().environment(2), "9", "9", "9", "9")
    assert [r.done for r in results] == [False, False, False, True]
    assert results[-1].reward == 0.25


def test_a_single_turn() -> None:
    (result,) = converse(spec(kind="single").build().environment(1), "2")
    assert (result.reward, result.done) == (1.0, True)


def test_tools_are_called() -> None:
    task = spec(kind="tools").build()
    (schema,) = task.tools(0) or [{}]
    assert schema["function"]["name"] == "add"
    assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
    calls = (
        ToolCall("add", {"a": 1, "b": 1}),
        ToolCall("subtract", {"a": 1}),
        BadCall("{a", "no JSON"),
    )
    called, ended = converse(task.environment(0), Reply(0, "...", "", calls), "2")
    assert [message["role"] for message in called.messages] == ["tool"] * 3
    assert called.messages[0]["content"] == "2"
    assert (ended.reward, ended.done) == (1.0, True)
    assert ended.counts["total_tool_calls"] == 3.0


@pytest.mark.parametrize("said", ["raise", "error", "hang"])
def test_an_environment_that_goes_wrong_ends_its_conversation(said: str) -> None:
    task = VerifiersTaskSpec(env="guess-my-number", step_limit_s=1.0).build()
    (result,) = converse(task.environment(0), said)
    assert result == TurnResult(done=True, counts={"env_errors": 1.0})


def test_a_reward_that_is_no_number_is_an_error() -> None:
    results = converse(spec().build().environment(2), "nan", "3")
    assert results[-1] == TurnResult(done=True, counts={"env_errors": 1.0})


def test_a_conversation_may_be_left_in_the_middle() -> None:
    task = spec().build()
    assert converse(task.environment(0)) == []
    assert not converse(task.environment(0), "1")[0].done


def test_conversations_run_side_by_side() -> None:
    task = spec().build()

    async def one(index: int) -> float:
        waits: Any = task.environment(index)
        await waits.reset(index, 0)
        answer = task.prompt_text(index)[1:-1]
        result = await waits.step(Reply(0, answer, answer))
        await waits.close()
        return result.reward

    async def run() -> list[float]:
        return await asyncio.gather(*(one(index) for index in task.train))

    assert asyncio.run(run()) == [1.0] * len(task.train)


def test_signals_stay_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    spec().build()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            VerifiersTaskSpec(env="guess-my-number", options={"kind": "group"}),
            "'task.env': the rubric of 'guess-my-number' compares conversations with each other\n"
            "    give an environment whose rubric scores each by itself",
        ),
        (
            VerifiersTaskSpec(env="guess-my-number", options={"held_out": False}, num_held_out=100),
            "task 'verifiers[guess-my-number]' has no row left to train on\n"
            "    lower task.num_held_out, or give the environment more rows: task.options",
        ),
    ],
)
def test_what_is_refused(given: VerifiersTaskSpec, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        given.build()
    assert str(refused.value) == message


def test_an_environment_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="^'task.env': verifiers cannot load 'no-such-env': "):
        VerifiersTaskSpec(env="no-such-env").build()
