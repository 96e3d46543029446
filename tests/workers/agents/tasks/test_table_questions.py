"""Table questions: what experts run is run in the sandbox, and comes to what they say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import Reply, ToolCall, TurnResult
from penstock.workers.agents.tasks.generated_task import play
from penstock.workers.agents.tasks.tool_questions import (
    KINDS,
    TableQuestionsSpec,
    TableQuestionsTask,
)
from penstock.workers.agents.tools.python_tool import PythonTools
from penstock.workers.data.task import Message
from penstock.workers.isolation.sandbox import best_kind

PYTHON = PythonTools(deterministic=True, max_bytes=200, time_limit_s=60, minimum=best_kind().name)
TASK = TableQuestionsSpec(num_train=200, num_held_out=50, python=PYTHON).build()


def held(task: TableQuestionsTask, index: int, *texts: str) -> tuple[list[Message], TurnResult]:
    """A conversation with the real tool: what it said, and its last result."""

    async def hold() -> tuple[list[Message], TurnResult]:
        environment: Any = task.environment(index)
        environment.reset(index, 0)
        said: list[Message] = []
        result = TurnResult()
        for number, text in enumerate(texts):
            result = await environment.step(Reply(number, text, text))
            said += result.messages
        await environment.close()
        await task.close_environments()
        return said, result

    return asyncio.run(hold())


def test_what_an_expert_runs_comes_to_its_answer() -> None:
    """Python itself is asked here, and the sandbox in the next test."""
    for index in (*TASK.train, *TASK.held_out):
        problem = TASK.problem(index)
        assert eval(problem.calls[0].removeprefix(">>> ")) == int(problem.answer)
        assert TASK.is_right(problem, f"It is {problem.answer}.")
        assert not TASK.is_right(problem, f"{int(problem.answer) + 1}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_sandbox_says_what_the_script_says(kind: str) -> None:
    task = TableQuestionsSpec(num_train=8, num_held_out=0, kinds=(kind,), python=PYTHON).build()
    (script,) = task.replies(0) or [[]]
    turns = [m["content"] for m in script if m["role"] == "assistant"]
    shown, result = held(task, 0, *turns)
    assert shown == [m for m in script if m["role"] == "tool"]
    assert (result.reward, result.done) == (1.0, True)


@pytest.mark.slow
def test_errors_are_short_and_the_interpreter_knows_nothing_of_the_table() -> None:
    shown, result = held(TASK, 0, ">>> sum(price)", ">>>x = 20", ">>> x + 1", "21")
    assert shown[0]["content"].startswith("Error: ")
    assert "NameError" in shown[0]["content"]
    assert all(len(message["content"]) < 400 for message in shown)
    assert [message["content"] for message in shown[1:]] == ["", "21\n"]
    assert result.done


def test_a_turn_that_begins_with_the_mark_is_a_call() -> None:
    assert TASK.read(" >>> 1+1\n") == ToolCall("python", {"code": "1+1"})
    assert TASK.read(">>>") == ToolCall("python", {"code": ""})
    assert TASK.read("I say >>> 1+1") is None


def test_the_rehearsal_runs_no_code() -> None:
    played = play(TASK.begin(0), 0, [">>> 1+1", TASK.problem(0).answer])
    assert played.messages[1]["content"] == "Error: this code is not run\n"
    assert played.reward == 1.0


@pytest.mark.parametrize(
    ("said", "right"),
    [("{}", True), ("{} and 3", False), ("-{}", False), ("1{}", False), ("", False)],
)
def test_answers(said: str, right: bool) -> None:
    problem = TASK.problem(3)
    assert TASK.is_right(problem, said.format(problem.answer)) == right
    assert not TASK.is_right(problem, "9" * 5000)


def test_tables_are_as_large_as_was_asked_for() -> None:
    task = TableQuestionsSpec(num_train=20, num_held_out=5, num_rows=3, python=PYTHON).build()
    for index in task.train:
        header, *rows, question = task.prompt_text(index).split("\n")
        assert header.startswith("item ")
        assert len(rows) == 3
        assert question.endswith(("?", "rounded down?"))


def test_options_that_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        TableQuestionsSpec(kinds=("totals",)).build()
    assert str(refused.value) == (
        "'task.kinds': there is no kind 'totals' of question; did you mean 'total'?\n"
        "    give some of total, where, product, largest, average"
    )
    with pytest.raises(ConfigError, match=r"has no place for the question"):
        TableQuestionsSpec(prompt_template="?").build()
    with pytest.raises(ValueError, match="num_rows"):
        TableQuestionsSpec(num_rows=1)
