"""Questions answered with a tool: their worlds, experts, and conversations with the tool itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import penstock
import pytest
from omegaconf import OmegaConf
from penstock.workers.agents.environment import BadCall, Reply, ToolCall, TurnResult
from penstock.workers.agents.tasks.generated_task import play
from penstock.workers.agents.tasks.tool_questions import (
    KINDS,
    MOST_TOWNS,
    SearchTaskSpec,
    TableQuestionsSpec,
    facts_of,
    make_towns,
)
from penstock.workers.agents.tools.python_tool import PythonTools
from penstock.workers.isolation.sandbox import best_kind

from ..conversing import held

SPEC = SearchTaskSpec(num_towns=300, num_train=200, num_held_out=100, two_hops=0.5)
TASK = SPEC.build()


def test_every_expert_finds_its_answer_with_the_tool_itself() -> None:
    for index in (*TASK.train, *TASK.held_out):
        (script,) = TASK.replies(index) or [[]]
        turns = [m["content"] for m in script if m["role"] == "assistant"]
        shown, result = held(TASK, index, *turns)
        assert (result.reward, result.done) == (1.0, True)
        assert shown == [m for m in script if m["role"] == "tool"]
        assert turns[-1] in shown[-1]["content"]
        assert len(turns) == 1 + len(TASK.problem(index).calls)


def test_lengths_leave_room_for_the_searches_that_they_are_documented_for() -> None:
    shipped: Any = OmegaConf.load(Path(penstock.__file__).parent / "configs/task/search.yaml")
    most = {1: (shipped.max_response_tokens, shipped.max_total_tokens), 2: (28, 192)}
    for index in (*TASK.train, *TASK.held_out):
        problem = TASK.problem(index)
        (script,) = TASK.replies(index) or [[]]
        turn, total = most[len(problem.calls)]
        # A character is a token, and so is what ends a message.
        assert max(len(m["content"]) + 1 for m in script if m["role"] == "assistant") <= turn
        said = [problem.text, *(m["content"] for m in script)]
        assert sum(len(text) + 1 for text in said) <= total


def test_questions_of_both_kinds_and_none_of_a_town_twice() -> None:
    problems = [TASK.problem(index) for index in (*TASK.train, *TASK.held_out)]
    hops = [len(problem.calls) for problem in problems]
    assert 100 < hops.count(2) < 200
    assert hops.count(1) + hops.count(2) == 300
    assert len({problem.calls[0][1:-1].split(" ")[1] for problem in problems}) == 300
    # The first query names the town; no fact that answers a held-out question answers another.
    trained = {TASK.problem(index).answer for index in TASK.train}
    names = [TASK.problem(i).answer for i in TASK.held_out if not TASK.problem(i).answer.isdigit()]
    assert not trained & set(names)


def test_a_larger_world_has_the_same_towns_first() -> None:
    assert list(make_towns(10, 3)) == list(make_towns(MOST_TOWNS, 3))[:10]
    towns = make_towns(MOST_TOWNS, 0)
    for names in zip(*((t.name, t.river, t.mayor, t.home) for t in towns), strict=True):
        assert len(set(names)) == MOST_TOWNS
    assert all(len(facts_of(town)) == 5 for town in towns)


@pytest.mark.parametrize(
    ("text", "reward"),
    [("{}", 1), ("it is the {}.", 1), ("{} or not", 0), ("x{}", 0), ("", 0), ("[]{}", 1)],
)
def test_answers(text: str, reward: float) -> None:
    said = text.format(TASK.problem(0).answer.upper())
    _, result = held(TASK, 0, said)
    assert (result.reward, result.done) == (reward, True)


def test_calls_of_any_kind() -> None:
    queries = {"query": TASK.problem(0).calls[0][1:-1]}
    calls = (ToolCall("search", queries), ToolCall("search", {}), BadCall("{", "no JSON"))
    shown, result = held(TASK, 0, Reply(0, "...", "", calls), "[ ]")
    assert [message["content"].split(":")[0] for message in shown[1:]] == ["Error"] * 3
    assert not result.done
    assert result.counts == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_a_reply_that_was_cut_off_is_no_answer() -> None:
    said = TASK.problem(0).answer
    assert held(TASK, 0, Reply(0, said, said, finished=False))[1] == TurnResult(done=True)


def test_the_last_turn_must_be_an_answer() -> None:
    task = SearchTaskSpec(num_towns=8, num_train=6, num_held_out=2, max_turns=1).build()
    _, result = held(task, 0, "[mayor]")
    assert (result.reward, result.done, result.messages) == (0.0, True, ())


def test_experts_that_know() -> None:
    task = SearchTaskSpec(num_towns=300, num_train=200, num_held_out=100, expert_calls=0.25).build()
    lengths = [len(played) for index in task.train for played in task.replies(index) or ()]
    assert len(lengths) == 200
    assert 30 < sum(length > 1 for length in lengths) < 75


PYTHON = PythonTools(deterministic=True, max_bytes=200, time_limit_s=60, minimum=best_kind().name)
TABLES = TableQuestionsSpec(num_train=200, num_held_out=50, python=PYTHON).build()


def test_what_an_expert_runs_comes_to_its_answer() -> None:
    """Python itself is asked here, and the sandbox in the next test."""
    for index in (*TABLES.train, *TABLES.held_out):
        problem = TABLES.problem(index)
        assert eval(problem.calls[0].removeprefix(">>> ")) == int(problem.answer)
        assert TABLES.is_right(problem, f"It is {problem.answer}.")
        assert not TABLES.is_right(problem, f"{int(problem.answer) + 1}")


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
    shown, result = held(TABLES, 0, ">>> sum(price)", ">>>x = 20", ">>> x + 1", "21")
    assert shown[0]["content"].startswith("Error: ")
    assert "NameError" in shown[0]["content"]
    assert all(len(message["content"]) < 400 for message in shown)
    assert [message["content"] for message in shown[1:]] == ["", "21\n"]
    assert result.done


def test_a_turn_that_begins_with_the_mark_is_a_call() -> None:
    assert TABLES.read(" >>> 1+1\n") == ToolCall("python", {"code": "1+1"})
    assert TABLES.read(">>>") == ToolCall("python", {"code": ""})
    assert TABLES.read("I say >>> 1+1") is None


def test_the_rehearsal_runs_no_code() -> None:
    played = play(TABLES.begin(0), 0, [">>> 1+1", TABLES.problem(0).answer])
    assert played.messages[1]["content"] == "Error: this code is not run\n"
    assert played.reward == 1.0


@pytest.mark.parametrize(
    ("said", "right"),
    [("{}", True), ("{} and 3", False), ("-{}", False), ("1{}", False), ("", False)],
)
def test_answers_about_tables(said: str, right: bool) -> None:
    problem = TABLES.problem(3)
    assert TABLES.is_right(problem, said.format(problem.answer)) == right
    assert not TABLES.is_right(problem, "9" * 5000)


def test_tables_are_as_large_as_was_asked_for() -> None:
    task = TableQuestionsSpec(num_train=20, num_held_out=5, num_rows=3, python=PYTHON).build()
    for index in task.train:
        header, *rows, question = task.prompt_text(index).split("\n")
        assert header.startswith("item ")
        assert len(rows) == 3
        assert question.endswith(("?", "rounded down?"))


def test_a_table_has_rows_enough() -> None:
    with pytest.raises(ValueError, match="num_rows"):
        TableQuestionsSpec(num_rows=1)
