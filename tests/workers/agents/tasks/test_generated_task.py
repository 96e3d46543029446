"""What all generated conversation tasks keep to: problems by seed, experts, replies of any kind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import BadCall, Reply, ToolCall, TurnResult
from penstock.workers.agents.tasks.calculator import CalculatorTaskSpec
from penstock.workers.agents.tasks.generated_task import GeneratedTask, play
from penstock.workers.agents.tasks.lmrl_gym import MazeTaskSpec, TwentyQuestionsTaskSpec
from penstock.workers.agents.tasks.tool_questions import SearchTaskSpec, TableQuestionsSpec
from penstock.workers.agents.tools.python_tool import PythonTools
from penstock.workers.data.chat import TURNS
from penstock.workers.data.task import Task, fingerprint, task_alphabet
from penstock.workers.isolation.sandbox import best_kind
from penstock.workers.models.tokenizer import TokenizerSpec

Spec = (
    CalculatorTaskSpec
    | MazeTaskSpec
    | TwentyQuestionsTaskSpec
    | SearchTaskSpec
    | TableQuestionsSpec
)

PYTHON = PythonTools(deterministic=True, minimum=best_kind().name)

SPECS: dict[str, Spec] = {
    "calculator": CalculatorTaskSpec(num_train=40, num_held_out=10),
    "maze": MazeTaskSpec(num_train=40, num_held_out=10),
    "maze by words": MazeTaskSpec(num_train=40, num_held_out=10, words=True, observed=False),
    "twenty questions": TwentyQuestionsTaskSpec(num_train=40, num_held_out=10),
    "search": SearchTaskSpec(num_train=40, num_held_out=10, num_towns=60, two_hops=0.5),
    "table questions": TableQuestionsSpec(num_train=40, num_held_out=10, python=PYTHON),
}
TASKS: dict[str, GeneratedTask[object]] = {name: spec.build() for name, spec in SPECS.items()}  # pyright: ignore[reportAssignmentType] - a task of one kind of problem is read only

REPLIES = [
    Reply(0, "", ""),
    Reply(0, "\n \t\n", "\n \t\n"),
    Reply(0, "\x00\ud800\uffff\U0001f600", ""),
    Reply(0, "[" * 500 + "]" * 500, ""),
    Reply(0, "[9**9**9**9]", ""),
    Reply(0, "9" * 10_000, ""),
    Reply(0, "a99999999999?", ""),
    Reply(0, "=" + "9" * 5000, ""),
    Reply(0, "[1+1]", "", finished=False),
    Reply(0, "", "", calls=(BadCall("{", "no JSON"),)),
    Reply(0, "", "", calls=(ToolCall("rm", {"path": "/"}),)),
    Reply(0, "", "", calls=(ToolCall("calculator", {"expression": 7}),)),
    Reply(0, "", "", calls=(ToolCall("calculator", {}), ToolCall("calculator", {"a": [{}]}))),
    Reply(10**9, "move move move up", ""),
]
"""What a policy may say and should not."""

names = pytest.mark.parametrize("name", list(TASKS))


@names
def test_is_all_that_a_conversation_task_is(name: str) -> None:
    task = TASKS[name]
    assert isinstance(task, Task)
    assert (task.converses, task.deterministic) == (True, True)


@names
def test_no_prompt_stands_twice(name: str) -> None:
    task = TASKS[name]
    assert len(task.train) == 40
    assert len(task.held_out) == 10
    indices = [*task.train, *task.held_out]
    assert len({task.prompt_text(index) for index in indices}) == 50
    assert task.report.num_kept == 50


@names
def test_what_is_held_out_does_not_depend_on_what_is_trained_on(name: str) -> None:
    longer = replace(SPECS[name], num_train=50).build()
    task = TASKS[name]
    assert [task.prompt_text(i) for i in task.held_out] == [
        longer.prompt_text(i) for i in longer.held_out
    ]
    assert [task.replies(i) for i in task.train] == [longer.replies(i) for i in task.train]


@names
def test_another_seed_makes_other_problems(name: str) -> None:
    assert fingerprint(SPECS[name].build()) == fingerprint(TASKS[name])
    assert fingerprint(replace(SPECS[name], seed=1).build()) != fingerprint(TASKS[name])


@pytest.mark.slow
def test_problems_are_the_same_in_another_process() -> None:
    made = subprocess.run(
        [
            sys.executable,
            "-c",
            "from penstock.workers.agents.tasks.calculator import CalculatorTaskSpec\n"
            "from penstock.workers.agents.tasks.lmrl_gym import MazeTaskSpec\n"
            "from penstock.workers.agents.tasks.lmrl_gym import TwentyQuestionsTaskSpec\n"
            "from penstock.workers.data.task import fingerprint\n"
            "for spec in (CalculatorTaskSpec, MazeTaskSpec, TwentyQuestionsTaskSpec):\n"
            "    print(fingerprint(spec(num_train=40, num_held_out=10).build()))",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    same = [fingerprint(TASKS[name]) for name in ("calculator", "maze", "twenty questions")]
    assert made.stdout.split() == same


@names
def test_the_expert_is_right_in_its_own_environment(name: str) -> None:
    task = TASKS[name]
    for index in (*task.train, *task.held_out):
        answer = task.answer_text(index)
        assert answer is not None
        assert task.score(index, answer) >= task.correct_score
        replies = task.replies(index)
        assert replies is not None
        (messages,) = replies
        assert messages[-1]["role"] == "assistant"
        said = [m["content"] for m in messages if m["role"] == "assistant"]
        assert "\n".join(said) == answer


@names
def test_a_response_that_does_not_end_is_not_right(name: str) -> None:
    task = TASKS[name]
    turns = (task.answer_text(0) or "").split("\n")
    assert task.score(0, "\n".join(turns[:-1])) < task.correct_score
    assert task.score(0, "") < task.correct_score


@names
@pytest.mark.parametrize("reply", REPLIES)
def test_no_reply_makes_an_environment_raise(name: str, reply: Reply) -> None:
    environment = TASKS[name].begin(0)
    environment.reset(0, 0)
    result = environment.step(reply)
    assert isinstance(result, TurnResult)
    assert result.done or result.messages
    environment.close()


@names
@given(st.text())
def test_no_text_makes_an_environment_raise(name: str, text: str) -> None:
    assert TASKS[name].score(0, text) <= max(TASKS[name].correct_score, 0.0)


@names
def test_a_conversation_that_says_nothing_ends(name: str) -> None:
    task = TASKS[name]
    played = play(task.begin(0), 0, ["[?]"] * 100)
    assert played.done
    assert played.reward < task.correct_score


@names
def test_a_reply_that_was_cut_off_gains_nothing(name: str) -> None:
    task = TASKS[name]
    environment = task.begin(0)
    environment.reset(0, 0)
    first = environment.step(Reply(0, "[1+", "[1+"))
    second = first
    if not first.done:
        second = environment.step(Reply(1, "u", "u", finished=False))
    assert second.done
    total = (first.reward or 0.0) + (0.0 if first.done else second.reward or 0.0)
    assert total == task.unfinished_score


@names
def test_every_character_of_a_conversation_is_in_the_alphabet(name: str) -> None:
    task = TASKS[name]
    alphabet = set(task_alphabet(task))
    played = play(task.begin(0), 0, ["[1//0]", "[", "u", "d", "l", "r", "a1?", "=1", "[1+1]"] * 3)
    for message in played.messages:
        if message["role"] != "assistant":
            assert set(str(message["content"])) <= alphabet
    for index in (*task.train, *task.held_out):
        (replies,) = task.replies(index) or [[]]
        assert {c for m in replies for c in str(m["content"])} <= alphabet


@names
def test_a_conversation_is_rendered_with_an_end_for_every_turn(name: str) -> None:
    task = TASKS[name]
    spec = TokenizerSpec(alphabet=task_alphabet(task), chat_template=TURNS)
    tokenizer = spec.build()
    (replies,) = task.replies(3) or [[]]
    messages = [*(task.messages(3) or []), *replies]
    ids = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False))
    said = [m["content"] + ("<eos>" if m["role"] == "assistant" else "\n") for m in messages]
    assert tokenizer.decode(ids) == "".join(said)
    assert ids.count(tokenizer.eos_id) == sum(m["role"] == "assistant" for m in messages)


REFUSED: list[tuple[Spec, str]] = [
    (MazeTaskSpec(size=2, num_train=10, num_held_out=3),
     "task 'maze' has only about 12 different prompts, and 13 are asked for\n    lower "
     "task.num_train or task.num_held_out, or make the task larger"),
    (TwentyQuestionsTaskSpec(prompt_template="Ask!"),
     "'task.prompt_template' is 'Ask!', which has no place for the candidates\n    write "
     "{objects} where they stand"),
    (TwentyQuestionsTaskSpec(num_objects=17, num_attributes=4),
     "4 attributes cannot tell 17 objects apart\n    give at least 5: task.num_attributes"),
    (CalculatorTaskSpec(operators="+/"),
     "'task.operators' is '+/'\n    give some of the characters + - *"),
    (CalculatorTaskSpec(prompt_template="?"),
     "'task.prompt_template' is '?', which has no place for the expression\n    write "
     "{expression} where it stands"),
    (CalculatorTaskSpec(max_terms=4, max_digits=4),
     "task 'calculator' with 4 numbers of 4 digits has expressions that the calculator refuses\n "
     "   lower task.max_terms or task.max_digits: at most 64 characters and values of 15 digits"),
    (SearchTaskSpec(num_towns=10, num_train=8, num_held_out=3),
     "task 'search' has one question for each of 10 towns, and 11 are asked for\n    lower "
     "task.num_train or task.num_held_out, or raise task.num_towns"),
    (SearchTaskSpec(num_towns=2001),
     "a world of 2001 towns has not enough names\n    give at most 2000: task.num_towns"),
    (SearchTaskSpec(prompt_template="?"),
     "'task.prompt_template' is '?', which has no place for the question\n    write {question} "
     "where it stands"),
    (TableQuestionsSpec(kinds=("totals",)),
     "'task.kinds': there is no kind 'totals' of question; did you mean 'total'?\n    give some "
     "of total, where, product, largest, average"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "said"), REFUSED)
def test_specs_that_are_refused(spec: Spec, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec.build()
    assert str(refused.value) == said
