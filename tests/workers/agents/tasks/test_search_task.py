"""The search task: its world, its questions, and conversations with the tool itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import penstock
import pytest
from omegaconf import OmegaConf
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import BadCall, Reply, ToolCall, TurnResult
from penstock.workers.agents.tasks.tool_questions import (
    MOST_TOWNS,
    SearchTask,
    SearchTaskSpec,
    facts_of,
    make_towns,
)
from penstock.workers.data.task import Message

SPEC = SearchTaskSpec(num_towns=300, num_train=200, num_held_out=100, two_hops=0.5)
TASK = SPEC.build()


def held(task: SearchTask, index: int, *replies: Reply) -> tuple[list[Message], TurnResult]:
    """A conversation with the real tool: what it said, and its last result."""

    async def hold() -> tuple[list[Message], TurnResult]:
        environment: Any = task.environment(index)
        environment.reset(index, 0)
        said: list[Message] = []
        result = TurnResult()
        for reply in replies:
            result = await environment.step(reply)
            said += result.messages
        await environment.close()
        await task.close_environments()
        return said, result

    return asyncio.run(hold())


def test_every_expert_finds_its_answer_with_the_tool_itself() -> None:
    for index in (*TASK.train, *TASK.held_out):
        (script,) = TASK.replies(index) or [[]]
        turns = [m["content"] for m in script if m["role"] == "assistant"]
        shown, result = held(TASK, index, *(Reply(n, t, t) for n, t in enumerate(turns)))
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
    _, result = held(TASK, 0, Reply(0, said, said))
    assert (result.reward, result.done) == (reward, True)


def test_calls_of_any_kind() -> None:
    queries = {"query": TASK.problem(0).calls[0][1:-1]}
    calls = (ToolCall("search", queries), ToolCall("search", {}), BadCall("{", "no JSON"))
    shown, result = held(TASK, 0, Reply(0, "...", "", calls), Reply(1, "[ ]", "[ ]"))
    assert [message["content"].split(":")[0] for message in shown[1:]] == ["Error"] * 3
    assert not result.done
    assert result.counts == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_a_reply_that_was_cut_off_is_no_answer() -> None:
    said = TASK.problem(0).answer
    assert held(TASK, 0, Reply(0, said, said, finished=False))[1] == TurnResult(done=True)


def test_the_last_turn_must_be_an_answer() -> None:
    task = SearchTaskSpec(num_towns=8, num_train=6, num_held_out=2, max_turns=1).build()
    _, result = held(task, 0, Reply(0, "[mayor]", "[mayor]"))
    assert (result.reward, result.done, result.messages) == (0.0, True, ())


def test_experts_that_know() -> None:
    task = SearchTaskSpec(num_towns=300, num_train=200, num_held_out=100, expert_calls=0.25).build()
    lengths = [len(played) for index in task.train for played in task.replies(index) or ()]
    assert len(lengths) == 200
    assert 30 < sum(length > 1 for length in lengths) < 75


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            SearchTaskSpec(num_towns=10, num_train=8, num_held_out=3),
            "task 'search' has one question for each of 10 towns, and 11 are asked for\n"
            "    lower task.num_train or task.num_held_out, or raise task.num_towns",
        ),
        (
            SearchTaskSpec(num_towns=2001),
            "a world of 2001 towns has not enough names\n    give at most 2000: task.num_towns",
        ),
        (
            SearchTaskSpec(prompt_template="?"),
            "'task.prompt_template' is '?', which has no place for the question\n"
            "    write {question} where it stands",
        ),
    ],
)
def test_specs_that_are_refused(spec: SearchTaskSpec, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec.build()
    assert str(refused.value) == message
